"""What happens in an episode, as plain data: what an environment answers, and a sample of several
turns as rewards, figures and people read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppocli.config.text import finite_number


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
    messages: tuple[Mapping[str, Any], ...] = ()
    """the observation as messages, where the chat template rendered it"""


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
    context: tuple[Mapping[str, Any], ...] = ()
    """the messages before the first turn, where ``reset`` added to those of the prompt"""

    @property
    def transcript(self) -> str:
        """All that follows the prompt, as one text."""
        return self.opening + "".join(turn.response + turn.observation for turn in self.turns)

    def conversation(self, prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The whole episode as messages, through the last turn of the policy.

        Args:
            prompt: its messages.
        """
        messages = [dict(message) for message in self.context or prompt]
        for i, turn in enumerate(self.turns):
            messages.append({"role": "assistant", "content": turn.response})
            if i + 1 < len(self.turns):
                messages += map(dict, turn.messages)
        return messages

    @property
    def score(self) -> float:
        """The rewards of all turns."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def token_rewards(self) -> list[float]:
        """The reward of each token that the policy said: a turn's lies on its last one."""
        rewards: list[float] = []
        for turn in self.turns:
            rewards += [0.0] * (turn.tokens - 1) + [float(turn.reward)]
        return rewards


def without_environments(episodes: Sequence[Episode]) -> list[Episode]:
    """The same without the environments themselves, for other processes and later phases."""
    return [replace(one, environment=None) for one in episodes]


def turn_rows(episode: Episode) -> list[dict[str, Any]]:
    """The turns as samples.jsonl and pages show them."""
    return [{"response": turn.response, "observation": turn.observation, "reward": turn.reward,
             **({"failed": turn.failed} if turn.failed else {})} for turn in episode.turns]


POLICY, ENVIRONMENT = ">", "<"
"""the marks of who has said something"""
Sample = tuple[str, str | list[tuple[str, str]], float | None]
"""prompt, response (of an episode what :func:`transcript_turns` gives) and score, to be shown"""


def transcript_turns(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(:data:`POLICY` or :data:`ENVIRONMENT`, text) of an episode in its order, from its row of
    samples.jsonl: a turn's reward other than 0 stands in brackets before the answer to it, and how
    an episode was cut off at its end. Empty for a row of a single response."""
    turns = row.get("turns")
    if not isinstance(turns, list):
        return []
    transcript = [(ENVIRONMENT, str(row.get("opening", "")).strip())]
    for turn in turns:
        reward = finite_number(turn.get("reward"))
        answer = (f"[{reward:+g}]" if reward else "", str(turn.get("observation", "")).strip())
        transcript += [(POLICY, str(turn.get("response", "")).strip()),
                  (ENVIRONMENT, " ".join(filter(None, answer)))]
    if row.get("ended") not in (None, DONE):
        transcript.append((ENVIRONMENT, f"(cut off: {row.get('error') or row['ended']})"))
    return [(who, text) for who, text in transcript if text or who == POLICY]


def transcript_of(row: Mapping[str, Any]) -> str:
    """:func:`transcript_turns` as lines, each behind its mark."""
    return "\n".join(f"{who} {text}" for who, text in transcript_turns(row))


def in_a_table(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of samples.jsonl as trackers' tables take it: the same names for all, texts and numbers
    alone."""
    return dict(row) if "turns" not in row else {
        **{name: value for name, value in row.items() if name not in ("opening", "error")},
        "turns": transcript_of(row)}


def turn_numbers(episodes: Sequence[Episode], width: int) -> list[list[int]]:
    """[B][width] which turn each token that the policy said belongs to; behind them the last."""
    rows = []
    for episode in episodes:
        row = [k for k, turn in enumerate(episode.turns) for _ in range(turn.tokens)]
        rows.append(row + [row[-1]] * (width - len(row)))
    return rows
