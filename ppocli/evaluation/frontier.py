"""The KL-reward frontier: what the base reaches by drawing n samples and keeping the best.

Best-of-n needs no training, so it says what a KL is worth: a policy has earned its KL if it scores
above best-of-n at the same KL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ppocli.evaluation.figures import Row, clustered_stderr

SAMPLES = 16
"""samples of the base for each prompt"""
BEST_OF = (1, 2, 4, 8, 16)
Verdict = Literal["above", "level", "below", "beyond", "not comparable"]


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
    """Best-of-n of the base, and where the policy stands to it."""

    points: tuple[Point, ...]
    policy_kl: float
    policy_reward: float
    policy_stderr: float
    verdict: Verdict
    best_of_n: float
    """best-of-n at the policy's KL, interpolated; NaN beyond the last point"""
    difference: float
    """policy less best-of-n at its KL, mean over prompts"""
    difference_stderr: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types (NaN among them)."""
        return {"samples_each": SAMPLES,
                "points": [{"n": p.n, "kl": p.kl, "reward": p.reward, "stderr": p.stderr,
                            "prompts": p.prompts} for p in self.points],
                "policy": {"kl": self.policy_kl, "reward": self.policy_reward,
                           "stderr": self.policy_stderr},
                "verdict": self.verdict, "best_of_n_at_policy_kl": self.best_of_n,
                "difference": self.difference, "difference_stderr": self.difference_stderr}


def frontier_of(base: Sequence[Row], policy: Sequence[Row], *, plain_sampling: bool) -> Frontier:
    """The frontier from rows of the base (``SAMPLES`` a prompt) and of the policy.

    Args:
        plain_sampling: responses were drawn at temperature 1 without top-k, top-p or a minimum
            length; elsewise the policy's KL is not of the distribution that best-of-n starts from.
    """
    scores, own = _by_prompt(base), _by_prompt(policy)
    points = tuple(_point(scores, n) for n in BEST_OF)
    flat = [(row["score"], row["prompt_index"]) for row in policy if row["score"] is not None]
    kls = [row["kl"] for row in policy if row["kl"] is not None]
    kl = math.fsum(kls) / len(kls) if kls else math.nan
    reward = math.fsum(s for s, _ in flat) / len(flat) if flat else math.nan
    error = clustered_stderr([s for s, _ in flat], [p for _, p in flat])
    gaps: list[tuple[float, float]] = []
    if plain_sampling and math.isfinite(kl) and kl <= best_of_n_kl(BEST_OF[-1]):
        gaps = [(_interpolated(scores[prompt], kl), math.fsum(own[prompt]) / len(own[prompt]))
                for prompt in own if len(scores.get(prompt, ())) >= BEST_OF[-1]]
    differences = [mine - best for best, mine in gaps]
    n = len(gaps)
    best = math.fsum(b for b, _ in gaps) / n if n else math.nan
    difference = math.fsum(differences) / n if n else math.nan
    spread = clustered_stderr(differences, range(n))
    verdict: Verdict = "not comparable"
    if plain_sampling and math.isfinite(kl) and kl > best_of_n_kl(BEST_OF[-1]):
        verdict = "beyond"
    elif n:
        clear = abs(difference) > 2 * spread  # never with a single prompt, whose spread is NaN
        verdict = "level" if not clear else "above" if difference > 0 else "below"
    return Frontier(points, kl, reward, error, verdict, best, difference, spread)


def frontier_svg(frontier: Frontier) -> str:
    """The frontier and the policy as an SVG picture."""
    from ppocli.runs.charts import Line, line_chart

    lines = [Line("best-of-n of the base", [(p.kl, p.reward) for p in frontier.points])]
    if math.isfinite(frontier.policy_kl) and math.isfinite(frontier.policy_reward):
        lines.append(Line("policy", [(frontier.policy_kl, frontier.policy_reward)], kind="dots"))
    return line_chart(lines, title="reward by KL to the base", x_label="KL (nats)",
                      y_label="reward")


def _by_prompt(rows: Sequence[Row]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            found.setdefault(row["prompt_index"], []).append(row["score"])
    return found


def _point(scores: dict[int, list[float]], n: int) -> Point:
    values = [best_of_n(each, n) for each in scores.values() if len(each) >= n]
    mean = math.fsum(values) / len(values) if values else math.nan
    return Point(n, best_of_n_kl(n), mean, clustered_stderr(values, range(len(values))),
                 len(values))


def _interpolated(scores: Sequence[float], kl: float) -> float:
    """Best-of-n of one prompt at a KL, linear between the points; ``kl`` below 0 counts as 0."""
    for low, high in pairwise(BEST_OF):
        left, right = best_of_n_kl(low), best_of_n_kl(high)
        if kl <= right:
            share = max(kl - left, 0.0) / (right - left)
            return (1 - share) * best_of_n(scores, low) + share * best_of_n(scores, high)
    return best_of_n(scores, BEST_OF[-1])
