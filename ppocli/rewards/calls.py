"""A checked reward or metric function, and one call of it: its arguments by name, retries, and a
time limit.

The names of a function's parameters decide its arguments, so that functions written for other
libraries work unchanged: see :mod:`ppocli.rewards.styles`.
"""

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter
from operator import add
from typing import Any, TypeVar

from ppocli.config.text import error_line, error_text, raised_at, suggestion
from ppocli.config.user_code import Located, shorten
from ppocli.distributed.ranks import StopRequested
from ppocli.errors import PpocliError, RewardError
from ppocli.rewards.reward_records import RewardRequest
from ppocli.runs.daemon import awaited, in_daemon, leave_loop

log = logging.getLogger(__name__)

T = TypeVar("T")
Source = Callable[[RewardRequest], Any]
"""makes an argument of a request; raises KeyError where the request lacks what it needs"""


def fresh(cells: Sequence[Any]) -> list[Any]:
    """A new list of the cells of a column; lists and dicts among them are copied, because the
    samples of a prompt share its cell."""
    return [copy.deepcopy(cell) if isinstance(cell, (list, dict)) else cell for cell in cells]


def column_of(name: str, request: RewardRequest) -> list[Any]:
    """A new list of a field of the request, one value per sample."""
    return list(getattr(request, name))


def steps_of(request: RewardRequest) -> list[Any]:
    """The steps of each response; where nothing defines them, the column of that name."""
    if request.steps is None:
        return fresh(request.columns["steps"])
    return [list(texts) for texts in request.steps]


def conversations_of(request: RewardRequest) -> list[list[dict[str, Any]]] | None:
    """[N] prompts and responses as conversations; None where prompts were plain text."""
    chats = list(request.chats)
    if not chats and request.messages:
        for messages, response in zip(request.messages, request.responses, strict=True):
            chats.append([*messages, {"role": "assistant", "content": response}])
    return fresh(chats) if chats else None


ARGUMENTS: Mapping[str, Source] = {
    "samples": lambda r: list(map(add, r.prompts, r.responses)),
    "prompts": partial(column_of, "prompts"),
    **dict.fromkeys(("outputs", "responses", "completions"), partial(column_of, "responses")),
    **dict.fromkeys(("completion_ids", "response_ids", "output_ids"),
                    lambda r: [list(ids) for ids in r.response_ids]),
    "chats": conversations_of,
    "tokenizer": lambda r: r.tokenizer,
    "steps": steps_of,
    "log_extra": lambda r: r.logs.extra, "log_metric": lambda r: r.logs.metric}
"""what a function may ask for by name. Every call gets new lists, which it may change."""
STOPS = (KeyboardInterrupt, StopRequested)
"""requests from outside, which pass through the user's code"""


@dataclass(frozen=True, slots=True)
class Style:
    """A calling convention. :mod:`ppocli.rewards.styles` has those of other libraries."""

    name: str
    sources: Mapping[str, Source]
    """argument -> how it is made of a request; columns of the prompts follow"""
    invoke: Callable[..., Any] | None = None
    """``invoke(call, arguments, constants, N)`` in place of one call for all samples"""
    scores: Callable[[Any, RewardRequest], Any] | None = None
    """takes the scores out of what was returned and logs the rest; ValueError: they are missing"""
    align: Callable[[list[float], RewardRequest, int], list[float]] | None = None
    """moves the numbers of one sample from the function's tokens to those of the response"""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward or metric function with its configured arguments, made by
    :func:`~ppocli.rewards.resolve.bind`."""

    located: Located
    label: str
    """the function with its file and line, for messages"""
    call: Callable[..., Any]
    """the function, or a class, or the object that was made of it"""
    parameters: tuple[Parameter, ...]
    style: Style
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """configured arguments of each call"""
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """configured arguments of a class's constructor"""
    name: str = ""
    """among the rewards that are summed"""
    weight: float = 1.0
    """in their sum"""

    @property
    def takes_steps(self) -> bool:
        """Whether it takes the steps of responses; lists that it returns are then step scores."""
        return "steps" not in self.kwargs and any(p.name == "steps" for p in self.parameters)

    def check_columns(self, columns: Sequence[str], *, steps: bool = False) -> None:
        """Check that every required parameter has a source, now that the columns are known.

        Args:
            steps: whether the steps of responses are defined.

        Raises:
            RewardError: a parameter is neither an argument of the style nor a column nor in the
                kwargs.
        """
        self.arguments(RewardRequest([], [], [], {name: [] for name in columns}, None,
                                     steps=[] if steps else None))

    def arguments(self, request: RewardRequest) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments of a call. They are new lists, since a call that failed
        may have changed them. A RewardError where nothing provides a required parameter."""
        positional, named = list[Any](), dict[str, Any]()
        for parameter in self.parameters:
            if parameter.kind is Parameter.VAR_KEYWORD:
                self._add_others(named, request)
            elif parameter.kind is not Parameter.VAR_POSITIONAL:
                try:
                    value = self._value(parameter.name, request)
                except KeyError:
                    if parameter.default is Parameter.empty:
                        raise self._unbound(parameter.name, list(request.columns)) from None
                    value = parameter.default
                if parameter.kind is Parameter.POSITIONAL_ONLY:
                    positional.append(value)
                elif value is not parameter.default:
                    named[parameter.name] = value
        return positional, named

    def _add_others(self, named: dict[str, Any], request: RewardRequest) -> None:
        """All that a ``**kwargs`` is given."""
        for name in {**request.columns, **self.style.sources, **self.kwargs}:
            if name not in named:
                with suppress(KeyError):
                    named[name] = self._value(name, request)

    def _value(self, name: str, request: RewardRequest) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        source = self.style.sources.get(name)
        return fresh(request.columns[name]) if source is None else source(request)

    def _unbound(self, name: str, columns: Sequence[str]) -> RewardError:
        key = self.located.key
        if name == "steps":
            return RewardError(
                f"{self.label} takes the steps of responses, and nothing defines them.",
                where=f"{key}={self.located.spec}", fix="set reward.step_separator or "
                "reward.step_fn (for a served reward: in the run that uses it)")
        names = [one for one in self.style.sources if one != "steps"]
        near = suggestion(name, [*names, *columns])
        configure = f"; or set {kwargs_key(key)}.{name}=..." if key.endswith(".fn") else ""
        return RewardError(
            f"{self.label} needs an argument {name!r} that nothing provides. {near}".rstrip(),
            where=f"{key}={self.located.spec}",
            fix=f"use one of {', '.join(names)}; or a metadata column of the prompts (they have: "
                f"{', '.join(columns) or 'none'}; see prompts.columns){configure}")


@contextmanager
def torch_modes_kept(label: str, key: str, samples: Callable[[], str]) -> Iterator[None]:
    """Run the user's code in the block: ``label``, which ``key`` names, called with ``samples``. A
    RewardError where it has left one of torch's modes changed, with which the run would go on."""
    before = _torch_modes()
    yield
    if (after := _torch_modes()) != before:
        raise _left_changed(before, after, label, key, samples())


def _left_changed(before: dict[str, Any], after: dict[str, Any], label: str, key: str, samples: str
                  ) -> RewardError:
    changed = [f"torch's {name}" for name, value in before.items() if after[name] != value]
    return RewardError(f"{label} left {' and '.join(changed)} changed\n  {samples}", where=key,
                       fix="put it back before it returns, or use it as a context manager: "
                       "with torch.inference_mode(): ...")


def _torch_modes() -> dict[str, Any]:
    """Modes of torch; those that it starts with if it isn't loaded."""
    torch: Any = sys.modules.get("torch")
    return {"default dtype": str(torch.get_default_dtype()) if torch else "torch.float32",
            "default device": str(torch.get_default_device()) if torch else "cpu",
            "inference mode": bool(torch and torch.is_inference_mode_enabled()),
            "grad mode": torch.is_grad_enabled() if torch else True}


def ask(function: RewardFunction, request: RewardRequest, *, retries: int, timeout: float | None,
        read: Callable[[RewardFunction, RewardRequest, Any], T]) -> T:
    """What ``read`` (:mod:`ppocli.rewards.score_checks`) makes of what the function returns within
    ``timeout`` seconds (None: no limit, in the caller's thread). A call that raised is tried again
    ``retries`` times; one that took longer isn't: it may still be running. The program's errors,
    stop requests and Ctrl-C pass through; all else, ``SystemExit`` too, is a RewardError."""
    failures = 0
    while True:
        try:
            return read(function, request, _call(function, request) if timeout is None else
                        _call_in_time(function, request, timeout))
        except (PpocliError, *STOPS) as error:
            name_reward_key(error, function.located.key)
            raise
        except BaseException as error:
            failures += 1
            _warn_of_failure(function, request, error, failures, retries)


def _warn_of_failure(function: RewardFunction, request: RewardRequest, error: BaseException,
                     failures: int, retries: int) -> None:
    """Warn of a call that failed, ``failures`` times in a row by now, and drop what it logged.

    Raises:
        RewardError: it was one failure too many.
    """
    place = raised_at(error, function.located.file)
    if failures > retries:
        tries = f", {failures} times in a row," if failures > 1 else ""
        raise RewardError(
            f"{function.label} raised{tries} {type(error).__name__}: {error_text(error)}\n"
            f"  {_batch(request)}", where=place or function.located.key,
            fix="correct the function; reward.retries=N repeats a failed call") from error
    request.logs.columns.clear()
    request.logs.figures.clear()
    log.warning("%s raised %s at %s; trying again (%d of %d)", function.label, error_line(error),
                place, failures, retries)


def _batch(request: RewardRequest) -> str:
    first = shorten(request.prompts[0] + request.responses[0])
    return f"batch: {len(request.responses)} samples, the first is {first}"


def _call_in_time(function: RewardFunction, request: RewardRequest, timeout: float) -> Any:
    future = in_daemon(partial(_call, function, request), f"reward {function.located.spec}")
    if not wait([future], timeout).done:
        leave_loop("rewards")
        raise RewardError(
            f"{function.label} was still running after {timeout:.1f} s "
            f"(reward.timeout={timeout:g}).", where="reward.timeout",
            fix="make it faster, or raise reward.timeout (null: no limit)")
    return future.result()


def _call(function: RewardFunction, request: RewardRequest) -> Any:
    with torch_modes_kept(function.label, function.located.key, partial(_batch, request)):
        positional, named = function.arguments(request)
        result = function.call(*positional, **named) if function.style.invoke is None else (
            function.style.invoke(function.call, named, function.kwargs, len(request.responses)))
        if inspect.iscoroutine(result):
            result = awaited(result, "rewards")
        # a generator's body runs here, under the same time limit and handling of errors
        return list(result) if isinstance(result, Iterator) else result


def kwargs_key(key: str) -> str:
    """``reward.fn`` -> ``reward.kwargs``; ``reward.fns.x.fn`` -> ``reward.fns.x.kwargs``."""
    return f"{key.removesuffix('.fn')}.kwargs"


def name_reward_key(error: BaseException, key: str) -> None:
    """Replace ``reward.kwargs`` in a built-in's error by the key of the reward that raised it."""
    if isinstance(error, PpocliError):
        named = kwargs_key(key)
        error.where = error.where and error.where.replace("reward.kwargs", named)
        error.fix = error.fix and error.fix.replace("reward.kwargs", named)
