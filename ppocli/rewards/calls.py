"""Calls of reward and metric functions, with retries and a time limit, and checks of what they
return.

Nothing is broadcast, swallowed or replaced by zero: a value is either converted without loss of
meaning (bool, int, NumPy and torch numbers, generators) or refused with the function, the sample's
index, its text and what was expected.
"""

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import wait
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from ppocli.config.schema import RewardConfig
from ppocli.config.text import counted, error_line, error_text, first_line, raised_at
from ppocli.config.user_code import shorten
from ppocli.errors import PpocliError, RewardError
from ppocli.rewards import guard, styles
from ppocli.rewards.resolve import BoundCallable, name_reward_key
from ppocli.rewards.reward_records import RewardRequest, Score, StepScores, on_tokens
from ppocli.runs.daemon import awaited, in_daemon, leave_loop

log = logging.getLogger(__name__)

MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""scores become float32 tensors, in which anything larger is infinite"""

MAX_INVALID_SHARE = 0.1
T = TypeVar("T")

EXPECTED = "return one number a sample, or one list of numbers a sample with as many as "
EXPECTED_STEPS = ("return one list a sample: the texts of its steps, which together are "
                  "the response or its beginning")
EXPECTED_METRICS = "return a dict: metric name -> a list with one finite number a sample"


def ask(bound: BoundCallable, request: RewardRequest, cfg: RewardConfig,
        read: Callable[[BoundCallable, RewardRequest, Any], T]) -> T:
    """What ``read``, one of the three readers below, makes of what ``bound`` returns for
    ``request``; it may run code of the classes of what was returned.

    The program's own errors, a stop request and a Ctrl-C pass through; what else the function
    raises is its error, ``SystemExit`` too. A call past its time limit is not tried again: it may
    still be running.

    Args:
        cfg: whose ``timeout`` is the seconds one attempt may take (None: without limit, in the
            caller's own thread), and ``retries`` how often a call that raised is tried again.

    Raises:
        RewardError: the function raised on every attempt, took longer than the timeout, or left
            a mode of torch's changed; or ``read`` can't use what it returned.
    """
    failures = 0
    while True:
        try:
            return read(bound, request, _call(bound, request, cfg.timeout))
        except PpocliError as error:
            name_reward_key(error, bound.located.key)
            raise
        except BaseException as error:
            if not guard.is_its_own(error):
                raise
            place = raised_at(error, bound.located.file)
            failures += 1
            if failures > cfg.retries:
                tries = f", {failures} times in a row," if failures > 1 else ""
                raise RewardError(
                    f"{bound.label} raised{tries} {type(error).__name__}: {error_text(error)}\n"
                    f"  {_batch(request)}", where=place or bound.located.key,
                    fix="mend the function; reward.retries=N tries a failed call again") from error
            log.warning("%s raised %s at %s; trying again (%d of %d)", bound.label,
                        error_line(error), place, failures, cfg.retries)


def _batch(request: RewardRequest) -> str:
    first = shorten(request.prompts[0] + request.responses[0])
    return f"batch: {len(request)} samples, the first is {first}"


def _call(bound: BoundCallable, request: RewardRequest, timeout: float | None) -> Any:
    request.logs.columns.clear()  # of an attempt that failed
    request.logs.figures.clear()

    def work() -> Any:
        with guard.contained(bound.label, bound.located.key, _batch(request)):
            result = bound.answer(request)
            if inspect.iscoroutine(result):
                result = awaited(result, "rewards")
            # A generator's body runs here, under the same time limit and handling of errors.
            if isinstance(result, Mapping):
                return {name: _drained(column, len(request), bound)
                        for name, column in result.items()}
            return _drained(result, len(request), bound)

    return work() if timeout is None else _in_thread(work, timeout, bound)


def _drained(result: Any, count: int, bound: BoundCallable) -> Any:
    """The items of an iterator as a list; anything else as it is. An endless one is refused."""
    if not isinstance(result, Iterator):
        return result
    items = list(itertools.islice(result, count + 1))
    if len(items) > count:
        raise _error(bound, f" returned more than {count} values for {count} samples.",
                     "return exactly one value a sample")
    return items


def _in_thread(work: Callable[[], Any], timeout: float, bound: BoundCallable) -> Any:
    future = in_daemon(work, f"reward {bound.located.spec}")
    if not wait([future], timeout).done:
        leave_loop("rewards")
        raise RewardError(
            f"{bound.label} was still running after {timeout:.1f} s (reward.timeout={timeout:g}).",
            where="reward.timeout", fix="make it faster, or raise reward.timeout (null: no limit)")
    return future.result()


class _BadValue(Exception):
    """Why a value can't be used; becomes a RewardError that names the function."""


def read_scores(bound: BoundCallable, request: RewardRequest, returned: Any) -> list[Score]:
    """Scores that a function returned, one per sample, as Python floats or lists of floats.

    Raises:
        RewardError: wrong count, type, shape or a number that float32 can't hold.
    """
    per_step = request.steps is not None and (isinstance(returned, StepScores) or bound.takes_steps)
    noun = "step" if per_step else "token"
    expected = EXPECTED + ("it has steps" if per_step else "its response has tokens")
    returned = styles.scores_in(returned, bound.style, request, lambda what: _error(
        bound, f" returned {what}.", expected))
    _check_shape(bound, request, returned, noun)
    dense: bool | None = None

    def read(index: int, value: Any) -> Score:
        nonlocal dense
        if (score := _score(value, noun)) is None:
            return None
        if isinstance(score, list):
            if per_step:
                score = _on_tokens(score, request, index)
            elif bound.style == "trlx":
                score = styles.aligned(score, request, index)
            if len(score) != (count := len(request.response_ids[index])):
                raise _BadValue(f"a list of {len(score)} numbers, but the response has "
                                f"{count} tokens,")
        if dense not in (None, isinstance(score, list)):
            this, others = ("a number", "a list") if dense else ("a list", "a number")
            raise _BadValue(f"{this}, but {others} for those before it,")
        dense = isinstance(score, list)
        return score

    return _each(bound, request, returned, read, expected)


def _check_shape(bound: BoundCallable, request: RewardRequest, returned: Any, noun: str) -> None:
    """Refuse a rectangle [N, C] of numbers where samples haven't C tokens or steps: a model's raw
    outputs, not the scores made of them.

    Raises:
        RewardError: names the shape, and how [N] comes of it.
    """
    try:
        plain = _plain(returned)
        shape = np.shape([_plain(row) for row in plain] if isinstance(plain, list) else plain)
    except (ValueError, TypeError, RuntimeError, _BadValue):  # rows of several lengths; no numbers
        return
    units = request.steps if noun == "step" and request.steps is not None else request.response_ids
    counts = [len(row) for row in units]
    if len(shape) < 2 or shape[0] != len(request) or 0 in shape:
        return
    if len(shape) == 2 and ({*counts} == {1} if shape[1] == 1 else shape[1] in counts):
        return
    form, squeezed = (f"[{', '.join(map(str, sizes))}]" for sizes in (shape, shape[:-1]))
    outputs = math.prod(shape[1:])
    if shape[-1] == 1:
        raise _error(bound, f" returned scores of shape {form}: each number is in a list of its "
                     f"own, not one for each of the {noun}s.",
                     f"squeeze them to shape {squeezed}: scores.squeeze(-1) of a tensor, [score "
                     "for [score] in scores] of a list")
    if bound.style != "trlx" or len(shape) > 2:  # whose numbers are of its own tokens
        raise _error(bound, f" returned scores of shape {form}: {outputs} numbers a sample, and "
                     f"the first response has {counted(counts[0], noun)}.",
                     f"return shape [{len(request)}], one number a sample, such as scores[:, 1] of "
                     f"a model's outputs; or one number a {noun}")


def _on_tokens(score: list[float], request: RewardRequest, index: int) -> list[float]:
    """Numbers of the steps of a sample on the tokens with which these are complete."""
    ends = request.step_ends[index]
    if len(score) != len(ends):
        raise _BadValue(f"a list of {counted(len(score), 'number')}, but the response has "
                        f"{counted(len(ends), 'step')},")
    return on_tokens(score, ends, len(request.response_ids[index]))


def read_step_ends(bound: BoundCallable, request: RewardRequest, returned: Any) -> list[list[int]]:
    """Where the steps of each response end, in characters, of what ``reward.step_fn`` returned.

    Raises:
        RewardError: not a list of such texts a sample.
    """
    def read(index: int, value: Any) -> list[int]:
        if not (isinstance(value, (list, tuple))
                and all(isinstance(text, str) and text for text in value)
                and request.responses[index].startswith("".join(value))):
            raise _BadValue(_kind(value))
        return list(itertools.accumulate(map(len, value)))

    return _each(bound, request, returned, read, EXPECTED_STEPS)


def read_metrics(bound: BoundCallable, request: RewardRequest, returned: Any
                 ) -> dict[str, list[float]]:
    """Metrics that a function returned: name -> one finite number a sample.

    Raises:
        RewardError: not a dict of lists of that many finite numbers.
    """
    def read(_: int, value: Any) -> float:
        if math.isnan(number := _number(value)):
            raise _BadValue(_kind(value))
        return number

    if not isinstance(returned, Mapping):
        raise _error(bound, f" returned {_kind(returned)}, not a dict of lists.", EXPECTED_METRICS)
    metrics: dict[str, list[float]] = {}
    for name, column in returned.items():
        if not isinstance(name, str):
            raise _error(bound, f" returned a metric whose name is {_kind(name)}.",
                         EXPECTED_METRICS)
        metrics[name] = _each(bound, request, column, read, EXPECTED_METRICS, metric=name)
    return metrics


def check_invalid_share(num_invalid: int, total: int, failures: Sequence[str] = ()) -> None:
    """Stop when ``reward.on_invalid=skip`` or ``env.on_error=drop`` dropped more than a tenth of a
    rollout; one of several samples may always be dropped, which of a small last step is more.

    Args:
        failures: what environments raised.

    Raises:
        RewardError: ``num_invalid`` is above 10% of ``total``.
    """
    if num_invalid <= max(MAX_INVALID_SHARE * total, total > 1):
        return
    what = (f"{num_invalid} of the {total} samples of this rollout got no valid score; at most "
            f"{MAX_INVALID_SHARE:.0%} may be dropped.")
    if failures:
        raise RewardError(f"{what} An environment failed: {failures[0]}", where="env.on_error=drop",
                          fix="mend the environment, so that errors stay rare")
    raise RewardError(what, where="reward.on_invalid=skip",
                      fix="mend the reward, so that None and NaN stay rare")


def invalid_error(bound: BoundCallable, request: RewardRequest, index: int,
                  score: Score) -> RewardError:
    """The error for a None or NaN score under ``reward.on_invalid=error``."""
    kind = ("a list with a None or NaN in it" if isinstance(score, list)
            else "None" if score is None else "NaN")
    return _sample_error(bound, request, index, kind,
                         "return a finite number, or set reward.on_invalid=skip to drop the sample")


def is_nan(score: Score) -> bool:
    """Whether a score is NaN, or has a NaN among its tokens."""
    values = score if isinstance(score, list) else [score]
    return any(value is not None and math.isnan(value) for value in values)


def _each(bound: BoundCallable, request: RewardRequest, returned: Any,
          read: Callable[[int, Any], T], fix: str, *, metric: str | None = None) -> list[T]:
    """What ``read`` makes of each sample's number and item in a list-like return value.

    Args:
        metric: name of what was returned, for errors.
    """
    begun, of = (" returned", "") if metric is None else (
        f": metric {metric!r} has", f" as metric {metric!r}")
    count = len(request)
    try:
        if isinstance(plain := _plain(returned), Real):
            raise _BadValue(f"1 value for {count} samples, the number {plain}")
        if not isinstance(plain, Collection) or isinstance(plain, str | bytes | Mapping | Set):
            raise _BadValue(f"{_kind(plain)} for {count} samples")
        values = list(plain)
        coroutines = [value for value in values if inspect.iscoroutine(value)]
        for coroutine in coroutines:
            coroutine.close()  # else Python warns of each
        if coroutines:
            raise _BadValue("a list with coroutines in it, which asyncio.gather would await")
        if len(values) != count:
            raise _BadValue(f"{counted(len(values), 'value')} for {count} samples")
    except _BadValue as problem:
        raise _error(bound, f"{begun} {problem}.", fix) from None
    found = []
    for index, value in enumerate(values):
        try:
            found.append(read(index, value))
        except _BadValue as problem:
            raise _sample_error(bound, request, index, f"{problem}{of}", fix) from None
    return found


def _score(value: Any, noun: str) -> Score:
    """One sample's value as a float, a list of floats (of so many of the noun) or None.

    Raises:
        _BadValue: neither a number nor a flat list of numbers, infinite, or beyond float32.
    """
    if (plain := _plain(value)) is None:
        return None
    if not isinstance(plain, (list, tuple)):
        return _number(plain)
    numbers = []
    for position, item in enumerate(plain):
        try:
            numbers.append(math.nan if item is None else _number(item))
        except _BadValue as problem:
            raise _BadValue(f"{problem} at {noun} {position}") from None
    return numbers


def _number(value: Any) -> float:
    if not isinstance(plain := _plain(value), Real):
        raise _BadValue(_kind(plain))
    try:
        number = float(plain)
    except OverflowError:
        raise _BadValue("a number too large for float32,") from None
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
    try:
        if hasattr(value, "tolist"):
            return value.tolist()
        return np.asarray(value).tolist() if hasattr(value, "__array__") else value
    except (TypeError, ValueError, RuntimeError) as error:
        raise _BadValue(f"a {type(value).__name__} whose numbers can't be read "
                        f"({first_line(error)})") from None


def _kind(value: Any) -> str:
    """``str 'good'``, ``dict {...}``, ``None``: what was found, shortened."""
    if value is None or isinstance(value, float):
        return str(value)
    shown = shorten(value) if isinstance(value, str) else shorten(repr(value))[1:-1]
    return f"{type(value).__name__} {shown}"


def _sample_error(bound: BoundCallable, request: RewardRequest, index: int, found: str,
                  fix: str) -> RewardError:
    text = shorten(request.prompts[index] + request.responses[index])
    return _error(bound, f" returned {found} for sample {index}: {text}", fix)


def _error(bound: BoundCallable, said: str, fix: str) -> RewardError:
    return RewardError(bound.label + said, where=bound.located.key, fix=fix)
