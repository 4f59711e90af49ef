"""What an evaluation came to: figures with standard errors, win rates, the frontier, eval.json."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from ppocli.evaluation.folder import Row
from ppocli.runs.target import Target
from ppocli.tasks.ppo.evaluate import distinct, evaluation_figures
from ppocli.tasks.ppo.session import EvalSession
from ppocli.training.state import torch_versions

SCHEMA = 1
"""of eval.json; raised when a name in it comes to mean something else"""
QUANTILES = (5, 25, 50, 75, 95)
SAMPLES = 16
"""samples of the base for each prompt of a frontier"""
BEST_OF = (1, 2, 4, 8, 16)
Verdict = Literal["above", "level", "below", "beyond", "not comparable"]


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


def figures_of(rows: Sequence[Row]) -> Figures:
    """The figures of one model's samples."""
    columns: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        for name, value in _means(row).items():
            known = [] if value is None else [(float(value), row["prompt_index"])]
            columns.setdefault(name, []).extend(known)

    def values(kind: str) -> dict[str, list[float]]:
        return {name.removeprefix(kind): [value for value, _ in column]
                for name, column in columns.items() if name.startswith(kind)}

    figures: dict[str, float] = {}
    for name, value in evaluation_figures(list(rows), values("metrics/"),
                                          values("reward/")).items():
        if name == "distinct_2":
            texts = [row["response"] for row in rows]
            figures |= {f"distinct_{n}": distinct(texts, n) for n in (1, 2, 3)}
        else:
            figures[name] = value
    scores = [row["score"] for row in rows if row["score"] is not None]
    errors = {name: clustered_stderr(columns[name]) for name in figures
              if columns.get(name) or name == "reward_mean"}
    found = np.quantile(scores, [q / 100 for q in QUANTILES]) if scores else [math.nan] * 5
    return Figures(figures, errors, {f"p{q}": float(v) for q, v in zip(QUANTILES, found,
                                                                       strict=True)},
                   len(rows), len(scores))


def _means(row: Row) -> dict[str, Any]:
    """One sample's share of each figure that is a mean."""
    return {"reward_mean": row["score"], "kl_mean": row["kl"],
            "response_tokens_mean": row["response_tokens"], "finished_share": row["finished"],
            **{f"reward/{name}": value for name, value in row["rewards"].items()},
            **{f"metrics/{name}": value for name, value in row["metrics"].items()}}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def clustered_stderr(column: Sequence[tuple[float, int]]) -> float:
    """Standard error of the mean when values of one cluster (prompt) hang together.

    ``sqrt(C/(C-1) sum_c (sum_{i in c} (x_i - mean))^2) / n`` over C clusters, which is s/sqrt(n)
    when each cluster holds one value (clustered standard errors: Miller 2024, arXiv:2411.00640,
    section 2.2). With a single prompt it is s/sqrt(n) over its samples.

    Args:
        column: each value with its cluster.

    Returns:
        NaN for fewer than two values.
    """
    if len(column) < 2:
        return math.nan
    mean = fmean(value for value, _ in column)
    single = len({cluster for _, cluster in column}) == 1
    sums: dict[int, list[float]] = {}
    for number, (value, cluster) in enumerate(column):
        sums.setdefault(number if single else cluster, []).append(value - mean)
    total = math.fsum(math.fsum(part) ** 2 for part in sums.values())
    return math.sqrt(len(sums) / (len(sums) - 1) * total) / len(column)


def compare(policy: Sequence[Row], against: Sequence[Row]) -> dict[str, Any]:
    """How often the policy's sample scores higher than the other's with the same prompt and number.

    Pairs of which one has no score are left out; a tie counts as half a win.

    Args:
        policy, against: rows of the same prompts in the same order.

    Returns:
        compared, wins, ties, losses, win_rate with stderr, and the mean difference of the scores
        with difference_stderr; standard errors as in :func:`clustered_stderr`.
    """
    gaps = [(a["score"] - b["score"], a["prompt_index"])
            for a, b in zip(policy, against, strict=True)
            if a["score"] is not None and b["score"] is not None]
    outcomes = [(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0, prompt) for gap, prompt in gaps]
    wins, ties, losses = (sum(outcome == value for outcome, _ in outcomes)
                          for value in (1.0, 0.5, 0.0))
    return {"compared": len(gaps), "wins": wins, "ties": ties, "losses": losses,
            "win_rate": _mean([outcome for outcome, _ in outcomes]),
            "stderr": clustered_stderr(outcomes), "difference": _mean([gap for gap, _ in gaps]),
            "difference_stderr": clustered_stderr(gaps)}


def best_of_n(scores: Sequence[float], n: int) -> float:
    """Unbiased estimate of the expected best score of n samples, from N >= n scores.

    ``sum_{i=n}^{N} C(i-1, n-1) / C(N, n) r_(i)`` with r_(i) the i-th smallest: the mean of the
    maximum over all subsets of size n.
    """
    ordered, total = sorted(scores), math.comb(len(scores), n)
    return math.fsum(math.comb(i - 1, n - 1) / total * score
                     for i, score in enumerate(ordered, start=1) if i >= n)


def best_of_n_kl(n: int) -> float:
    """KL of best-of-n to the model that is sampled from, in nats: ``log n - (n-1)/n``.

    Stiennon et al. 2020 (arXiv:2009.01325), appendix G.3. It is an upper bound, nearly reached
    when no response is likely by itself (Beirami et al. 2024, arXiv:2401.01879).
    """
    return math.log(n) - (n - 1) / n


@dataclass(frozen=True, slots=True)
class Point:
    """Best-of-n of the base."""

    n: int
    kl: float
    """upper bound, nats"""
    reward: float
    stderr: float
    prompts: int
    """prompts with at least n scored samples"""


@dataclass(frozen=True, slots=True)
class Frontier:
    """What the base reaches by drawing n samples and keeping the best, and where the policy stands.

    Best-of-n needs no training, so it says what a KL is worth: a policy has earned its KL if it
    scores above best-of-n at the same KL.
    """

    samples_each: int
    points: list[Point]
    policy: dict[str, float]
    """kl, reward, stderr"""
    verdict: Verdict
    best_of_n_at_policy_kl: float
    """interpolated; NaN beyond the last point"""
    difference: float
    """policy less best-of-n at its KL, mean over prompts"""
    difference_stderr: float


def frontier_of(base: Sequence[Row], policy: Sequence[Row], *, plain_sampling: bool) -> Frontier:
    """The frontier from rows of the base (``SAMPLES`` a prompt) and of the policy.

    Args:
        plain_sampling: responses were drawn at temperature 1 without top-k, top-p or a minimum
            length; elsewise the policy's KL is not of the distribution that best-of-n starts from.
    """
    scores, own = _by_prompt(base), _by_prompt(policy)
    found, last = figures_of(policy), best_of_n_kl(BEST_OF[-1])
    kl = found.figures["kl_mean"]
    comparable = plain_sampling and math.isfinite(kl)
    best: list[float] = []
    differences: list[tuple[float, int]] = []
    for prompt in own:
        if comparable and kl <= last and len(scores.get(prompt, ())) >= BEST_OF[-1]:
            best.append(_interpolated(scores[prompt], kl))
            differences.append((fmean(own[prompt]) - best[-1], prompt))
    difference, spread = _mean([gap for gap, _ in differences]), clustered_stderr(differences)
    verdict: Verdict = "beyond" if comparable and kl > last else "not comparable"
    if differences:
        clear = abs(difference) > 2 * spread  # never with a single prompt, whose spread is NaN
        verdict = "level" if not clear else "above" if difference > 0 else "below"
    return Frontier(
        SAMPLES, [_point(scores, n) for n in BEST_OF],
        {"kl": kl, "reward": found.figures["reward_mean"], "stderr": found.stderr["reward_mean"]},
        verdict, _mean(best), difference, spread)


def frontier_svg(frontier: Frontier) -> str:
    """The frontier and the policy as an SVG picture."""
    from ppocli.runs.charts import Line, line_chart

    lines = [Line("best-of-n of the base", [(p.kl, p.reward) for p in frontier.points])]
    place = (frontier.policy["kl"], frontier.policy["reward"])
    if all(map(math.isfinite, place)):
        lines.append(Line("policy", [place], kind="dots"))
    return line_chart(lines, title="reward by KL to the base", x_label="KL (nats)",
                      y_label="reward")


def _by_prompt(rows: Sequence[Row]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            found.setdefault(row["prompt_index"], []).append(row["score"])
    return found


def _point(scores: dict[int, list[float]], n: int) -> Point:
    values = [(best_of_n(each, n), prompt) for prompt, each in scores.items() if len(each) >= n]
    return Point(n, best_of_n_kl(n), _mean([value for value, _ in values]),
                 clustered_stderr(values), len(values))


def _interpolated(scores: Sequence[float], kl: float) -> float:
    """Best-of-n of one prompt at a KL, linear between the points; ``kl`` below 0 counts as 0."""
    for low, high in pairwise(BEST_OF):
        left, right = best_of_n_kl(low), best_of_n_kl(high)
        if kl <= right:
            share = max(kl - left, 0.0) / (right - left)
            return (1 - share) * best_of_n(scores, low) + share * best_of_n(scores, high)
    return best_of_n(scores, BEST_OF[-1])


def report_of(identity: dict[str, Any], targets: dict[str, Target], rows: dict[str, list[Row]],
              frontier: Frontier | None, *, session: EvalSession, name: str, started: str,
              seconds: float) -> dict[str, Any]:
    """The contents of eval.json, from the rows of samples.jsonl; docs/eval.md explains each name.

    Args:
        identity: with the weights of every model.
        targets, rows: by model: policy, against, base.
        session: of any of the models.
        seconds: what this process took.
    """
    policy, count, device = targets["policy"], identity["prompts"]["count"], session.backend.device
    digest = identity["base_digest"]

    def model(role: str) -> dict[str, Any]:
        target = targets[role]
        return {"model": {"name": target.name, "path": target.model, "step": target.step,
                          "digest": identity["models"][role]}, **asdict(figures_of(rows[role]))}

    return {
        "schema": SCHEMA,
        "name": name,
        "run": None if policy.run_dir is None else str(policy.run_dir),
        "step": policy.step,
        **model("policy"),
        "against": model("against") if "against" in targets else None,
        "win_rate": compare(rows["policy"], rows["against"]) if "against" in targets else None,
        "frontier": None if frontier is None else {
            **asdict(frontier), "base": asdict(figures_of(rows["base"]))},
        "base": None if digest is None else {"path": session.cfg.model.path, "digest": digest},
        "prompts": {"digest": identity["prompts"]["digest"], "count": count,
                    "samples_each": len(rows["policy"]) // count},
        "generation": identity["generation"],
        "seed": identity["seed"],
        "settings": {key: value for key, value in identity.items()
                     if key not in ("generation", "seed", "models", "base_digest")},
        "versions": torch_versions(),
        "time": {"started": started, "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                 "seconds": seconds},
        "hardware": {
            "device": device.type,
            "name": (torch.cuda.get_device_name(device) if device.type == "cuda"
                     else platform.processor() or platform.machine()),
            "threads": torch.get_num_threads(), "precision": session.backend.precision,
            "peak_memory_mib": session.backend.peak_memory_mib()},
    }
