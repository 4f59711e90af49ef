"""What happens in an episode, as plain data: what an environment answers, and a sample of several
turns as rewards, figures and people read it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to one turn of the policy. Made by ``step`` of the user's own."""

    observation: Any = None
    """text that follows the turn, or messages where ``prompts.chat`` renders them; None: nothing"""
    reward: float = 0.0
    """of this turn; lands on its last token"""
    done: bool = False
    """whether the episode is over"""
    failed: str | None = None
    """what went wrong in a tool, for figures and samples; the policy reads the observation alone"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy and the answer to it."""

    response: str
    """special tokens left out, trimmed at a stop sequence"""
    tokens: int
    reward: float = 0.0
    observation: str = ""
    observation_tokens: int = 0
    failed: str | None = None
    """as of :class:`Step`"""


DONE, TURNS, TOKENS, ERROR = "done", "turns", "tokens", "error"


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    opening: str
    """what ``reset`` said"""
    turns: tuple[Turn, ...]
    ended: str
    """``done`` by the environment; or cut off: at ``env.max_turns`` (``turns``), ``env.max_tokens``
    (``tokens``) or a failed call (``error``)"""
    error: str | None = None
    """of ``ended="error"``: what the environment raised"""
    environment: Any = None
    """the user's own object, on the process that has played it, until rewards have seen it"""

    @property
    def transcript(self) -> str:
        """All that follows the prompt, as one text."""
        return self.opening + "".join(turn.response + turn.observation for turn in self.turns)

    @property
    def score(self) -> float:
        """The rewards of all turns."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def token_rewards(self) -> list[float]:
        """The reward of each token that the policy said: a turn's lies on its last one."""
        found: list[float] = []
        for turn in self.turns:
            found += [0.0] * (turn.tokens - 1) + [float(turn.reward)]
        return found


def told_alone(episodes: Sequence[Episode]) -> list[Episode]:
    """The same without the environments themselves, for other processes and later phases."""
    return [replace(one, environment=None) for one in episodes]


def turn_rows(episode: Episode) -> list[dict[str, Any]]:
    """The turns as samples.jsonl and pages show them."""
    return [{"response": turn.response, "observation": turn.observation, "reward": turn.reward,
             **({"failed": turn.failed} if turn.failed else {})} for turn in episode.turns]


def turn_numbers(episodes: Sequence[Episode], width: int) -> list[list[int]]:
    """[B][width] which turn each token that the policy said belongs to; behind them the last."""
    rows = []
    for episode in episodes:
        row = [k for k, turn in enumerate(episode.turns) for _ in range(turn.tokens)]
        rows.append(row + [row[-1]] * (width - len(row)))
    return rows
