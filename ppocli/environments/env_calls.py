"""Calls of environments: several at a time, with a time limit and retries, and checks of their
results. Errors name episode, turn, file and line."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ppocli.config.schema import EnvConfig
from ppocli.config.text import error_line, error_text, raised_at, short_path
from ppocli.config.user_code import shorten
from ppocli.data.prompt_set import PromptBatch, PromptSet
from ppocli.environments.registry import EnvironmentClass
from ppocli.environments.wording import escape_surrogates, is_observation
from ppocli.errors import RewardError
from ppocli.rewards import guard
from ppocli.runs.daemon import awaited, in_daemon, in_loop, leave_loop
from ppocli.runs.episode import Step
from ppocli.sampling.token_choice import ROLLOUT, USER


@dataclass(frozen=True, slots=True)
class Called:
    """One call of an environment: ``reset``, or ``step``."""

    environment: Any
    """None: make a new one"""
    episode: int
    turn: int
    """0: ``reset``"""
    arguments: Mapping[str, Any]
    """of ``reset``: all data of the episode; of ``step``: the response"""


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of a call."""

    environment: Any
    result: Any = None
    """of ``reset``: what it returned; of ``step``: a :class:`Step`"""
    error: RewardError | None = None


class CallTimeoutError(Exception):
    """A call took longer than ``env.timeout``."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(f"still running after {seconds:g} s (env.timeout)")


class Calls:
    """Makes calls for one run.

    Args:
        seed: of the environments' random numbers, together with stream, episode and turn.
        group_size: number of rollouts of one prompt that are compared (``ppo.n``): ``reset`` gets
            the same random numbers in all of them, so that they play the same game.
    """

    def __init__(self, what: EnvironmentClass, cfg: EnvConfig, seed: int, group_size: int = 1
                 ) -> None:
        self.what, self.cfg, self.seed, self.group_size = what, cfg, seed, group_size

    @property
    def waits(self) -> bool:
        """Whether calls are likely to wait for others."""
        return self.what.waits or self.cfg.workers > 1

    def answers(self, calls: Sequence[Called], stream: int) -> list[Answered]:
        """Make the calls: all at once if they are ``async``, else ``env.workers`` at a time.

        Raises:
            RewardError: one failed, and ``env.on_error`` is ``stop``.
        """
        make = partial(self._tried, stream=stream)
        with guard.contained(self.what.label, "env.fn", lambda: f"{len(calls)} calls"):
            if self.what.waits:
                outcomes = self._together(calls, stream)
            elif self.cfg.workers > 1 and len(calls) > 1:
                with ThreadPoolExecutor(self.cfg.workers) as pool:
                    outcomes = list(pool.map(make, calls))
            else:
                outcomes = [make(call) for call in calls]
        for one in outcomes:
            if one.error is not None and self.cfg.on_error == "stop":
                raise one.error
        return outcomes

    def rehearse(self, prompts: PromptSet) -> None:
        """Try the environment: ``reset`` with the first prompt, and one step with an empty turn.

        Raises:
            RewardError: one of the two fails.
        """
        trial = Calls(self.what, replace(self.cfg, on_error="stop"), self.seed)
        begun, = trial.answers([Called(None, 0, 0, reset_arguments(prompts, 0))], USER)
        trial.answers([Called(begun.environment, 0, 1, {"response": ""})], USER)

    def _together(self, calls: Sequence[Called], stream: int) -> list[Answered]:
        answered = 0

        async def one(call: Called) -> Answered:
            nonlocal answered
            outcome = await self._awaited(call, stream)
            answered += 1
            return outcome

        async def together() -> list[Answered]:
            return list(await asyncio.gather(*map(one, calls)))

        # each call has a limit of its own; one that never awaits would block all others
        limit, before = self.cfg.timeout, 0
        seconds = None if limit is None else 2 * (1 + self.cfg.retries) * limit
        begun = in_loop(together(), "environments")
        try:
            while not wait([begun], seconds).done:
                if answered == before:
                    raise RewardError(
                        f"{self.what.label} is async and awaits nothing: {len(calls) - answered} "
                        f"calls are {CallTimeoutError(limit)}.", where="env.timeout",
                        fix="await what waits, or make reset and step plain methods")
                before = answered
            return begun.result()
        except BaseException:
            begun.cancel()
            leave_loop("environments")
            raise

    async def _awaited(self, call: Called, stream: int) -> Answered:
        for left in range(self.cfg.retries, -1, -1):
            try:
                environment, result = self._begun(call, stream)
                if inspect.isawaitable(result):
                    result = await self._in_time(result)
                return Answered(environment, self._checked(call, result))
            except BaseException as error:
                if (outcome := self._failure(call, error, left)) is not None:
                    return outcome
        raise AssertionError

    async def _in_time(self, result: Any) -> Any:
        limit = asyncio.timeout(self.cfg.timeout)
        try:
            async with limit:
                return await result
        except TimeoutError:
            if limit.expired():  # else the environment has raised it
                raise CallTimeoutError(self.cfg.timeout) from None
            raise

    def _tried(self, call: Called, *, stream: int) -> Answered:
        for left in range(self.cfg.retries, -1, -1):
            try:
                environment, result = self._limited(partial(self._begun, call, stream))
                return Answered(environment, self._checked(call, result))
            except BaseException as error:
                if (outcome := self._failure(call, error, left)) is not None:
                    return outcome
        raise AssertionError

    @staticmethod
    def _checked(call: Called, result: Any) -> Any:
        if call.turn:
            return as_step(result)
        if not is_observation(result):
            raise TypeError(f"reset returned {shorten(repr(result))}, neither text nor messages")
        return escape_surrogates(result)

    def _failure(self, call: Called, error: BaseException, left: int) -> Answered | None:
        """The outcome of a call that failed; None to try again. A call past its time limit isn't
        tried again, since it may still be running."""
        if not guard.is_own_error(error):
            raise error
        if left and not isinstance(error, CallTimeoutError):
            return None
        return Answered(call.environment, error=self._failed(call, error))

    def _begun(self, call: Called, stream: int) -> tuple[Any, Any]:
        """The environment, and the result of its method."""
        what, numbers = self.what, [self.seed, stream, call.episode, call.turn]
        shared = call.turn == 0 and stream == ROLLOUT and self.group_size > 1
        rng = np.random.default_rng(
            [self.seed, stream, call.episode // self.group_size, 0] if shared else numbers)
        if call.turn == 0:
            environment, takes = what.make(), what.reset_names
            arguments = {**call.arguments, "rng": rng}
            result = environment.reset(**{name: value for name, value in arguments.items()
                                          if takes is None or name in takes})
        else:
            environment, named = call.environment, {"rng": rng} if what.step_takes_rng else {}
            result = environment.step(call.arguments["response"], **named)
        if shared:  # if reset keeps the generator, later numbers are the episode's own
            state = np.random.default_rng([*numbers, 1]).bit_generator.state
            if inspect.isawaitable(result):
                result = _then(result, partial(setattr, rng.bit_generator, "state", state))
            else:
                rng.bit_generator.state = state
        if inspect.isawaitable(result) and not what.waits:
            result = awaited(_awaited(result), "environments")
        return environment, result

    def _limited(self, work: Callable[[], Any]) -> Any:
        if self.cfg.timeout is None:
            return work()
        future = in_daemon(work, f"environment {self.what.label}")
        if not wait([future], self.cfg.timeout).done:
            leave_loop("environments")
            raise CallTimeoutError(self.cfg.timeout)
        return future.result()

    def _failed(self, call: Called, error: BaseException) -> RewardError:
        doing = "reset" if call.turn == 0 else f"step, turn {call.turn},"
        shown = "" if call.turn == 0 else (
            f"\n  response: {shorten(str(call.arguments['response']))}")
        where = raised_at(error, self.what.file)
        if where is None or where.startswith(short_path(__file__)):  # an error in its result
            where = "env.fn"
        return RewardError(f"{self.what.label} failed in {doing} of episode {call.episode}: "
                           f"{type(error).__name__}: {error_text(error)}{shown}", where=where,
                           fix="correct the environment; env.on_error=truncate ends such "
                           "episodes there, drop leaves them out, env.retries=N tries again")


def reset_arguments(prompts: PromptSet | PromptBatch, place: int) -> dict[str, Any]:
    """Arguments that ``reset`` may take for the prompt at ``place``, besides random numbers."""
    return {**{name: cells[place] for name, cells in prompts.columns.items()},
            # these hide columns of the same names
            "prompt": prompts.texts[place],
            "messages": prompts.messages[place] if prompts.messages else None}


async def _awaited(result: Any) -> Any:
    return await result


async def _then(result: Any, work: Callable[[], None]) -> Any:
    """The value of an awaitable, after which ``work`` is called."""
    value = await result
    work()
    return value


def as_step(result: Any) -> Step:
    """The result of ``step``, a :class:`Step` or ``(observation, reward, done)``, checked.

    Raises:
        TypeError, ValueError: it is something else, or the reward is no finite number.
    """
    if isinstance(result, (tuple, list)) and len(result) == 3:
        result = Step(*result)
    if not all(hasattr(result, name) for name in ("observation", "reward", "done")):
        raise TypeError(f"step returned {shorten(repr(result))}, not a Step or "
                        "(observation, reward, done)")
    if isinstance(result.done, str):  # "False" is true
        raise TypeError(f"done is the text {shorten(repr(result.done))}, neither True nor False")
    reward = float(result.reward)
    if not math.isfinite(reward) or abs(reward) > 3e38:
        raise ValueError(f"the reward is {reward:g}, which is no finite number")
    observation = result.observation
    if not is_observation(observation):
        raise TypeError(f"the observation is {shorten(repr(observation))}, neither text nor "
                        "messages")
    failed = getattr(result, "failed", None)
    if isinstance(failed, BaseException):
        failed = error_line(failed)
    return Step(escape_surrogates(observation) or None, reward, bool(result.done),
                None if failed in (None, False) else escape_surrogates(str(failed)))
