"""Calls of environments: several at a time, with a time limit and retries, and checks of their
results, whose errors name episode, turn, file and line; and observations as token ids, appended to
a context. Nothing is tokenised again: the policy's turns keep the ids that it sampled."""

import asyncio
import inspect
import logging
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
from ppocli.data.chat_text import rendered_chat
from ppocli.data.data_set import PromptBatch, PromptSet
from ppocli.environments.registry import EnvironmentClass
from ppocli.errors import InputError, RewardError
from ppocli.rewards.calls import STOPS, torch_modes_kept
from ppocli.runs.daemon import awaited, in_daemon, in_loop, leave_loop
from ppocli.runs.episode import Step
from ppocli.sampling.samples import ROLLOUT, USER

log = logging.getLogger("ppocli")

_QUESTION = [{"role": "user", "content": "a question"}]
_ANSWER = [{"role": "assistant", "content": "<think>\nwords\n</think>\n\nan answer"}]
_FOLLOW_UP = [{"role": "user", "content": "more"}]


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
        with torch_modes_kept(self.what.label, "env.fn", lambda: f"{len(calls)} calls"):
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
        async def together() -> list[Answered]:
            return list(await asyncio.gather(*(self._awaited(call, stream) for call in calls)))

        begun = in_loop(together(), "environments")
        try:
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
        return result

    def _failure(self, call: Called, error: BaseException, left: int) -> Answered | None:
        """The outcome of a call that failed; None to try again. A call past its time limit isn't
        tried again, since it may still be running."""
        if isinstance(error, STOPS):
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
            result = awaited(_then(result), "environments")
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


async def _then(result: Any, work: Callable[[], None] = lambda: None) -> Any:
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
    if not isinstance(result, Step):
        raise TypeError(f"step returned {shorten(repr(result))}, not a Step or "
                        "(observation, reward, done)")
    if isinstance(result.done, str):  # "False" is true
        raise TypeError(f"done is the text {shorten(repr(result.done))}, neither True nor False")
    reward = float(result.reward)
    if not math.isfinite(reward) or abs(reward) > 3e38:
        raise ValueError(f"the reward is {reward:g}, which is no finite number")
    if not is_observation(result.observation):
        raise TypeError(f"the observation is {shorten(repr(result.observation))}, neither text nor "
                        "messages")
    failed: Any = result.failed
    if isinstance(failed, BaseException):
        failed = error_line(failed)
    return Step(result.observation or None, reward, bool(result.done),
                None if failed in (None, False) else str(failed))


# Observations -------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class RenderedText:
    """Text of an environment in a context."""

    ids: list[int]
    text: str = ""
    messages: tuple[Any, ...] = ()
    """the text's messages, if a chat template rendered them; of an opening also the prompt's"""


class PlainWords:
    """Observations as plain text, without a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, prompt: list[int], messages: Any, observation: Any
                ) -> tuple[list[int], RenderedText]:
        """The prompt's ids and what ``reset`` adds to them."""
        return prompt, self.between(observation)

    def between(self, observation: Any, *, ended: bool = True, last: int | None = None
                ) -> RenderedText:
        """An observation as token ids.

        Args:
            ended: whether a stop token ended the turn before.
            last: id of the last token of that turn.

        Raises:
            RewardError: the observation is no text.
        """
        if observation is None:
            return RenderedText([])
        if not isinstance(observation, str):
            raise RewardError(f"An observation is of type {type(observation).__name__}; without a "
                              "chat template it must be text.", where="env.fn",
                              fix="return a text, or set prompts.chat=true")
        ids = self.tokenizer(observation, add_special_tokens=False)["input_ids"]
        return RenderedText(list(ids), observation)


@dataclass
class ChatWords:
    """Observations as messages, rendered by the tokenizer's chat template.

    Raises:
        InputError: the template changes earlier messages when one is added, so that training and
            the next turn would read different texts; or it refuses a message.
    """

    tokenizer: Any
    tools: Sequence[Any] = ()

    def __post_init__(self) -> None:
        first = self._render(_QUESTION, ask=True)
        second = self._render([*_QUESTION, *_ANSWER, *_FOLLOW_UP], ask=True)
        third = self._render([*_QUESTION, *_ANSWER, *_FOLLOW_UP, *_ANSWER], ask=False)
        if not second.startswith(first + _ANSWER[0]["content"]) or not third.startswith(second):
            raise InputError(
                "The tokenizer's chat template changes earlier turns when a message is added (it "
                "may drop their thoughts), so that training and the next turn would read different "
                "texts.", where="prompts.chat, env.fn",
                fix="give the tokenizer a template that leaves the history as it is")
        if self.tools and self._render(_QUESTION, ask=True, tools=()) == first:
            log.warning("The tokenizer's chat template leaves out tools: the policy knows only "
                        "what the prompts say about them.")

    def _render(self, messages: Sequence[Any], *, ask: bool, tools: Sequence[Any] | None = None
                ) -> str:
        return rendered_chat(list(messages), "the messages of an episode", self.tokenizer,
                             tools=list(self.tools if tools is None else tools) or None, prompt=ask,
                             where="prompts.chat, env.fn")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def opening(self, prompt: list[int], messages: Any, observation: Any
                ) -> tuple[list[int], RenderedText]:
        """The prompt's ids, rendered again with the result of ``reset``: a text goes to the end of
        the last message, messages follow it.

        Raises:
            RewardError: ``reset`` returned a text, and the last message has none.
            InputError: the prompt was cut, so that its messages don't stand for it.
        """
        if observation is None and not self.tools:
            return prompt, RenderedText([])
        # other differences are the template's, which may contain the date
        whole, count = self._ids(self._render(messages, ask=True, tools=())), len(prompt)
        if count < len(whole) and (whole[:count] == prompt or whole[1 - count:] == prompt[1:]):
            raise InputError("A prompt was cut, so that the text of reset, or descriptions of "
                             "tools, can't be added to its conversation.",
                             where="prompts.max_length, env.fn", fix="leave such prompts out "
                             "(prompts.overlong=drop), or allow longer ones (prompts.max_length, "
                             "prompts.length_sampler)")
        if not isinstance(observation, str):
            added = list(observation or ())
            whole_messages = (*messages, *added)
            return (self._ids(self._render(whole_messages, ask=True)),
                    RenderedText([], text_of(added), whole_messages))
        *before, last = messages
        if not isinstance(last["content"], str):
            raise RewardError("reset returned a text, which can't go behind a message that holds "
                              f"{shorten(repr(last['content']))}.", where="env.fn",
                              fix="return a list of {role, content} messages")
        extended = {**last, "content": f"{last['content']}{observation}"}
        return (self._ids(self._render([*before, extended], ask=True)),
                RenderedText([], observation, (*before, extended)))

    def between(self, observation: Any, *, ended: bool, last: int) -> RenderedText:
        """As :meth:`PlainWords.between`: the end of the policy's message, unless its turn contains
        it, the observation, and the beginning of the policy's next message."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        messages = list(observation or ())
        whole = self._render([*_QUESTION, *_ANSWER, *messages], ask=True)
        before = self._render(_QUESTION, ask=True) + _ANSWER[0]["content"]
        rest = whole[len(before):]
        last_text = self.tokenizer.decode([last]) if ended else ""
        return RenderedText(self._ids(rest.removeprefix(last_text)), text_of(messages),
                            tuple(messages))


def is_observation(value: Any) -> bool:
    """Whether a value can be an observation: a text, messages, or None."""
    return value is None or isinstance(value, str) or (
        isinstance(value, (list, tuple))
        and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value))


def text_of(messages: Sequence[Any]) -> str:
    """Messages as text, in the form of samples."""
    return "".join(f"\n[{one.get('role', 'user')}] {one.get('content', '')}\n" for one in messages)

