"""Figures of an evaluation from its rows: means with standard errors, quantiles, win rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppocli.tasks.ppo.evaluate import distinct, evaluation_figures

Row = dict[str, Any]
"""a row of samples.jsonl"""
QUANTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the samples of one model came to; NaN where there is nothing to take a mean of."""

    figures: dict[str, float]
    """as a run's ``eval_after`` has them, and ``distinct_1`` and ``distinct_3``"""
    stderr: dict[str, float]
    """standard errors of those figures that are means over samples"""
    quantiles: dict[str, float]
    """``p5`` to ``p95`` of the scores"""
    samples: int
    scored: int
    """samples with a valid score"""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types (NaN among them)."""
        return {"figures": self.figures, "stderr": self.stderr, "quantiles": self.quantiles,
                "samples": self.samples, "scored": self.scored}


def figures_of(rows: Sequence[Row]) -> Figures:
    """The figures of one model's samples."""
    metrics: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    columns: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        for name, value in row["metrics"].items():
            metrics.setdefault(name, []).append(value)
        for name, value in row["rewards"].items():
            parts.setdefault(name, []).extend([] if value is None else [value])
        for name, value in _means(row).items():
            if value is not None:
                columns.setdefault(name, []).append((float(value), row["prompt_index"]))
    texts = [row["response"] for row in rows]
    figures: dict[str, float] = {}
    for name, value in evaluation_figures(list(rows), metrics, parts).items():
        if name == "distinct_2":
            figures["distinct_1"] = distinct(texts, 1)
        figures[name] = value
        if name == "distinct_2":
            figures["distinct_3"] = distinct(texts, 3)
    scores = sorted(row["score"] for row in rows if row["score"] is not None)
    errors = {name: clustered_stderr([value for value, _ in columns.get(name, [])],
                                     [prompt for _, prompt in columns.get(name, [])])
              for name in figures if name in columns or name == "reward_mean"}
    return Figures(figures, errors, {f"p{q}": quantile(scores, q / 100) for q in QUANTILES},
                   len(rows), len(scores))


def _means(row: Row) -> dict[str, Any]:
    """One sample's share of each figure that is a mean."""
    return {"reward_mean": row["score"], "kl_mean": row["kl"],
            "response_tokens_mean": row["response_tokens"], "finished_share": row["finished"],
            **{f"reward/{name}": value for name, value in row["rewards"].items()},
            **{f"metrics/{name}": value for name, value in row["metrics"].items()}}


def clustered_stderr(values: Sequence[float], clusters: Sequence[int]) -> float:
    """Standard error of the mean when values of one cluster (prompt) hang together.

    ``sqrt(C/(C-1) sum_c (sum_{i in c} (x_i - mean))^2) / n`` over C clusters, which is s/sqrt(n)
    when each cluster holds one value (clustered standard errors: Miller 2024, arXiv:2411.00640,
    section 2.2). With a single prompt it is s/sqrt(n) over its samples.

    Returns:
        NaN for fewer than two values.
    """
    n = len(values)
    if n < 2:
        return math.nan
    if len(set(clusters)) == 1:
        clusters = range(n)
    mean = math.fsum(values) / n
    sums: dict[int, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums.setdefault(cluster, []).append(value - mean)
    count = len(sums)
    total = math.fsum(math.fsum(part) ** 2 for part in sums.values())
    return math.sqrt(count / (count - 1) * total) / n


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, linear between neighbours (R's type 7); NaN of none."""
    if not ordered:
        return math.nan
    place = q * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def compare(policy: Sequence[Row], against: Sequence[Row]) -> dict[str, Any]:
    """How often the policy's sample scores higher than the other's with the same prompt and number.

    Pairs of which one has no score are left out; a tie counts as half a win.

    Args:
        policy, against: rows of the same prompts in the same order.

    Returns:
        compared, wins, ties, losses, win_rate with stderr, and the mean difference of the scores
        with difference_stderr; standard errors as in :func:`clustered_stderr`.
    """
    pairs = [(a["score"] - b["score"], a["prompt_index"])
             for a, b in zip(policy, against, strict=True)
             if a["score"] is not None and b["score"] is not None]
    wins = sum(gap > 0 for gap, _ in pairs)
    ties = sum(gap == 0 for gap, _ in pairs)
    outcomes = [1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap, _ in pairs]
    gaps, prompts = [gap for gap, _ in pairs], [prompt for _, prompt in pairs]
    n = len(pairs)
    return {"compared": n, "wins": wins, "ties": ties, "losses": n - wins - ties,
            "win_rate": math.fsum(outcomes) / n if n else math.nan,
            "stderr": clustered_stderr(outcomes, prompts),
            "difference": math.fsum(gaps) / n if n else math.nan,
            "difference_stderr": clustered_stderr(gaps, prompts)}
