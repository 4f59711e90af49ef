"""From scores to what tokens are rewarded with: running moments and scaling, penalties of whole
responses, whitening."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of scores (Chan et al. 1979, parallel updating);
    exact to resume."""

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
        if (count := self.count + other.count) == 0:
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
    return scaled if clip is None else [min(max(s, -clip), clip) for s in scaled]


def clipped(rewards: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Every entry within [-clip, clip]; as it is without ``clip``."""
    return rewards if clip is None else rewards.clamp(-clip, clip)


def overlong_penalties(lengths: Sequence[int], *, longest: int, buffer: int, factor: float = 1.0
                       ) -> list[float]:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), as amounts to be
    subtracted: 0 up to ``longest - buffer`` tokens, then rising by a straight line to ``factor`` at
    ``longest`` tokens and beyond.

    Args:
        lengths: response tokens of each sample.
        longest: the paper's L_max.
        buffer: the paper's L_cache, above 0.
        factor: largest penalty (verl's ``overlong_buffer.penalty_factor``).
    """
    return [factor * min(max(length - (longest - buffer), 0) / buffer, 1.0) for length in lengths]


def penalised(scores: Sequence[float], amounts: Sequence[Sequence[float]], *, replace: bool
              ) -> list[float]:
    """Scores after the penalties of responses that never ended or are too short.

    Subtracted, as TRL's ``missing_eos_penalty``, both if both apply; or, as torchtune's
    ``reward_penalty`` and summarize-from-feedback, put in place of the score, the larger one if
    both apply.

    Args:
        amounts: of the penalties that apply to each sample.
    """
    return [score if not given else -max(given) if replace else score - sum(given)
            for score, given in zip(scores, amounts, strict=True)]


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` where ``mask`` is true, a scalar; 0 if nothing is."""
    count = mask.sum(dtype=torch.float64)
    return ((x * mask).sum(dtype=torch.float64) / count.clamp(min=1)).to(x.dtype)


def whiten(x: torch.Tensor, mask: torch.Tensor, *, center: bool) -> torch.Tensor:
    """Scale to unit variance over the true entries of ``mask``, and to zero mean if ``center``.

    ``(x - mean) / sqrt(var + 1e-8)``, plus the mean again without ``center``; biased variance, as
    openai/lm-human-preferences (``lm_human_preferences/utils/core.py::whiten``) has it.

    Args:
        x: [B, R] values of a whole rollout, those of all ranks.
        mask: [B, R] bool.
        center: true leaves mean 0 (advantages), false keeps the mean (rewards).

    Returns:
        [B, R], zero where ``mask`` is false.
    """
    mean = masked_mean(x, mask)
    var = masked_mean((x - mean).square(), mask)
    if x.dtype != torch.float64 and not bool(torch.isfinite(var)):
        # squares beyond fp32 would whiten to 0: scores from 1e19 on
        return whiten(x.double(), mask, center=center).to(x.dtype)
    scaled = (x - mean) * torch.rsqrt(var + 1e-8)
    return (scaled if center else scaled + mean) * mask
