"""Scoring of samples by one or several checked reward functions, and metrics at evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.config.resolved import PYTHON_OBJECT
from ppocli.config.schema import RewardConfig
from ppocli.errors import ConfigError, RewardError
from ppocli.rewards.calling import CallPolicy, call_with_request
from ppocli.rewards.check import (
    MAX_FLOAT32,
    Score,
    check_metrics,
    check_scores,
    invalid_error,
    is_nan,
)
from ppocli.rewards.records import RewardRequest, RewardScores
from ppocli.rewards.resolve import (
    BoundCallable,
    bind,
    check_callable,
    locate_reward,
    resolve_object,
    unbuilt,
)
from ppocli.user_code import Located, shorten


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One of the rewards that are summed."""

    name: str
    bound: BoundCallable
    weight: float


@dataclass(frozen=True, slots=True)
class Reward:
    """Everything that scores a sample. Made by :func:`build_reward`, called by the engine."""

    parts: tuple[WeightedReward, ...]
    policy: CallPolicy
    skip_invalid: bool
    needs_all_samples: bool = False
    """one call, on the first of several ranks, for the samples of all"""

    @property
    def code_files(self) -> list[str]:
        """Files of the user's code that scoring runs, for ``running code from FILE``."""
        return _user_files(part.bound for part in self.parts)

    @property
    def waits(self) -> bool:
        """Whether scoring only waits for others, so that generation may go on beside it: every
        reward says so by an attribute ``waits = True``."""
        return all(getattr(part.bound.call, "waits", False) is True for part in self.parts)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check every signature against the metadata columns that the prompts turned out to have.

        Raises:
            RewardError: a required parameter has no source.
        """
        for part in self.parts:
            part.bound.check_columns(columns)

    def score(self, request: RewardRequest) -> RewardScores:
        """Call every reward on N samples and sum what applies.

        ``score_i = sum of weight_k * score_ik`` over the rewards k that returned a number for
        sample i (``None``: does not apply), as TRL's ``reward_weights``
        (``huggingface/trl:trl/trainer/grpo_trainer.py``).

        Raises:
            RewardError: a function raised, took too long, or returned something unusable.
        """
        if not len(request):
            return RewardScores([], None, [], {part.name: [] for part in self.parts})
        answers = [check_scores(call_with_request(part.bound, request, self.policy), part.bound,
                                request) for part in self.parts]
        valid = [self._is_valid(request, index, [scores[index] for scores in answers])
                 for index in range(len(request))]
        totals = [self._total([scores[index] for scores in answers], request, index)
                  if valid[index] else 0.0 for index in range(len(request))]
        dense = None
        if any(isinstance(score, list) for scores in answers for score in scores):
            dense = [self._dense([scores[index] for scores in answers], request, index,
                                 valid[index]) for index in range(len(request))]
        logged = {part.name: [_loggable(score) for score in scores]
                  for part, scores in zip(self.parts, answers, strict=True)}
        return RewardScores(totals, dense, valid, logged)

    def _is_valid(self, request: RewardRequest, index: int, row: list[Score]) -> bool:
        """Whether sample ``index`` has a score: no NaN, and not ``None`` from every reward."""
        bad = next((k for k, score in enumerate(row) if is_nan(score)), None)
        if bad is None and all(score is None for score in row):
            bad = 0
        if bad is None:
            return True
        if self.skip_invalid:
            return False
        raise invalid_error(self.parts[bad].bound, request, index, row[bad])

    def _total(self, row: list[Score], request: RewardRequest, index: int) -> float:
        """Weighted sum of one sample's scores, its tokens' among them."""
        total = sum(part.weight * (sum(score) if isinstance(score, list) else score)
                    for part, score in zip(self.parts, row, strict=True) if score is not None)
        if not abs(total) <= MAX_FLOAT32:
            text = shorten(request.prompts[index] + request.responses[index])
            raise RewardError(f"The scores of sample {index} sum to {total:g}, which is infinite "
                              f"in float32: {text}", where="reward", fix="use smaller weights")
        return float(total)

    def _dense(self, row: list[Score], request: RewardRequest, index: int,
               valid: bool) -> list[float]:
        """Weighted per-token rewards of one sample; per-sample ones land on the last token."""
        tokens = [0.0] * len(request.response_ids[index])
        if not valid:
            return tokens
        for part, score in zip(self.parts, row, strict=True):
            if isinstance(score, list):
                tokens = [token + part.weight * value
                          for token, value in zip(tokens, score, strict=True)]
            elif score is not None and tokens:
                tokens[-1] += part.weight * score
            elif score is not None:
                text = shorten(request.prompts[index])
                raise RewardError(
                    f"Sample {index} has no response token that could carry the score of "
                    f"{part.bound.label}: {text}", where=part.bound.located.key,
                    fix="return None for an empty response")
        return tokens


@dataclass(frozen=True, slots=True)
class Metric:
    """A function that measures samples at evaluation. Made by :func:`build_metric`."""

    bound: BoundCallable
    policy: CallPolicy
    needs_all_samples: bool = False
    """as of :class:`Reward`"""

    @property
    def code_files(self) -> list[str]:
        """As :attr:`Reward.code_files`."""
        return _user_files([self.bound])

    def check_columns(self, columns: Sequence[str]) -> None:
        """As :meth:`Reward.check_columns`."""
        self.bound.check_columns(columns)

    def compute(self, request: RewardRequest) -> dict[str, list[float]]:
        """Metric name -> [N] finite numbers; empty without samples.

        Raises:
            RewardError: the function raised, took too long, or returned something else.
        """
        if not len(request):
            return {}
        return check_metrics(call_with_request(self.bound, request, self.policy), self.bound,
                             request)


def build_reward(cfg: RewardConfig, *,
                 reward_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
                 columns: Sequence[str] | None = None, first: bool = True) -> Reward:
    """Resolve, build and check what scores the samples; built-in models are loaded here.

    Args:
        cfg: the ``reward`` section.
        reward_fn: a Python function, class or object used in place of ``cfg.fn`` and ``cfg.fns``,
            or several of them by name, each of weight 1. ``cfg.kwargs`` are bound to a single one
            unless they came with a ``cfg.fn`` of their own.
        columns: metadata columns of the prompts; None while they aren't known yet, then
            :meth:`Reward.check_columns` has to follow.
        first: this is rank 0, which alone builds what :attr:`Reward.needs_all_samples`.

    Raises:
        RewardError: an import path, a signature or an argument is wrong.
        ConfigError: neither or both of ``fn`` and ``fns``, or a malformed entry of ``fns``.
        InputError: a built-in's model is missing or unusable.
    """
    if reward_fn is not None:
        parts = _parts_from_objects(cfg, reward_fn)
    else:
        located = [(entry, locate_reward(entry.fn, key=entry.key)) for entry in _entries(cfg)]
        build = first or not _one_call(cfg.ranks, [found for _, found in located])
        parts = [WeightedReward(entry.name, bind(found, entry.kwargs) if build else unbuilt(found),
                                entry.weight) for entry, found in located]
    reward = Reward(tuple(parts), CallPolicy(cfg.timeout, cfg.retries), cfg.on_invalid == "skip",
                    _one_call(cfg.ranks, [part.bound.located for part in parts]))
    if columns is not None:
        reward.check_columns(columns)
    return reward


def build_metric(spec: str | None, metric_fn: Callable[..., Any] | None = None, *,
                 columns: Sequence[str] | None = None, timeout: float | None = None,
                 retries: int = 0, ranks: str = "auto", first: bool = True) -> Metric | None:
    """The metric that ``reward.metric_fn`` names, or the one handed over in Python; None if none.

    ``timeout``, ``retries`` and ``ranks`` are those of the ``reward`` section, ``first`` as in
    :func:`build_reward`.

    Raises:
        RewardError: as :func:`build_reward`.
    """
    key = "reward.metric_fn"
    if metric_fn is not None:
        bound = resolve_object(metric_fn, {}, key=key)
    elif spec is not None:
        located = locate_reward(_object_missing(spec, key), key=key)
        bound = bind(located, {}) if first or not _one_call(ranks, [located]) else unbuilt(located)
    else:
        return None
    metric = Metric(bound, CallPolicy(timeout, retries), _one_call(ranks, [bound.located]))
    if columns is not None:
        metric.check_columns(columns)
    return metric


def _one_call(ranks: str, functions: Sequence[Located]) -> bool:
    """Whether one call has to see the samples of all ranks."""
    if ranks == "auto":
        return any(function.needs_all_samples for function in functions)
    return ranks == "first"


def check_reward_config(cfg: RewardConfig, *, columns: Sequence[str] | None = None) -> list[str]:
    """Import and check every function that ``cfg`` names without building a class or model.

    Returns:
        the files of user code that a run would execute.

    Raises:
        RewardError, ConfigError: as :func:`build_reward`.
    """
    files: list[str] = []
    for entry in _entries(cfg):
        located = locate_reward(entry.fn, key=entry.key)
        check_callable(located, entry.kwargs, columns)
        files.append(located.file or "")
    if cfg.metric_fn is not None:
        located = locate_reward(_object_missing(cfg.metric_fn, "reward.metric_fn"),
                                key="reward.metric_fn")
        check_callable(located, {}, columns)
        files.append(located.file or "")
    return _outside_package(files)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    fn: str
    kwargs: Mapping[str, Any]
    weight: float
    key: str


def _entries(cfg: RewardConfig) -> list[_Entry]:
    """``reward.fn`` or ``reward.fns`` as one list; config/problems.py has checked their form."""
    if not cfg.fns:
        fn = _object_missing(str(cfg.fn), "reward.fn")
        return [_Entry(fn.rpartition(":")[2].rpartition(".")[2], fn, cfg.kwargs, 1.0, "reward.fn")]
    return [_Entry(name, entry["fn"], entry.get("kwargs") or {}, float(entry.get("weight", 1.0)),
                   f"reward.fns.{name}.fn") for name, entry in cfg.fns.items()]


def _parts_from_objects(cfg: RewardConfig, reward_fn: Any) -> list[WeightedReward]:
    if isinstance(reward_fn, Mapping):
        if not reward_fn:
            raise ConfigError("reward_fn is an empty dict.", where="reward_fn",
                              fix="give at least one function: {name: function}")
        return [WeightedReward(str(name), resolve_object(target, {}, key=f"reward.fns.{name}.fn"),
                               1.0) for name, target in reward_fn.items()]
    # kwargs beside an import path were meant for that function, which reward_fn replaces
    own = cfg.fn is None or cfg.fn == PYTHON_OBJECT
    bound = resolve_object(reward_fn, cfg.kwargs if own else {}, key="reward.fn")
    return [WeightedReward(bound.located.spec.rpartition(".")[2], bound, 1.0)]


def _object_missing(spec: str, key: str) -> str:
    """``spec`` unless it stands for a Python object, which nobody handed over this time."""
    if spec != PYTHON_OBJECT:
        return spec
    name = "metric_fn" if key.endswith("metric_fn") else "reward_fn"
    raise RewardError(f"{key} was a Python object, which a configuration can't hold.", where=key,
                      fix=f"pass {name}= to ppocli.train again, or set {key}=pkg.module:function")


def _loggable(score: Score) -> float | None:
    if score is None or is_nan(score):
        return None
    return sum(score) if isinstance(score, list) else score


def _user_files(bounds: Any) -> list[str]:
    return _outside_package([bound.file or "" for bound in bounds])


def _outside_package(files: list[str]) -> list[str]:
    package = str(Path(__file__).resolve().parent)
    return sorted({file for file in files if file and not file.startswith(package)})
