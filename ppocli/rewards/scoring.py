"""Scoring of samples by one or several checked reward functions, and metrics at evaluation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np

from ppocli.config.config_yaml import PYTHON_OBJECT
from ppocli.config.schema import EnvConfig, RewardConfig, is_own_figure
from ppocli.config.user_code import shorten
from ppocli.errors import ConfigError, RewardError
from ppocli.rewards import calls, resolve, score_checks
from ppocli.rewards.calls import RewardFunction
from ppocli.rewards.resolve import bind
from ppocli.rewards.reward_records import (
    RewardLogs,
    RewardRequest,
    RewardScores,
    Score,
    ends_of_steps,
)
from ppocli.runs.run_logs import finite_or_null

MAX_INVALID_SHARE = 0.1


class Judge:
    """What judges samples: all reward functions, or the metric.

    Args:
        parts: the functions.
        cfg: the ``reward`` section.
        splits: ``reward.step_fn``.
    """

    def __init__(self, parts: Sequence[RewardFunction], cfg: RewardConfig,
                 splits: RewardFunction | None = None) -> None:
        self.parts, self.cfg, self.splits = tuple(parts), cfg, splits
        self.has_steps = cfg.step_separator is not None or cfg.step_fn is not None
        """whether the configuration defines the steps of a response"""
        self.needs_all_samples = cfg.ranks == "first" or (cfg.ranks == "auto" and any(
            getattr(part.located.target, "needs_all_samples", False) for part in self.parts))
        """whether one call, on the first of several ranks, must get the samples of all ranks: a
        function or class says so by a true attribute of that name"""
        self.waits = self.all_have("waits")
        """whether judging only waits for other processes, so that generation may go on meanwhile:
        every function says so by an attribute ``waits = True``"""

    def all_have(self, attribute: str) -> bool:
        """Whether each function has a true attribute of that name."""
        return all(getattr(part.call, attribute, False) is True for part in self.parts)

    @property
    def code_files(self) -> list[str]:
        """Files of the user's code that judging runs, for ``running code from FILE``."""
        files = {one.located.file for one in (*self.parts, self.splits) if one is not None}
        package = str(Path(__file__).resolve().parent)
        return sorted(file for file in files if file and not file.startswith(package))

    def check_columns(self, columns: Sequence[str], *, steps: bool | None = None) -> None:
        """Check every signature against the metadata columns of the prompts.

        Args:
            steps: whether requests come with steps (default: :attr:`has_steps`).

        Raises:
            RewardError: a required parameter has no source.
        """
        if self.splits is not None:
            self.splits.check_columns(columns)
        for part in self.parts:
            part.check_columns(columns, steps=self.has_steps if steps is None else steps)

    def built(self, first: bool) -> Self:
        """With objects in place of the classes, on each rank that calls them."""
        calls_it = first or not self.needs_all_samples
        parts = tuple(map(resolve.built, self.parts)) if calls_it else self.parts
        return type(self)(parts, self.cfg, self.splits and resolve.built(self.splits))


class Reward(Judge):
    """Everything that scores a sample. Made by :func:`build_reward`, called by the engine.

    ``cfg`` has the style of each function in place of ``auto``.
    """

    def step_ends(self, request: RewardRequest) -> list[list[int]]:
        """[N] lists of where the steps of each response end, in characters.

        Raises:
            RewardError: ``reward.step_fn`` raised, or returned something unusable.
        """
        if self.splits is None:
            separator = self.cfg.step_separator or "\n"
            return [ends_of_steps(text, separator) for text in request.responses]
        if not len(request):
            return []
        return calls.ask(self.splits, request, retries=self.cfg.retries, timeout=self.cfg.timeout,
                         read=score_checks.read_step_ends)

    def score(self, request: RewardRequest) -> RewardScores:
        """Call every function on N samples and sum their scores: ``score_i = sum of weight_k *
        score_ik`` over the functions k that returned a number for sample i (``None``: does not
        apply), as TRL's ``reward_weights`` (``huggingface/trl:trl/trainer/grpo_trainer.py``). A
        RewardError where a function raised, took too long, or returned something unusable, or a sum
        is NaN under ``reward.on_invalid=error``, or infinite in float32."""
        if not (count := len(request.responses)):
            return RewardScores([], None, [], {part.name: [] for part in self.parts})
        answers, loggable = list[list[Score]](), dict[str, list[float | None]]()
        totals, applies = np.zeros(count), np.zeros(count, dtype=bool)
        logs: list[dict[str, dict[str, Any]]] = [{} for _ in request.responses]
        for part in self.parts:
            logged = replace(request, logs=RewardLogs())  # each function logs by itself
            scores = calls.ask(part, logged, retries=self.cfg.retries, timeout=self.cfg.timeout,
                               read=score_checks.read_scores)
            if logged.logs.columns or logged.logs.figures:
                logged.logs.add_to(logs, part.label)
            sums: Any = [sum(one) if isinstance(one, list) else one for one in scores]
            is_number = np.array(sums, dtype=object) != np.array(None)
            numbers = np.array(sums, dtype=float)  # NaN for None
            answers.append(scores)
            loggable[part.name] = finite_or_null(numbers.tolist())
            totals += part.weight * np.where(is_number, numbers, 0.0)
            applies |= is_number
        totals[~applies] = math.nan
        for i in np.flatnonzero(~(np.abs(totals) <= score_checks.MAX_FLOAT32)).tolist():
            self._check_sum(request, i, [scores[i] for scores in answers], totals[i])
        valid = (~np.isnan(totals)).tolist()
        dense = self._dense(request, answers, valid) if list in map(type, chain(*answers)) else None
        return RewardScores(np.nan_to_num(totals).tolist(), dense, valid, loggable, logs)

    def _check_sum(self, request: RewardRequest, index: int, scores: Sequence[Score], total: float
                   ) -> None:
        """Refuse a sum that is NaN, unless those samples are skipped, or infinite in float32."""
        if math.isnan(total) and self.cfg.on_invalid != "skip":
            bad = next((k for k, score in enumerate(scores)
                        if score is not None and _is_nan(score)), 0)
            kind = {float: "NaN", list: "a list with a None or NaN in it"}.get(
                type(scores[bad]), "None")
            raise score_checks.sample_error(
                self.parts[bad], request, index, kind,
                "return a finite number, or set reward.on_invalid=skip to drop the sample")
        if abs(total) > score_checks.MAX_FLOAT32:
            text = shorten(request.prompts[index] + request.responses[index])
            raise RewardError(f"The scores of sample {index} sum to {total:g}, which is infinite "
                              f"in float32: {text}", where="reward", fix="use smaller weights")

    def _dense(self, request: RewardRequest, answers: Sequence[Sequence[Score]],
               valid: Sequence[bool]) -> list[list[float]]:
        """Weighted per-token rewards of each sample; per-sample ones land on the last token."""
        rows = [[0.0] * len(ids) for ids in request.response_ids]
        for i in (i for i, is_valid in enumerate(valid) if is_valid):
            for part, scores in zip(self.parts, answers, strict=True):
                if isinstance(score := scores[i], list):
                    rows[i] = [token + part.weight * value
                               for token, value in zip(rows[i], score, strict=True)]
                elif score is not None and rows[i]:
                    rows[i][-1] += part.weight * score
                elif score is not None:
                    raise RewardError(
                        f"Sample {i} has no response token that could carry the score of "
                        f"{part.label}: {shorten(request.prompts[i])}", where=part.located.key,
                        fix="return None for an empty response")
        return rows


def _is_nan(score: float | list[float]) -> bool:
    return math.isnan(sum(score) if isinstance(score, list) else score)


class Metric(Judge):
    """A function that measures samples at evaluation. Made by :func:`build_metric`."""

    def compute(self, request: RewardRequest) -> dict[str, list[float]]:
        """Metric name -> [N] finite numbers; empty without samples.

        Raises:
            RewardError: the function raised, took too long, or returned something else.
        """
        if not len(request):
            return {}
        return calls.ask(self.parts[0], request, retries=self.cfg.retries,
                         timeout=self.cfg.timeout, read=score_checks.read_metrics)


def check_invalid_share(num_invalid: int, total: int, failures: Sequence[str] = ()) -> None:
    """Stop when ``reward.on_invalid=skip`` or ``env.on_error=drop`` dropped more than a tenth of a
    rollout; one of several samples may always be dropped, even if it is more of a small last step.

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
                          fix="correct the environment, so that errors stay rare")
    raise RewardError(what, where="reward.on_invalid=skip",
                      fix="correct the reward, so that None and NaN stay rare")


class EnvironmentReward:
    """The rewards that an environment gave, as one more function beside those of ``reward``: those
    of an episode's turns, on the last token of each; of episodes with one turn one number.

    Args:
        dense: whether episodes may have several turns.
        drop: whether an episode whose environment failed has no score.
    """

    reward_style = "request"
    display_name = "env.fn"

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
    parts = reward.parts
    if env is not None and env.fn is not None:
        if any(part.name == "env" for part in parts):
            raise ConfigError("An environment's own rewards have the name env.", where="reward_fn",
                              fix="give that function another name")
        kwargs = {"dense": env.max_turns > 1, "drop": env.on_error == "drop"}
        parts = (bind(EnvironmentReward, kwargs, key="env.fn", name="env"), *parts)
    if not parts:
        raise ConfigError("There is no reward function: an environment gives the rewards (env.fn).",
                          where="reward.fn", fix="ppocli eval plays it; or name a function: "
                          "reward.fn=my_rewards:score")
    return Reward(parts, reward.cfg, reward.splits).built(first)


def build_metric(cfg: RewardConfig, metric_fn: Callable[..., Any] | None = None, *,
                 first: bool = True) -> Metric | None:
    """The metric that ``cfg.metric_fn`` names, or the one handed over in Python; None if none.

    ``first`` is as in :func:`build_reward`.

    Raises:
        RewardError: as :func:`build_reward`.
    """
    metric = _metric(cfg, metric_fn)
    return metric and metric.built(first)


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
    entries: Mapping[str, Mapping[str, Any]] = cfg.fns
    if isinstance(reward_fn, Mapping):
        if not (entries := {str(name): {"fn": target} for name, target in reward_fn.items()}):
            raise ConfigError("reward_fn is an empty dict.", where="reward_fn",
                              fix="give at least one function: {name: function}")
        if reserved := [name for name in entries if is_own_figure(name)]:
            raise ConfigError(f"reward/{reserved[0]} is a figure of all rewards together.",
                              where="reward_fn", fix="give that function another name")
    elif reward_fn is not None or not entries:
        if reward_fn is None and cfg.fn is None:  # an environment rewards alone
            return Reward((), replace(cfg, style="ppocli"), splits)
        # kwargs beside an import path were meant for that function, which reward_fn replaces
        keeps_kwargs = reward_fn is None or cfg.fn in (None, PYTHON_OBJECT)
        part = bind(cfg.fn if reward_fn is None else reward_fn, cfg.kwargs if keeps_kwargs else {},
                    key="reward.fn", style=cfg.style)
        return Reward((part,), replace(cfg, style=_style_name(part)), splits)
    parts = tuple(
        bind(entry["fn"], entry.get("kwargs") or {}, key=f"reward.fns.{name}.fn", name=name,
             style=entry.get("style") or cfg.style, weight=float(entry.get("weight", 1.0)))
        for name, entry in entries.items())
    names = {part.name: _style_name(part) for part in parts}
    if entries is cfg.fns:
        fns = {name: {key: value for key, value in entry.items() if key != "style"}
               | ({} if names[name] == "ppocli" else {"style": names[name]})
               for name, entry in entries.items()}
        return Reward(parts, replace(cfg, fns=fns, style="ppocli"), splits)
    # Python objects of several styles have no place in a configuration
    style = names[parts[0].name] if len({*names.values()}) == 1 else cfg.style
    return Reward(parts, replace(cfg, style=style), splits)


def _style_name(function: RewardFunction) -> str:
    """The style as a configuration names it."""
    return "ppocli" if function.style.name == "request" else function.style.name


def _metric(cfg: RewardConfig, metric_fn: Any) -> Metric | None:
    """As :func:`_reward`."""
    target = cfg.metric_fn if metric_fn is None else metric_fn
    if target is None:
        return None
    return Metric((bind(target, {}, key="reward.metric_fn", name="metric_fn"),), cfg)
