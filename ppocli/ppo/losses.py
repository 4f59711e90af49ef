"""The formulas of the loss, and of scores and KL before they become rewards of tokens (running
moments, penalties, whitening, KL estimators and the controller of their coefficient); the clipped
PPO objective over response tokens laid flat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

SAMPLED_ESTIMATORS = ("k1", "abs", "k2", "k3", "k3+")
"""of KL(policy || reference), with ``l = logprobs - ref_logprobs`` (Schulman 2020, "Approximating
KL Divergence"): k1 = l, abs = abs(l), k2 = l^2 / 2 (TRL's ``mse``), k3 = exp(-l) - 1 + l, for which
l is cut at -20 (``verl/trainer/ppo/core_algos.py@b178a3c``): exp(89) is infinite in fp32. k3+ is k3
with the gradient of k2 (there, ``kl_penalty``).

As a loss on the policy's own samples, k1 has gradient 0 on average, k2 that of
KL(policy || reference), and k3 that of KL(reference || policy), to first order the same (arXiv
2510.01555, 2512.21852)."""
ROUNDING = 1e-5
"""nats by which a token's logprob may differ in fp32 between passes of other shapes"""
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum",
                "seq-mean-token-sum-norm")
"""by the names of ``verl/trainer/ppo/core_algos.py@1dda039``: ``token-mean`` divides by all
response tokens of the update, ``token-sum`` by nothing, ``seq-mean-token-mean`` by samples and own
length, ``seq-mean-token-sum`` by samples, ``seq-mean-token-sum-norm`` by samples and the longest
response there can be (Dr. GRPO, arXiv 2503.20783)"""
POLICY_LOSSES = ("clip", "gspo", "cispo", "dis")
"""``clip`` is ``max(-A ratio, -A clip(ratio, 1-c, 1+c_high))``, with a dual clip ``d`` at most
``-d A`` where A < 0. In the others w is the ratio without a gradient: ``gspo`` is the same with the
response's mean log-ratio (GSPO-token, Zheng et al. 2025, arXiv 2507.18071, eq. 13); ``cispo`` is
``-min(w, 1+c_high) A logprob`` (MiniMax 2025, arXiv 2506.13585, eq. 4, without a lower bound as
there); ``dis`` is ``-w A logprob``, and 0 outside the clip range on either side (SAO, arXiv
2607.07508)"""
MAX_LOG_RATIO = 20.0
"""where the log-ratio is cut before it is exponentiated, as in
``verl/trainer/ppo/core_algos.py@b178a3c::compute_policy_loss_vanilla`` and
``OpenRLHF/openrlhf/models/loss.py@3c3be62::PolicyLoss``. From 89 on the ratio is infinite in fp32,
and its gradient NaN even where the clip leaves it out. They cut at -20 too, where nothing overflows
and a gradient is lost."""


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
    """Scale [B, R] values of a whole rollout, those of all ranks, to unit variance over the true
    entries of ``mask``, and to zero mean if ``center`` (advantages, not rewards); zero elsewhere.

    ``(x - mean) / sqrt(var + 1e-8)``, plus the mean again without ``center``; biased variance, as
    openai/lm-human-preferences (``lm_human_preferences/utils/core.py::whiten``) has it.
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
    """Estimate of KL(policy || reference) per sampled token, in nats, by one of
    :data:`SAMPLED_ESTIMATORS`; ``full``, over the whole vocabulary, is computed by the model."""
    log_ratio = logprobs - ref_logprobs
    k2, cut = 0.5 * log_ratio.square(), log_ratio.clamp(min=-20.0)
    k3 = torch.expm1(-cut) + cut
    return {"k1": log_ratio, "abs": log_ratio.abs(), "k2": k2, "k3": k3,
            "k3+": k2 - k2.detach() + k3.detach()}[estimator]


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


def token_weights(lengths: torch.Tensor, *, aggregation: str, total_tokens: int,
                  total_samples: int, max_tokens: int) -> torch.Tensor:
    """[B] the weight of each token of samples with these ``lengths`` [B] in the loss of one update,
    which has ``total_tokens`` and ``total_samples`` over all micro-batches and ranks; no response
    can have more than ``max_tokens``. Weighting tokens instead of averaging micro-batches makes the
    gradient independent of micro-batch size, accumulation and number of ranks."""
    samples = max(total_samples, 1)
    divisors: dict[str, Any] = {
        "token-mean": max(total_tokens, 1), "token-sum": 1, "seq-mean-token-sum": samples,
        "seq-mean-token-mean": lengths.clamp(min=1).float() * samples,
        "seq-mean-token-sum-norm": samples * max_tokens}
    return torch.ones_like(lengths, dtype=torch.float32).div(divisors[aggregation])


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The settings of the loss."""

    cliprange: float
    cliprange_high: float | None = None
    """upper clip of the ratio (DAPO, Yu et al. 2025, arXiv 2503.14476); None: ``cliprange``"""
    policy_loss: str = "clip"
    """one of :data:`POLICY_LOSSES`"""
    dual_clip: float | None = None
    """bound on the loss of tokens with a negative advantage (Ye et al. 2019, arXiv 1912.09729)"""
    cliprange_value: float | None = 0.2
    """None: values are not clipped"""
    vf_coef: float = 0.0
    ent_coef: float = 0.0
    has_entropy: bool = False
    """whether the entropy is a term of the loss, now or later in the run"""
    nll_coef: float = 0.0
    """of the likelihood of imitated tokens"""
    kl_coef: float = 0.0
    """of the KL term; 0 where the reward is charged instead"""
    kl_estimator: str = "k3"
    """of the KL term, one of :data:`SAMPLED_ESTIMATORS`, unless the full KL is an argument"""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """N response tokens of a micro-batch, laid flat, each tensor [N] but ``lengths``."""

    logprobs: torch.Tensor
    """of the policy as it is now, as are ``values`` and ``entropy``"""
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """each token's weight in the loss, from :func:`token_weights`"""
    total_tokens: int
    """of the whole update; the diagnostics are means over them"""
    values: torch.Tensor | None = None
    """None without a critic, as are the next two"""
    old_values: Any = None
    returns: Any = None
    entropy: torch.Tensor | None = None
    """None where it isn't part of the loss, as ``ref_logprobs``"""
    ref_logprobs: torch.Tensor | None = None
    lengths: Any = None
    """[b] tokens of each response, whose sum is N; gspo alone needs them"""
    imitated: torch.Tensor | None = None
    """each token's weight in the likelihood of good responses, which over the whole update sum to
    1; or None"""
    full_kl: torch.Tensor | None = None
    """the KL over the whole vocabulary, in place of an estimate; or None"""
    importance: torch.Tensor | None = None
    """a factor of each token's policy loss; or None"""


class PPOLoss(NamedTuple):
    """The loss of one micro-batch and its terms; scalars.

    Summed over the micro-batches of an update, the terms are the update's loss and the diagnostics
    are means over its response tokens (``max_log_ratio`` apart).
    """

    total: torch.Tensor
    policy: torch.Tensor
    value: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    """the KL term before its coefficient; 0 where it is not part of the loss"""
    nll: torch.Tensor
    """mean negative log-likelihood of imitated tokens, before its coefficient; 0 without any"""
    approx_kl: torch.Tensor
    """mean of (old - new logprob): what early stopping looks at"""
    approx_kl_squared: torch.Tensor
    """half the mean squared log-ratio"""
    policy_clipfrac: torch.Tensor
    dual_clipfrac: torch.Tensor
    """share of tokens whose loss ``dual_clip`` cut"""
    value_clipfrac: torch.Tensor
    value_error: torch.Tensor
    """mean squared (value - return)"""
    ratio: torch.Tensor
    max_log_ratio: torch.Tensor
    """largest absolute log-ratio, which no clip has touched"""
    ptx: torch.Tensor
    """mean negative log-likelihood of the examples of ``ppo.ptx``; 0 of samples"""


def _sequence_ratio(log_ratio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[N] log-ratios that have the value of their response's mean, and each its own gradient."""
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths,
                                  output_size=len(log_ratio))
    means = log_ratio.new_zeros(len(lengths)).index_add(0, row, log_ratio.detach()) / lengths
    return log_ratio - log_ratio.detach() + means[row]


def _policy_terms(tokens: LossInputs, log_ratio: torch.Tensor, options: LossOptions
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N] policy loss of each token, and where the clip and the dual clip were what counted."""
    if options.policy_loss == "gspo":
        log_ratio = _sequence_ratio(log_ratio, tokens.lengths)
    ratio, advantages = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)), tokens.advantages
    high = options.cliprange if options.cliprange_high is None else options.cliprange_high
    near = ratio.clamp(1.0 - options.cliprange, 1.0 + high)
    if options.policy_loss in ("cispo", "dis"):
        return _weighted_logprobs(tokens, ratio, near, 1.0 + high, options.policy_loss)
    unclipped, clipped = -advantages * ratio, -advantages * near
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    is_bounded = torch.zeros_like(is_clipped)
    if options.dual_clip is not None:
        loss, is_bounded = _dual_clipped(loss, advantages, options.dual_clip)
    return loss, is_clipped, is_bounded


def _dual_clipped(loss: torch.Tensor, advantages: torch.Tensor, dual_clip: float
                  ) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] the losses, bounded where advantages are negative, and where the bound counted."""
    bound = -advantages * dual_clip
    is_bounded = (advantages < 0) & (loss > bound)
    return torch.where(is_bounded, bound, loss), is_bounded


def _weighted_logprobs(tokens: LossInputs, ratio: torch.Tensor, near: torch.Tensor, most: float,
                       policy_loss: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`_policy_terms`, of ``cispo`` and ``dis``."""
    # a floor under cispo's weights would keep pushing down what is rare already
    near = near if policy_loss == "dis" else ratio.clamp(max=most)
    outside = near != ratio
    weight = ratio.masked_fill(outside, 0.0) if policy_loss == "dis" else near
    return (-weight.detach() * tokens.advantages * tokens.logprobs, outside,
            torch.zeros_like(outside))


def _value_terms(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor,
                 cliprange: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``max((V-R)^2, (V_old + clip(V-V_old, -c, c) - R)^2)`` of each token [N], or ``(V-R)^2``
    without a clip range; where the clip was what counted; and ``(V-R)^2``."""
    square = (values - returns).square()
    if cliprange is None:
        return square, torch.zeros_like(square, dtype=torch.bool), square
    moved = values - old_values
    change = moved.clamp(-cliprange, cliprange)
    clipped = (old_values + change - returns).square()
    # old + (V - old) may be rounded away from V, which is no clipping
    return torch.maximum(square, clipped), (clipped > square) & (change != moved), square


def ppo_loss(options: LossOptions, tokens: LossInputs) -> PPOLoss:
    """Clipped policy and value losses (Schulman et al. 2017, eq. 7 and 9): policy + vf_coef * value
    / 2 - ent_coef * entropy + kl_coef * kl + nll_coef * nll, each but the last a sum of ``weights``
    times the term. The KL is differentiated as it stands (Shao et al. 2024, eq. 4, for k3), nll is
    ``-sum imitated logprob`` (VAPO, Yue et al. 2025, arXiv 2504.05118)."""
    logprobs, weights = tokens.logprobs, tokens.weights
    log_ratio, share = logprobs - tokens.old_logprobs, 1.0 / max(tokens.total_tokens, 1)
    losses, is_clipped, is_bounded = _policy_terms(tokens, log_ratio, options)
    policy = (weights * (losses if tokens.importance is None else tokens.importance * losses)).sum()
    total, zero = policy, policy.new_zeros(())
    value = entropy = kl = nll = value_clipfrac = value_error = zero
    if tokens.values is not None:
        squares, is_cut, errors = _value_terms(tokens.values, tokens.old_values, tokens.returns,
                                               options.cliprange_value)
        value = 0.5 * (weights * squares).sum()
        value_clipfrac, value_error = is_cut.sum() * share, errors.detach().sum() * share
        total = total + options.vf_coef * value
    if tokens.entropy is not None:
        entropy = tokens.entropy.detach().sum() * share
        total = total - options.ent_coef * (weights * tokens.entropy).sum()
    if tokens.ref_logprobs is not None:
        kl = tokens.full_kl if tokens.full_kl is not None else kl_per_token(
            logprobs, tokens.ref_logprobs, options.kl_estimator)
        # the gradient of a KL that is rounding alone is noise, of which Adam makes whole steps
        kl = torch.where((logprobs - tokens.ref_logprobs).detach().abs() <= ROUNDING, 0.0, kl)
        kl = (weights * kl).sum()
        total = total + options.kl_coef * kl
    if tokens.imitated is not None:
        nll = -(tokens.imitated * logprobs).sum()
        total = total + options.nll_coef * nll
    moved = log_ratio.detach()
    return PPOLoss(
        total, policy.detach(), value.detach(), entropy, kl.detach(), nll.detach(),
        approx_kl=-moved.sum() * share, approx_kl_squared=0.5 * moved.square().sum() * share,
        policy_clipfrac=is_clipped.sum() * share, dual_clipfrac=is_bounded.sum() * share,
        value_clipfrac=value_clipfrac, value_error=value_error,
        ratio=torch.exp(moved.clamp(max=MAX_LOG_RATIO)).sum() * share,
        max_log_ratio=moved.abs().max() if moved.numel() else zero, ptx=zero)
