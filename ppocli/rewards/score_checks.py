"""Checks of what reward and metric functions return.

Nothing is broadcast, swallowed or replaced by zero: a value is either converted without loss of
meaning (bool, int, NumPy and torch numbers, generators) or refused with the function, the sample's
index, its text and what was expected.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Set
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from ppocli.config.text import counted, first_line
from ppocli.config.user_code import shorten
from ppocli.errors import RewardError
from ppocli.rewards.calls import RewardFunction
from ppocli.rewards.reward_records import RewardRequest, Score, on_tokens

MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""scores become float32 tensors, in which anything larger is infinite"""
EXPECTED = ("return one number per sample, such as scores.squeeze(-1) or scores[:, 1] of a model's "
            "outputs; or one list of numbers per sample with as many as ")
EXPECTED_STEPS = ("return one list per sample: the texts of its steps, which together are "
                  "the response or its beginning")
EXPECTED_METRICS = "return a dict: metric name -> a list with one finite number per sample"

T = TypeVar("T")


class BadValue(Exception):
    """Why a value can't be used; becomes a RewardError that names the function."""


def read_scores(function: RewardFunction, request: RewardRequest, returned: Any) -> list[Score]:
    """Scores that a function returned, one per sample, as Python floats or lists with one float
    per response token.

    Raises:
        RewardError: wrong count, type, shape or a number that float32 can't hold.
    """
    noun = "step" if request.steps is not None and function.takes_steps else "token"
    expected = EXPECTED + ("it has steps" if noun == "step" else "its response has tokens")
    if function.style.scores is not None:
        try:
            returned = function.style.scores(returned, request)
        except ValueError as problem:
            raise _error(function, f" returned {problem}.", expected) from None
    is_dense: bool | None = None

    def read(index: int, value: Any) -> Score:
        nonlocal is_dense
        if isinstance(score := _score(value, noun), list):
            score = _on_tokens(function, request, index, score, noun)
        if score is not None:
            if is_dense not in (None, isinstance(score, list)):
                kinds = ("a number", "a list") if is_dense else ("a list", "a number")
                raise BadValue(f"{kinds[0]}, but {kinds[1]} for those before it,")
            is_dense = isinstance(score, list)
        return score

    return _each(function, request, returned, read, expected)


def _on_tokens(function: RewardFunction, request: RewardRequest, index: int, numbers: list[float],
               noun: str) -> list[float]:
    """Numbers of a sample's steps or tokens as one number per response token."""
    count = len(request.response_ids[index])
    if noun == "step":
        ends = request.step_ends[index]
        if len(numbers) != len(ends):
            raise BadValue(f"a list of {counted(len(numbers), 'number')}, but the response has "
                           f"{counted(len(ends), 'step')},")
        return on_tokens(numbers, ends, count)
    if function.style.align is not None:
        numbers = function.style.align(numbers, request, index)
    if len(numbers) != count:
        raise BadValue(f"a list of {counted(len(numbers), 'number')}, but the response has "
                       f"{counted(count, 'token')},")
    return numbers


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

    if not isinstance(returned, Mapping):
        raise _error(function, f" returned {_kind(returned)}, not a dict of lists.",
                     EXPECTED_METRICS)
    metrics: dict[str, list[float]] = {}
    for name, column in returned.items():
        if not isinstance(name, str):
            raise _error(function, f" returned a metric whose name is {_kind(name)}.",
                         EXPECTED_METRICS)
        metrics[name] = _each(function, request, column, read, EXPECTED_METRICS, metric=name)
    return metrics


def _each(function: RewardFunction, request: RewardRequest, returned: Any,
          read: Callable[[int, Any], T], fix: str, *, metric: str | None = None) -> list[T]:
    """What ``read`` makes of each sample's index and item of a list-like return value.

    Args:
        metric: name of what was returned, for errors.
    """
    begin, of = (" returned", "") if metric is None else (
        f": metric {metric!r} has", f" as metric {metric!r}")
    count = len(request.responses)
    try:
        if isinstance(values := _plain(returned), Real):
            raise BadValue(f"1 value for {count} samples, the number {values}")
        if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping | Set):
            raise BadValue(f"{_kind(values)} for {count} samples")
        if len(values) != count:
            raise BadValue(f"{counted(len(values), 'value')} for {count} samples")
    except BadValue as problem:
        raise _error(function, f"{begin} {problem}.", fix) from None
    results = []
    for index, value in enumerate(values):
        try:
            results.append(read(index, value))
        except BadValue as problem:
            raise sample_error(function, request, index, f"{problem}{of}", fix) from None
    return results


def _score(value: Any, noun: str) -> Score:
    """One sample's value as a float, a list of floats (one per ``noun``) or None.

    Raises:
        BadValue: neither a number nor a flat list of numbers, infinite, or beyond float32.
    """
    if (plain := _plain(value)) is None:
        return None
    if not isinstance(plain, (list, tuple)):
        return _number(plain)
    numbers = []
    for position, item in enumerate(plain):
        try:
            numbers.append(math.nan if item is None else _number(item))
        except BadValue as problem:
            raise BadValue(f"{problem} at {noun} {position}") from None
    return numbers


def _number(value: Any) -> float:
    if not isinstance(plain := _plain(value), Real):
        raise BadValue(_kind(plain))
    try:
        number = float(plain)
    except OverflowError:
        raise BadValue("a number too large for float32,") from None
    if math.isinf(number):
        raise BadValue(f"{number}, which is not finite,")
    if abs(number) > MAX_FLOAT32:
        raise BadValue(f"{number:g}, which is infinite in float32,")
    return number


def _plain(value: Any) -> Any:
    """Tensors and arrays of numbers as Python numbers and lists; anything else as it is.

    Raises:
        BadValue: a tensor without readable numbers (complex, meta device).
    """
    try:
        if hasattr(value, "tolist"):
            return value.tolist()
        return np.asarray(value).tolist() if hasattr(value, "__array__") else value
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadValue(f"a {type(value).__name__} whose numbers can't be read "
                       f"({first_line(error)})") from None


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
