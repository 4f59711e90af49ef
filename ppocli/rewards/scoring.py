"""Scoring of samples by one or several checked reward functions, and metrics at evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ppocli.config.config_yaml import PYTHON_OBJECT
from ppocli.config.schema import EnvConfig, RewardConfig, is_own_figure
from ppocli.config.user_code import shorten
from ppocli.errors import ConfigError, RewardError
from ppocli.rewards import calls, styles
from ppocli.rewards.resolve import BoundCallable, bind
from ppocli.rewards.reward_records import (
    RewardLogs,
    RewardRequest,
    RewardScores,
    Score,
    ends_of_steps,
)


@dataclass(frozen=True, slots=True)
class Judge:
    """What is asked about samples: all rewards, or the metric."""

    parts: tuple[BoundCallable, ...]
    cfg: RewardConfig
    splits: BoundCallable | None = None
    """``reward.step_fn``"""

    @property
    def code_files(self) -> list[str]:
        """Files of the user's code that judging runs, for ``running code from FILE``."""
        files = {one.located.file for one in (*self.parts, self.splits) if one is not None}
        package = str(Path(__file__).resolve().parent)
        return sorted(file for file in files if file and not file.startswith(package))

    @property
    def needs_all_samples(self) -> bool:
        """Whether one call, on the first of several ranks, has to see the samples of all: a
        function or class says so by a true attribute of that name."""
        if self.cfg.ranks == "auto":
            return any(getattr(part.located.target, "needs_all_samples", False)
                       for part in self.parts)
        return self.cfg.ranks == "first"

    @property
    def has_steps(self) -> bool:
        """Whether the configuration says what the steps of a response are."""
        return self.cfg.step_separator is not None or self.cfg.step_fn is not None

    def check_columns(self, columns: Sequence[str], *, steps: bool | None = None) -> None:
        """Check every signature against the metadata columns that the prompts turned out to have.

        Args:
            steps: whether requests come with steps (default: :attr:`has_steps`).

        Raises:
            RewardError: a required parameter has no source.
        """
        if self.splits is not None:
            self.splits.check_columns(columns)
        for part in self.parts:
            part.check_columns(columns, steps=self.has_steps if steps is None else steps)

    def _ready(self, first: bool) -> Self:
        """With objects made of the classes on each rank that calls them."""
        ready = replace(self, splits=self.splits and self.splits.built())
        if first or not self.needs_all_samples:
            ready = replace(ready, parts=tuple(part.built() for part in self.parts))
        return ready


class Reward(Judge):
    """Everything that scores a sample. Made by :func:`build_reward`, called by the engine.

    ``cfg`` has the style of each function in place of ``auto``.
    """

    @property
    def waits(self) -> bool:
        """Whether scoring only waits for others, so that generation may go on beside it: every
        reward says so by an attribute ``waits = True``."""
        return self.all_say("waits")

    def all_say(self, attribute: str) -> bool:
        """Whether each function has a true attribute of that name."""
        return all(getattr(part.call, attribute, False) is True for part in self.parts)

    def step_ends(self, request: RewardRequest) -> list[list[int]]:
        """[N] lists of where the steps of each response end, in characters.

        Raises:
            RewardError: ``reward.step_fn`` raised, or returned something unusable.
        """
        if self.splits is None:
            separator = self.cfg.step_separator or "\n"
            return [ends_of_steps(text, separator) for text in request.responses]
        return calls.ask(self.splits, request, self.cfg, calls.read_step_ends) if len(request) \
            else []

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
        # each function logs by itself
        asked = [replace(request, logs=RewardLogs()) for _ in self.parts]
        answers = [calls.ask(part, own, self.cfg, calls.read_scores)
                   for part, own in zip(self.parts, asked, strict=True)]
        rows = list(zip(*answers, strict=True))
        valid = [self._is_valid(request, index, row) for index, row in enumerate(rows)]
        totals = [self._total(row, request, index) if valid[index] else 0.0
                  for index, row in enumerate(rows)]
        dense = None
        if any(isinstance(score, list) for row in rows for score in row):
            dense = [self._dense(row, request, index, valid[index])
                     for index, row in enumerate(rows)]
        logged = {part.name: [_loggable(score) for score in scores]
                  for part, scores in zip(self.parts, answers, strict=True)}
        return RewardScores(totals, dense, valid, logged, self._logs(asked))

    def _logs(self, asked: Sequence[RewardRequest]) -> list[dict[str, dict[str, Any]]]:
        """What all functions logged, sample by sample; of equal names the last function's."""
        found: list[dict[str, dict[str, Any]]] = [{} for _ in range(len(asked[0]))]
        for part, request in zip(self.parts, asked, strict=True):
            logs = request.logs.by_sample(len(request), part.label)
            for sample, log in zip(found, logs, strict=True):
                sample |= {kind: sample.get(kind, {}) | values
                           for kind, values in log.items() if values}
        return found

    def _is_valid(self, request: RewardRequest, index: int, row: Sequence[Score]) -> bool:
        """Whether sample ``index`` has a score: no NaN, and not ``None`` from every reward."""
        bad = next((k for k, score in enumerate(row) if calls.is_nan(score)), None)
        if bad is None and all(score is None for score in row):
            bad = 0
        if bad is None or self.cfg.on_invalid == "skip":
            return bad is None
        raise calls.invalid_error(self.parts[bad], request, index, row[bad])

    def _total(self, row: Sequence[Score], request: RewardRequest, index: int) -> float:
        """Weighted sum of one sample's scores, its tokens' among them."""
        total = sum(part.weight * (sum(score) if isinstance(score, list) else score)
                    for part, score in zip(self.parts, row, strict=True) if score is not None)
        if not abs(total) <= calls.MAX_FLOAT32:
            text = shorten(request.prompts[index] + request.responses[index])
            raise RewardError(f"The scores of sample {index} sum to {total:g}, which is infinite "
                              f"in float32: {text}", where="reward", fix="use smaller weights")
        return float(total)

    def _dense(self, row: Sequence[Score], request: RewardRequest, index: int,
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
                    f"{part.label}: {text}", where=part.located.key,
                    fix="return None for an empty response")
        return tokens


class Metric(Judge):
    """A function that measures samples at evaluation. Made by :func:`build_metric`."""

    def compute(self, request: RewardRequest) -> dict[str, list[float]]:
        """Metric name -> [N] finite numbers; empty without samples.

        Raises:
            RewardError: the function raised, took too long, or returned something else.
        """
        return calls.ask(self.parts[0], request, self.cfg, calls.read_metrics) \
            if len(request) else {}


class EnvironmentReward:
    """What an environment's own rewards are worth, one more reward beside those of ``reward``: the
    rewards of each episode's turns, on the last token of each; of episodes with one turn one
    number, as a reward function would give it.

    Args:
        dense: whether episodes may have several turns.
        drop: whether an episode whose environment failed has no score.
    """

    reward_style = styles.WHOLE_REQUEST
    told_as = "env.fn"

    def __init__(self, dense: bool, drop: bool) -> None:
        self.dense, self.drop = dense, drop

    def __call__(self, request: RewardRequest) -> list[Score]:
        """[N] scores."""
        return [None if self.drop and one.error is not None else
                one.token_rewards if self.dense else one.score for one in request.episodes]


def build_reward(cfg: RewardConfig, *,
                 reward_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
                 first: bool = True, env: EnvConfig | None = None) -> Reward:
    """Resolve, build and check what scores the samples; built-in models are loaded here. Once the
    metadata columns of the prompts are known, :meth:`Reward.check_columns` has to follow.

    Args:
        cfg: the ``reward`` section.
        reward_fn: a Python function, class or object used in place of ``cfg.fn`` and ``cfg.fns``,
            or several of them by name, each of weight 1. ``cfg.kwargs`` are bound to a single one
            unless they came with a ``cfg.fn`` of their own.
        first: this is rank 0, which alone builds what :attr:`Reward.needs_all_samples`.
        env: whose own rewards count too.

    Raises:
        RewardError: an import path, a signature or an argument is wrong.
        ConfigError: ``reward_fn`` is empty or takes a name that is used, or nothing gives a reward.
        InputError: a built-in's model is missing or unusable.
    """
    reward = _reward(cfg, reward_fn)
    if env is not None and env.fn is not None:
        if any(part.name == "env" for part in reward.parts):
            raise ConfigError("An environment's own rewards have the name env.", where="reward_fn",
                              fix="give that function another name")
        own = {"dense": env.max_turns > 1, "drop": env.on_error == "drop"}
        rewards = bind(EnvironmentReward, own, key="env.fn", name="env")
        reward = replace(reward, parts=(rewards, *reward.parts))
    if not reward.parts:
        raise ConfigError("There is no reward function: an environment gives the rewards (env.fn).",
                          where="reward.fn", fix="ppocli eval and ppocli generate --env play it; "
                          "or name a function: reward.fn=my_rewards:score")
    return reward._ready(first)


def build_metric(cfg: RewardConfig, metric_fn: Callable[..., Any] | None = None, *,
                 first: bool = True) -> Metric | None:
    """The metric that ``cfg.metric_fn`` names, or the one handed over in Python; None if none.

    ``first`` is as in :func:`build_reward`.

    Raises:
        RewardError: as :func:`build_reward`.
    """
    metric = _metric(cfg, metric_fn)
    return metric and metric._ready(first)


def with_styles(cfg: RewardConfig) -> RewardConfig:
    """``cfg`` with the style of each function in place of ``auto``.

    Raises:
        RewardError: as :func:`build_reward`.
    """
    return _reward(cfg, None).cfg


def check_reward_config(cfg: RewardConfig, columns: Sequence[str] | None) -> None:
    """Import and check every function that ``cfg`` names without building a class or model.

    Args:
        columns: metadata columns of the prompts; None while they aren't known.

    Raises:
        RewardError: as :func:`build_reward`.
    """
    for judge in (_reward(cfg, None), _metric(cfg, None)):
        if judge is not None and columns is not None:
            judge.check_columns(columns)


def _reward(cfg: RewardConfig, reward_fn: Any) -> Reward:
    """What ``cfg`` names, or ``reward_fn``, not built yet; config/problems.py has checked the form
    of ``cfg``."""
    splits = None if cfg.step_fn is None else bind(cfg.step_fn, {}, key="reward.step_fn")
    return replace(_functions(cfg, reward_fn), splits=splits)


def _functions(cfg: RewardConfig, reward_fn: Any) -> Reward:
    """As :func:`_reward`, without what says where steps end."""
    entries: Mapping[str, Mapping[str, Any]] = cfg.fns
    if isinstance(reward_fn, Mapping):
        if not (entries := {str(name): {"fn": target} for name, target in reward_fn.items()}):
            raise ConfigError("reward_fn is an empty dict.", where="reward_fn",
                              fix="give at least one function: {name: function}")
        if taken := [name for name in entries if is_own_figure(name)]:
            raise ConfigError(f"reward/{taken[0]} is a figure of all rewards together.",
                              where="reward_fn", fix="give that function another name")
    elif reward_fn is not None or not entries:
        if reward_fn is None and cfg.fn is None:  # an environment rewards alone
            return Reward((), replace(cfg, style="ppocli"))
        # kwargs beside an import path were meant for that function, which reward_fn replaces
        own = reward_fn is None or cfg.fn in (None, PYTHON_OBJECT)
        part = bind(cfg.fn if reward_fn is None else reward_fn, cfg.kwargs if own else {},
                    key="reward.fn", style=cfg.style)
        return Reward((part,), replace(cfg, style=_settled(part)))
    parts = tuple(
        bind(entry["fn"], entry.get("kwargs") or {}, key=f"reward.fns.{name}.fn", name=name,
             style=entry.get("style") or cfg.style, weight=float(entry.get("weight", 1.0)))
        for name, entry in entries.items())
    found = {part.name: _settled(part) for part in parts}
    if entries is cfg.fns:
        named = {name: {key: value for key, value in entry.items() if key != "style"}
                 | ({} if found[name] == "ppocli" else {"style": found[name]})
                 for name, entry in entries.items()}
        return Reward(parts, replace(cfg, fns=named, style="ppocli"))
    # Python objects of several styles have no place in a configuration
    one = next(iter(found.values())) if len({*found.values()}) == 1 else cfg.style
    return Reward(parts, replace(cfg, style=one))


def _settled(bound: BoundCallable) -> str:
    """The style as a configuration names it."""
    return "ppocli" if bound.style == styles.WHOLE_REQUEST else bound.style


def _metric(cfg: RewardConfig, metric_fn: Any) -> Metric | None:
    """As :func:`_reward`."""
    target = cfg.metric_fn if metric_fn is None else metric_fn
    if target is None:
        return None
    return Metric((bind(target, {}, key="reward.metric_fn", name="metric_fn"),), cfg)


def _loggable(score: Score) -> float | None:
    if score is None or calls.is_nan(score):
        return None
    return sum(score) if isinstance(score, list) else score
