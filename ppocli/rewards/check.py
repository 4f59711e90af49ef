"""Checks of what a reward or metric function returned.

Nothing is broadcast, swallowed or replaced by zero: a value is either converted without loss of
meaning (bool, int, NumPy and torch numbers, generators) or refused with the function, the sample's
index, its text and what was expected.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import Any

import numpy as np

from ppocli.errors import RewardError
from ppocli.rewards.records import RewardRequest
from ppocli.rewards.resolve import BoundCallable
from ppocli.text import counted
from ppocli.user_code import shorten

MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""scores become float32 tensors, in which anything larger is infinite"""

MAX_INVALID_SHARE = 0.1

Score = float | list[float] | None
"""of one sample: a number, one number a response token, or None; NaN is still in it"""

EXPECTED = ("return one number a sample, or one list of numbers a sample with as many as its "
            "response has tokens")
EXPECTED_METRICS = "return a dict: metric name -> a list with one finite number a sample"


class _BadValue(Exception):
    """Why a value can't be used; becomes a RewardError that names the sample."""


def check_scores(returned: Any, bound: BoundCallable, request: RewardRequest) -> list[Score]:
    """The scores in ``returned``, one per sample, as Python floats or lists of floats.

    Raises:
        RewardError: wrong count, type, shape or a number that float32 can't hold.
    """
    values = _items(returned, len(request), bound, f"{bound.label} returned", EXPECTED)
    scores: list[Score] = []
    for index, value in enumerate(values):
        try:
            score = _score(value)
            num_tokens = len(request.response_ids[index])
            if isinstance(score, list) and len(score) != num_tokens:
                raise _BadValue(f"a list of {len(score)} numbers, but the response has "
                                f"{num_tokens} tokens,")
        except _BadValue as problem:
            raise _sample_error(bound, request, index, str(problem), EXPECTED) from None
        scores.append(score)
    _refuse_mixture(scores, bound, request)
    return scores


def check_metrics(returned: Any, bound: BoundCallable,
                  request: RewardRequest) -> dict[str, list[float]]:
    """The metrics in ``returned``: name -> one finite number a sample.

    Raises:
        RewardError: not a dict of lists of that many finite numbers.
    """
    if not isinstance(returned, Mapping):
        raise RewardError(f"{bound.label} returned {_kind(returned)}, not a dict of lists.",
                          where=bound.located.key, fix=EXPECTED_METRICS)
    metrics: dict[str, list[float]] = {}
    for name, column in returned.items():
        if not isinstance(name, str):
            raise RewardError(f"{bound.label} returned a metric whose name is {_kind(name)}.",
                              where=bound.located.key, fix=EXPECTED_METRICS)
        subject = f"{bound.label}: metric {name!r} has"
        values = _items(column, len(request), bound, subject, EXPECTED_METRICS)
        metrics[name] = []
        for index, value in enumerate(values):
            try:
                number = _score(value)
                if not isinstance(number, float) or math.isnan(number):
                    raise _BadValue(_kind(value))
            except _BadValue as problem:
                raise _sample_error(bound, request, index, f"{problem} as metric {name!r}",
                                    EXPECTED_METRICS) from None
            metrics[name].append(number)
    return metrics


def check_invalid_share(num_invalid: int, total: int) -> None:
    """Stop when ``reward.on_invalid=skip`` dropped more than a tenth of a rollout.

    Raises:
        RewardError: ``num_invalid`` is above 10% of ``total``.
    """
    if num_invalid > MAX_INVALID_SHARE * total:
        raise RewardError(
            f"{num_invalid} of the {total} samples of this rollout got no valid score; at most "
            f"{MAX_INVALID_SHARE:.0%} may be dropped.",
            where="reward.on_invalid=skip", fix="mend the reward, so that None and NaN stay rare")


def invalid_error(bound: BoundCallable, request: RewardRequest, index: int,
                  score: Score) -> RewardError:
    """The error for a None or NaN score under ``reward.on_invalid=error``."""
    kind = "None" if score is None else "NaN"
    if isinstance(score, list):
        kind = "a list with a None or NaN in it"
    return _sample_error(bound, request, index, kind,
                         "return a finite number, or set reward.on_invalid=skip to drop the sample")


def is_nan(score: Score) -> bool:
    """Whether a score is NaN, or has a NaN among its tokens."""
    if isinstance(score, list):
        return any(math.isnan(value) for value in score)
    return score is not None and math.isnan(score)


def _items(returned: Any, count: int, bound: BoundCallable, subject: str,
           fix: str) -> list[Any]:
    """The ``count`` items of a list-like return value; ``subject`` begins the error's sentence."""
    key = bound.located.key
    try:
        plain = _plain(returned)
    except _BadValue as problem:
        raise RewardError(f"{subject} {problem} for {count} samples.", where=key,
                          fix=fix) from None
    if _close_coroutine(plain):
        raise RewardError(f"{subject} a coroutine for {count} samples.", where=key,
                          fix="declare the function `async def`, or await inside it")
    if isinstance(plain, Real):
        raise RewardError(f"{subject} 1 value for {count} samples, the number {plain}.",
                          where=key, fix=fix)
    if not isinstance(plain, Collection) or isinstance(plain, (str, bytes, Mapping, AbstractSet)):
        raise RewardError(f"{subject} {_kind(plain)} for {count} samples.", where=key, fix=fix)
    values = list(plain)
    if sum(_close_coroutine(value) for value in values):  # not any(): every one must be closed
        raise RewardError(f"{subject} a list with coroutines in it.", where=key,
                          fix="await them, for instance with asyncio.gather")
    if len(values) != count:
        raise RewardError(f"{subject} {counted(len(values), 'value')} for {count} samples.",
                          where=key, fix=fix)
    return values


def _score(value: Any) -> Score:
    """One sample's value as a float, a list of floats or None.

    Raises:
        _BadValue: neither a number nor a flat list of numbers, infinite, or beyond float32.
    """
    plain = _plain(value)
    if plain is None:
        return None
    if isinstance(plain, (list, tuple)):
        return [_token_number(item, position) for position, item in enumerate(plain)]
    if not isinstance(plain, Real):
        raise _BadValue(_kind(plain))
    return _number(plain)


def _token_number(item: Any, position: int) -> float:
    plain = _plain(item)
    if plain is None:
        return math.nan
    if not isinstance(plain, Real):
        raise _BadValue(f"{_kind(plain)} at token {position}")
    try:
        return _number(plain)
    except _BadValue as problem:
        raise _BadValue(f"{problem} at token {position}") from None


def _number(value: Real) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise _BadValue(f"a number of {len(str(value))} digits, too large for float32,") from None
    if math.isinf(number):
        raise _BadValue(f"{number}, which is not finite,")
    if abs(number) > MAX_FLOAT32:
        raise _BadValue(f"{number:g}, which is infinite in float32,")
    return number


def _plain(value: Any) -> Any:
    """Tensors and arrays of numbers as Python numbers and lists; anything else as it is.

    Raises:
        _BadValue: a tensor without readable numbers (complex, meta device).
    """
    if value is None or isinstance(value, (int, float, str, list, tuple, dict)):
        return value
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().to("cpu")
            return (value.double() if value.is_floating_point() else value).tolist()
        if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__"):
            return np.asarray(value).tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _BadValue(f"a {type(value).__name__} whose numbers can't be read ({error})") from None
    return value


def _kind(value: Any) -> str:
    """``str 'good'``, ``dict {...}``, ``None``: what was found, shortened."""
    if value is None or isinstance(value, float):
        return str(value)
    shown = shorten(value) if isinstance(value, str) else shorten(repr(value))[1:-1]
    return f"{type(value).__name__} {shown}"


def _close_coroutine(value: Any) -> bool:
    """Whether ``value`` is a coroutine that nobody awaited; closing it keeps Python quiet."""
    if not inspect.iscoroutine(value):
        return False
    value.close()
    return True


def _sample_error(bound: BoundCallable, request: RewardRequest, index: int, found: str,
                  fix: str) -> RewardError:
    text = shorten(request.prompts[index] + request.responses[index])
    return RewardError(f"{bound.label} returned {found} for sample {index}: {text}",
                       where=bound.located.key, fix=fix)


def _refuse_mixture(scores: list[Score], bound: BoundCallable, request: RewardRequest) -> None:
    kinds = [None if score is None else isinstance(score, list) for score in scores]
    given = [kind for kind in kinds if kind is not None]
    if not given or all(given) or not any(given):
        return
    index = kinds.index(not given[0])
    this, others = ("a list", "a number") if kinds[index] else ("a number", "a list")
    raise _sample_error(bound, request, index, f"{this}, but {others} for those before it,",
                        EXPECTED)
