"""Episodes: a sampler that lets an environment answer, turn by turn, until each is over.

A sample is then tokens of which the policy has said some: prompt and observations are context, and
no loss, no KL and no advantage knows of them. What it said stays the ids that it sampled.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from ppocli.config.schema import EnvConfig
from ppocli.data.data_set import PromptBatch
from ppocli.distributed.backend import without_autocast_cache
from ppocli.distributed.ranks import StopFlag
from ppocli.environments.env_calls import (
    Answered,
    Called,
    Calls,
    ChatWords,
    PlainWords,
    RenderedText,
    reset_arguments,
)
from ppocli.errors import InputError
from ppocli.models.layout import Sequences, padded
from ppocli.models.policy import Policy
from ppocli.runs.daemon import in_daemon, outcome_of
from ppocli.runs.episode import DONE, ERROR, TOKENS, TURNS, Episode, Step, Turn
from ppocli.sampling.conversation import Conversation
from ppocli.sampling.sampler import AheadSampler, GenerationModel, Sampler
from ppocli.sampling.samples import Samples, SamplingSpec, decode_responses


@dataclass(slots=True)
class Game:
    """An episode under way."""

    row: int
    """its place among those that are played together"""
    episode: int
    """number of the sample"""
    ids: list[int]
    """all tokens so far, the prompt's first; the last may still be to be read"""
    start: int
    """tokens of the prompt"""
    environment: Any
    opening: str = ""
    context: tuple[Any, ...] = ()
    """as of :class:`Episode`"""
    actions: list[int] = field(default_factory=list)
    """places in ``ids`` of what the policy said"""
    logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    finished: bool = False
    """whether the policy ended its last turn itself"""
    ended: str | None = None
    error: str | None = None

    def room(self, most: int) -> int:
        """Tokens that may still follow, of ``most`` behind the prompt."""
        return most - (len(self.ids) - self.start)

    def record(self) -> Episode:
        """The finished episode."""
        environment = getattr(self.environment, "wrapped", self.environment)  # of an adapter
        return Episode(self.opening, tuple(self.turns), self.ended or DONE, self.error, environment,
                       self.context)


class EpisodeSampler:
    """Plays ``env.fn`` with the policy's turns from another sampler.

    Args:
        inner: of the turns.
        calls: of the environment.

    Raises:
        InputError: as :class:`ppocli.environments.env_calls.ChatWords`.
    """

    def __init__(self, inner: Sampler, calls: Calls, tokenizer: Any, *, chat: bool) -> None:
        self.inner = inner
        self.calls, self.tokenizer = calls, tokenizer
        self.cfg: EnvConfig = calls.cfg
        self._ahead: BegunEpisodes | None = None
        self.words = ChatWords(tokenizer, calls.what.tools) if chat else PlainWords(tokenizer)
        self.repeatable = inner.repeatable and calls.what.deterministic
        self.logprobs_match = inner.logprobs_match

    def acting(self, policy: Policy) -> AbstractContextManager[Policy]:
        """As :class:`~ppocli.sampling.sampler.Sampler`."""
        return self.inner.acting(policy)

    def sample(self, prompts: PromptBatch, spec: SamplingSpec, stream: int, model: GenerationModel,
               stop: StopFlag, *, at_once: int, chunk: int) -> Iterator[Samples]:
        """As :class:`~ppocli.sampling.sampler.Sampler`, with :attr:`Samples.episodes`."""
        model = replace(model, split=None)
        if self._ahead is not None:
            # the user's class may not be made for two threads
            self._ahead.take(slice(None), stop.check)

        def converse(games: Sequence[Game]) -> AbstractContextManager[Conversation]:
            return self.inner.converse([game.ids[:game.start] for game in games],
                                       [game.episode for game in games], spec, stream, model, stop)

        for start in range(0, len(prompts), chunk):
            rows = range(start, min(start + chunk, len(prompts)))
            yield Samples.joined([
                self._play(prompts.rows(rows[i:i + at_once]), spec, stream, converse, stop.check)
                for i in range(0, len(rows), at_once)])

    def converse(self, *_: Any, **__: Any) -> AbstractContextManager[Conversation]:
        """Not of a sampler whose contexts an environment continues."""
        raise NotImplementedError

    def begin(self, prompts: PromptBatch, spec: SamplingSpec, stream: int, *, ahead: bool = False
              ) -> "BegunEpisodes":
        """As :class:`~ppocli.sampling.sampler.AheadSampler`, with :attr:`Samples.episodes`.

        They are played in a thread with a tokenizer of its own: one that is in use may refuse.
        """
        player = copy.copy(self)
        player.words = copy.copy(self.words)
        player.words.tokenizer = player.tokenizer = copy.deepcopy(self.tokenizer)
        inner = cast(AheadSampler, self.inner)
        talk = inner.turns(prompts.episodes, spec, stream, lambda: None)
        work = partial(player._play, prompts, spec, stream, lambda _: nullcontext(talk),
                       lambda: None)
        begun = BegunEpisodes(in_daemon(partial(without_autocast_cache, work), "episodes"))
        if ahead:
            self._ahead = inner.ahead = begun
        return begun

    def _play(self, prompts: PromptBatch, spec: SamplingSpec, stream: int,
              converse: Callable[[Sequence[Game]], AbstractContextManager[Conversation]],
              check: Callable[[], None]) -> Samples:
        """One episode per prompt.

        Args:
            check: called before each turn; may raise to stop.
        """
        games = self._begin(prompts, stream)
        live = self._groups(games)
        waiting: list[Callable[[], None]] = [lambda: None] * len(live)
        with converse(games) as talk:
            while any(live):
                for g, settle in enumerate(waiting):
                    check()
                    settle()
                    live[g] = [game for game in live[g] if game.ended is None]
                    texts = self._turn(talk, live[g], spec)
                    waiting[g] = self._call_environments(live[g], texts, stream, check)
        return samples_of(games)

    def _groups(self, games: list[Game]) -> list[list[Game]]:
        """Which episodes take their turns together: all, or halves that do so in turn where calls
        wait for others, so that one half speaks while the other's environments think. Who speaks
        with whom does not depend on how long anything takes."""
        if not self.calls.waits or len(games) == 1:
            return [games]
        half = (len(games) + 1) // 2
        return [games[:half], games[half:]]

    def _call_environments(self, games: Sequence[Game], texts: Sequence[str], stream: int,
                           check: Callable[[], None]) -> Callable[[], None]:
        """Put a turn of some episodes to their environments; what is returned waits for the answers
        and writes them down."""
        work = partial(self.calls.answers, [
            Called(game.environment, game.episode, len(game.turns) + 1, {"response": text})
            for game, text in zip(games, texts, strict=True)], stream)
        aside = self.calls.waits and games
        begun = in_daemon(partial(without_autocast_cache, work), "environments") if aside else None

        def settle() -> None:
            answers = work() if begun is None else outcome_of(begun, check)
            for game, text, answer in zip(games, texts, answers, strict=True):
                self._answered(game, text, answer)

        return settle

    def _begin(self, prompts: PromptBatch, stream: int) -> list[Game]:
        resets = [Called(None, episode, 0, reset_arguments(prompts, i))
                  for i, episode in enumerate(prompts.episodes)]
        games = []
        for i, answer in enumerate(self.calls.answers(resets, stream)):
            prompt = prompts.tokens[i][prompts.mask[i]].tolist()
            ids, opening = self.words.opening(prompt, resets[i].arguments["messages"],
                                              answer.result)
            game = Game(i, prompts.episodes[i], [*ids, *opening.ids], len(prompt),
                        answer.environment, opening.text, opening.messages)
            if game.room(self.cfg.max_tokens) < 1:
                what = "What reset says" + " and the tools" * bool(self.calls.what.tools)
                raise InputError(f"{what} takes {len(game.ids) - len(prompt)} tokens and leaves no "
                                 f"room for a turn in episode {game.episode}.",
                                 where="env.max_tokens", fix="raise it, or say less")
            if answer.error is not None:
                game.error = str(answer.error.what)
            games.append(game)
        return games

    def _turn(self, talk: Conversation, games: Sequence[Game], spec: SamplingSpec) -> list[str]:
        """One turn of the policy in each of these episodes, as text."""
        if not games:
            return []
        limits = [min(spec.max_new_tokens, game.room(self.cfg.max_tokens)) for game in games]
        before = [game.ids for game in games]
        out = talk([game.row for game in games], before, limits)
        for row, (game, ids) in enumerate(zip(games, out.ids, strict=True)):
            game.ids = [*before[row], *ids]
            game.actions += range(len(before[row]), len(game.ids))
            game.logprobs += out.logprobs[row, :len(ids)].tolist()
            game.values += out.values[row, :len(ids)].tolist()
            game.finished = bool(out.finished[row])
        return decode_responses(self.tokenizer, before, out.ids, spec)

    def _answered(self, game: Game, text: str, answer: Answered) -> None:
        """Write down a turn and the answer to it; what the policy is to read next waits."""
        step = Step(done=True) if answer.error is not None else answer.result
        between = RenderedText([])
        if not step.done or step.observation is not None:
            between = self.words.between(step.observation, ended=game.finished, last=game.ids[-1])
        if answer.error is not None or game.error is not None:
            game.ended, game.error = ERROR, game.error or str(answer.error and answer.error.what)
        elif step.done:
            game.ended = DONE
        elif len(game.turns) + 1 == self.cfg.max_turns:
            game.ended = TURNS
        game.ids += between.ids
        if game.ended is None and game.room(self.cfg.max_tokens) < 1:
            game.ended = TOKENS
        before = sum(turn.tokens for turn in game.turns)
        game.turns.append(Turn(text, len(game.actions) - before, step.reward, between.text,
                               0 if game.ended else len(between.ids), step.failed,
                               between.messages))


@dataclass(frozen=True, slots=True)
class BegunEpisodes:
    """Episodes that are being played."""

    played: Future[Samples]

    def take(self, rows: slice, poll: Callable[[], None]) -> Samples:
        """As :class:`~ppocli.sampling.sampler.BegunSamples`; RewardError: the environment
        failed."""
        return outcome_of(self.played, poll).rows(rows)

    def settle(self) -> None:
        """As :class:`~ppocli.sampling.sampler.BegunSamples`."""
        self.take(slice(None), lambda: None)


def samples_of(games: Sequence[Game]) -> Samples:
    """Finished episodes as samples, each through its last action."""
    sequences = Sequences.of_places([game.ids[:game.actions[-1] + 1] for game in games],
                                    [game.actions for game in games])
    return Samples(sequences, padded([game.logprobs for game in games], torch.float32),
                   padded([game.values for game in games], torch.float32),
                   torch.tensor([game.ended == DONE and game.finished for game in games]),
                   episodes=[game.record() for game in games])
