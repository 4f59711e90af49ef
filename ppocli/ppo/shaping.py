"""From scores and KL to what tokens are rewarded with: running moments, penalties of whole
responses, whitening; KL estimators against the reference and the controller of their coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SAMPLED_ESTIMATORS = ("k1", "abs", "k2", "k3", "k3+")
ROUNDING = 1e-5
"""nats by which a token's logprob may differ in fp32 between passes of other shapes"""


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

    @staticmethod
    def of(xs: Sequence[float]) -> RunningMoments:
        """The moments of one set of samples."""
        if not xs:
            return RunningMoments()
        mean = math.fsum(xs) / len(xs)
        return RunningMoments(len(xs), mean, math.fsum((x - mean) ** 2 for x in xs))


def overlong_penalties(lengths: torch.Tensor, *, longest: int, buffer: int, factor: float = 1.0
                       ) -> torch.Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), as amounts to be
    subtracted: 0 up to ``longest - buffer`` tokens, then rising by a straight line to ``factor`` at
    ``longest`` tokens and beyond.

    Args:
        lengths: [B] int64 response tokens of each sample.
        longest: the paper's L_max.
        buffer: the paper's L_cache, above 0.
        factor: largest penalty (verl's ``overlong_buffer.penalty_factor``).

    Returns:
        [B] float64.
    """
    excess = (lengths - (longest - buffer)).clamp(min=0).double()
    return factor * (excess / buffer).clamp(max=1.0)


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


def kl_per_token(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str
                 ) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled tokens, in nats.

    With ``l = logprobs - ref_logprobs`` (Schulman 2020, "Approximating KL Divergence"):
    k1 = l, abs = abs(l), k2 = l^2 / 2 (TRL's ``mse``), k3 = exp(-l) - 1 + l, for which l is cut at
    -20 (``verl/trainer/ppo/core_algos.py@b178a3c``): exp(89) is infinite in fp32. k3+ is k3 with
    the gradient of k2 (there, ``kl_penalty``).

    As a loss on the policy's own samples, k1 has gradient 0 on average, k2 that of
    KL(policy || reference), and k3 that of KL(reference || policy), to first order the same (arXiv
    2510.01555, 2512.21852).

    Args:
        logprobs, ref_logprobs: equal shapes, of the sampled tokens.
        estimator: one of ``SAMPLED_ESTIMATORS``. (``full`` needs the whole vocabulary and is
            computed by the model.)

    Raises:
        ValueError: for another name.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "abs":
        return log_ratio.abs()
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator in ("k3", "k3+"):
        cut = log_ratio.clamp(min=-20.0)
        k3 = torch.expm1(-cut) + cut
        if estimator == "k3":
            return k3
        k2 = 0.5 * log_ratio.square()
        return k2 - k2.detach() + k3.detach()
    raise ValueError(f"{estimator!r} is not one of {SAMPLED_ESTIMATORS}")


def adapt_kl_coef(coef: float, sequence_kl: float, *, target: float, horizon: int,
                  num_samples: int, rounding: float = 0.0) -> float:
    """One step of the adaptive controller (Ziegler et al. 2019, section 2.2).

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1))``, once per
    rollout.

    Args:
        sequence_kl: KL summed over the tokens of a response, mean over samples (nats).
        num_samples: samples of the rollout, over all ranks.
        rounding: what a KL of 0 may be off by; so little below zero counts as 0.

    Returns:
        The new coefficient. A KL below zero is an artefact of how tokens were sampled, not a
        distance, and leaves the coefficient as it is.
    """
    if sequence_kl < -rounding:
        return coef
    error = min(max(sequence_kl / target - 1.0, -0.2), 0.2)
    # a rollout larger than the horizon must not turn the penalty into a reward
    return coef * (1.0 + error * min(num_samples / horizon, 1.0))
