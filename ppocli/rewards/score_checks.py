"""Checks of what reward and metric functions return.

Nothing is broadcast, swallowed or replaced by zero: a value is either converted without loss of
meaning (bool, int, NumPy and torch numbers, generators) or refused with the function, the sample's
index, its text and what was expected.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from ppocli.config.text import counted
from ppocli.config.user_code import shorten
from ppocli.errors import RewardError
from ppocli.rewards.calls import RewardFunction
from ppocli.rewards.reward_records import RewardRequest, Score, on_tokens

MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""scores become float32 tensors, in which anything larger is infinite"""
EXPECTED = {noun: "return one number per sample, such as scores.squeeze(-1) or scores[:, 1] of a "
            f"model's outputs; or one list of numbers per sample with as many as {count}"
            for noun, count in (("token", "its response has tokens"), ("step", "it has steps"))}
"""by what the numbers of a list are for"""
EXPECTED_STEPS = ("return one list per sample: the texts of its steps, which together are "
                  "the response or its beginning")
EXPECTED_METRICS = "return a dict: metric name -> a list with one finite number per sample"

T = TypeVar("T")


class BadValue(Exception):
    """Why a value can't be used; becomes a RewardError that names the function."""


def read_scores(function: RewardFunction, request: RewardRequest, returned: Any) -> list[Score]:
    """Scores that a function returned, one per sample: floats, or lists with one per response
    token. A RewardError for a wrong count, type, shape or a number that float32 can't hold."""
    if (type(returned) is list and len(returned) == len(request.responses)
            and set(map(type, returned)) == {float} and max(map(abs, returned)) <= MAX_FLOAT32):
        return list(returned)
    return _read_each(function, request, returned)


def _read_each(function: RewardFunction, request: RewardRequest, returned: Any) -> list[Score]:
    """As :func:`read_scores`, of scores of any kind, each per token or per step if it is a list."""
    noun = "step" if request.steps is not None and function.takes_steps else "token"
    if function.style.scores is not None:
        returned = _scores_of_style(function, request, returned, EXPECTED[noun])

    def read(index: int, value: Any) -> Score:
        value = _plain(value)
        if value is None:
            return None
        return _token_scores(function, request, index, value, noun) if isinstance(
            value, (list, tuple)) else _number(value)

    scores = _each(function, request, returned, read, EXPECTED[noun])
    if {float, list} <= set(map(type, scores)):
        first = next(type(score) for score in scores if score is not None)
        index = next(i for i, score in enumerate(scores) if type(score) not in (first, type(None)))
        raise sample_error(function, request, index, f"{_kind(scores[index])}, but "
                           f"{'lists' if first is list else 'numbers'} for those before it,",
                           EXPECTED[noun])
    return scores


def _scores_of_style(function: RewardFunction, request: RewardRequest, returned: Any, fix: str
                     ) -> Any:
    assert function.style.scores is not None
    try:
        return function.style.scores(returned, request)
    except ValueError as problem:
        raise _error(function, f" returned {problem}.", fix) from None


def _token_scores(function: RewardFunction, request: RewardRequest, index: int,
                  value: Sequence[Any], noun: str) -> list[float]:
    """One float per response token of a sample, from its numbers per token or per step.

    Args:
        noun: ``token`` or ``step``.

    Raises:
        BadValue: there are not as many of them.
    """
    numbers = [math.nan if item is None else _number(item) for item in value]
    if noun == "token" and function.style.align is not None:
        numbers = function.style.align(numbers, request, index)
    places = request.step_ends[index] if noun == "step" else range(
        len(request.response_ids[index]))
    if len(numbers) != len(places):
        raise BadValue(f"a list of {counted(len(numbers), 'number')}, but the response has "
                       f"{counted(len(places), noun)},")
    return on_tokens(numbers, places, len(request.response_ids[index]))


def read_step_ends(function: RewardFunction, request: RewardRequest, returned: Any
                   ) -> list[list[int]]:
    """Where the steps of each response end, in characters, of what ``reward.step_fn`` returned.

    Raises:
        RewardError: not a list of such texts per sample.
    """
    def read(index: int, value: Any) -> list[int]:
        if not (isinstance(value, (list, tuple))
                and all(isinstance(text, str) and text for text in value)
                and request.responses[index].startswith("".join(value))):
            raise BadValue(_kind(value))
        return list(itertools.accumulate(map(len, value)))

    return _each(function, request, returned, read, EXPECTED_STEPS)


def read_metrics(function: RewardFunction, request: RewardRequest, returned: Any
                 ) -> dict[str, list[float]]:
    """Metrics that a function returned: name -> one finite number per sample.

    Raises:
        RewardError: not a dict of lists of that many finite numbers.
    """
    def read(_: int, value: Any) -> float:
        if math.isnan(number := _number(value)):
            raise BadValue(_kind(value))
        return number

    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise _error(function, f" returned {_kind(returned)}, not a dict of lists.",
                     EXPECTED_METRICS)
    return {name: _each(function, request, column, read, EXPECTED_METRICS,
                        of=f" as metric {name!r}") for name, column in returned.items()}


def _each(function: RewardFunction, request: RewardRequest, returned: Any,
          read: Callable[[int, Any], T], fix: str, *, of: str = "") -> list[T]:
    """What ``read`` makes of each sample's index and item of a list-like return value; ``of`` names
    what was returned, for errors."""
    results = []
    for index, value in enumerate(_values(function, request, returned, fix, of)):
        try:
            results.append(read(index, value))
        except BadValue as problem:
            raise sample_error(function, request, index, f"{problem}{of}", fix) from None
    return results


def _values(function: RewardFunction, request: RewardRequest, returned: Any, fix: str,
            of: str = "") -> Collection[Any]:
    """The items of a list-like return value, of which there must be one per sample."""
    count, values = len(request.responses), _plain(returned)
    if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping | Set):
        raise _error(function, f" returned {_kind(values)} for {count} samples{of}.", fix)
    if len(values) != count:
        raise _error(function, f" returned {counted(len(values), 'value')} for {count} samples{of}"
                     ".", fix)
    return values


def _number(value: Any) -> float:
    """A number as a float.

    Raises:
        BadValue: not a number, infinite, or beyond float32.
    """
    if not isinstance(plain := _plain(value), Real):
        raise BadValue(_kind(plain))
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if abs(number) > MAX_FLOAT32:
        raise BadValue(f"{number:g}, which is infinite in float32,")
    return number


def _plain(value: Any) -> Any:
    """Tensors and arrays of numbers as Python numbers and lists; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def _kind(value: Any) -> str:
    """``str 'good'``, ``dict {...}``, ``None``: type and value, shortened."""
    if value is None or isinstance(value, float):
        return str(value)
    shown = shorten(value) if isinstance(value, str) else shorten(repr(value))[1:-1]
    return f"{type(value).__name__} {shown}"


def sample_error(function: RewardFunction, request: RewardRequest, index: int, what: str,
                 fix: str) -> RewardError:
    """The error for what a function returned for one sample."""
    text = shorten(request.prompts[index] + request.responses[index])
    return _error(function, f" returned {what} for sample {index}: {text}", fix)


def _error(function: RewardFunction, what: str, fix: str) -> RewardError:
    return RewardError(function.label + what, where=function.located.key, fix=fix)
