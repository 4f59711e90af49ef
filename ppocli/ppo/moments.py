"""Running mean and variance of scores, mergeable and exact to resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared deviations (Chan et al. 1979, parallel updating)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation with Bessel's correction; 1 below two samples or without spread.

        Equal samples leave a spread of rounding errors; dividing by it would blow scores up.
        """
        if self.count < 2:
            return 1.0
        std = math.sqrt(max(self.m2, 0.0) / (self.count - 1))
        return std if std > 1e-6 * max(1.0, abs(self.mean)) else 1.0

    def merge(self, other: RunningMoments) -> RunningMoments:
        """The moments of both sets of samples together."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        m2 = self.m2 + other.m2 + delta * delta * self.count * other.count / count
        return RunningMoments(count, mean, m2)


def moments_of(xs: Sequence[float]) -> RunningMoments:
    """The moments of one set of samples."""
    if not xs:
        return RunningMoments()
    mean = math.fsum(xs) / len(xs)
    return RunningMoments(len(xs), mean, math.fsum((x - mean) ** 2 for x in xs))


def scale_scores(scores: Sequence[float], *, std: float, mean: float = 0.0,
                 clip: float | None = None) -> list[float]:
    """``(score - mean) / std``, then clipped to [-clip, clip] (TRL's order: scale, then clip)."""
    scaled = [(s - mean) / std for s in scores]
    if clip is not None:
        scaled = [min(max(s, -clip), clip) for s in scaled]
    return scaled


def clipped(rewards: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Every entry within [-clip, clip]; as it is without ``clip``."""
    return rewards if clip is None else rewards.clamp(-clip, clip)
