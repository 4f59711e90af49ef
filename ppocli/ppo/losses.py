"""The clipped PPO objective over response tokens laid flat."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ppocli.ppo.shaping import ROUNDING, kl_per_token

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum",
                "seq-mean-token-sum-norm")
POLICY_LOSSES = ("clip", "gspo", "cispo", "dis")
MAX_LOG_RATIO = 20.0
"""where the log-ratio is cut before it is exponentiated, as in
``verl/trainer/ppo/core_algos.py@b178a3c::compute_policy_loss_vanilla`` and
``OpenRLHF/openrlhf/models/loss.py@3c3be62::PolicyLoss``. From 89 on the ratio is infinite in fp32,
and its gradient NaN even where the clip leaves it out. They cut at -20 too, where nothing overflows
and a gradient is lost."""


def token_weights(lengths: torch.Tensor, *, aggregation: str, total_tokens: int,
                  total_samples: int, max_tokens: int) -> torch.Tensor:
    """The weight of each sample's tokens in the loss of one optimizer update.

    Weighting tokens instead of averaging micro-batches makes the gradient independent of
    micro-batch size, accumulation and number of ranks.

    Args:
        lengths: [B] response tokens of each sample in this part of the update.
        aggregation: by the names of ``verl/trainer/ppo/core_algos.py@1dda039``: ``token-mean``
            divides by all response tokens of the update, ``token-sum`` by nothing,
            ``seq-mean-token-mean`` by samples and own length, ``seq-mean-token-sum`` by samples,
            ``seq-mean-token-sum-norm`` by samples and ``max_tokens`` (Dr. GRPO, arXiv 2503.20783).
        total_tokens, total_samples: of the whole update, over all micro-batches and ranks.
        max_tokens: the longest response there can be.

    Returns:
        [B] weight of each token of the sample.
    """
    ones, samples = torch.ones_like(lengths, dtype=torch.float32), max(total_samples, 1)
    if aggregation == "seq-mean-token-mean":
        return 1.0 / (lengths.clamp(min=1).float() * samples)
    divisors = {"token-mean": max(total_tokens, 1), "token-sum": 1, "seq-mean-token-sum": samples,
                "seq-mean-token-sum-norm": samples * max_tokens}
    if aggregation not in divisors:
        raise ValueError(f"{aggregation!r} is not one of {AGGREGATIONS}")
    return ones / divisors[aggregation]


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
    nll_coef: float = 0.0
    """of the likelihood of imitated tokens"""
    kl_coef: float = 0.0
    """of the KL term; 0 where the reward is charged instead"""
    kl_estimator: str = "k3"
    """of the KL term, one of ``ppocli.ppo.shaping.SAMPLED_ESTIMATORS``, unless the full KL is an
    argument"""


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


def _sequence_ratio(log_ratio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[N] log-ratios that have the value of their response's mean, and each its own gradient."""
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths,
                                  output_size=len(log_ratio))
    means = log_ratio.new_zeros(len(lengths)).index_add(0, row, log_ratio.detach()) / lengths
    return log_ratio - log_ratio.detach() + means[row]


def _policy_terms(logprobs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor,
                  lengths: torch.Tensor | None, options: LossOptions
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token's policy loss [N], and where the clip and the dual clip were what counted."""
    if options.policy_loss == "gspo":
        if lengths is None:
            raise ValueError("gspo needs the lengths of the responses")
        log_ratio = _sequence_ratio(log_ratio, lengths)
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    high = options.cliprange if options.cliprange_high is None else options.cliprange_high
    near = ratio.clamp(1.0 - options.cliprange, 1.0 + high)
    if options.policy_loss in ("cispo", "dis"):
        # a floor under cispo's weights would keep pushing down what is rare already
        near = near if options.policy_loss == "dis" else ratio.clamp(max=1.0 + high)
        outside = near != ratio
        weight = ratio.masked_fill(outside, 0.0) if options.policy_loss == "dis" else near
        return -weight.detach() * advantages * logprobs, outside, torch.zeros_like(outside)
    unclipped = -advantages * ratio
    clipped = -advantages * near
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    if options.dual_clip is None:
        return loss, is_clipped, torch.zeros_like(is_clipped)
    bound = -advantages * options.dual_clip
    is_bounded = (advantages < 0) & (loss > bound)
    return torch.where(is_bounded, bound, loss), is_clipped, is_bounded


def ppo_loss(options: LossOptions, *, logprobs: torch.Tensor, old_logprobs: torch.Tensor,
             advantages: torch.Tensor, weights: torch.Tensor, total_tokens: int,
             values: torch.Tensor | None = None, old_values: torch.Tensor | None = None,
             returns: torch.Tensor | None = None, entropy: torch.Tensor | None = None,
             ref_logprobs: torch.Tensor | None = None,
             lengths: torch.Tensor | None = None, imitated: torch.Tensor | None = None,
             full_kl: torch.Tensor | None = None,
             importance: torch.Tensor | None = None) -> PPOLoss:
    """Clipped policy and value losses (Schulman et al. 2017, eq. 7 and 9), all inputs [N].

    Policy: ``max(-A ratio, -A clip(ratio, 1-c, 1+c_high))``, with a dual clip ``d`` at most
    ``-d A`` where A < 0. ``options.policy_loss`` has others, w being the ratio without a gradient:
    ``gspo`` is the same with the response's mean log-ratio (GSPO-token, Zheng et al. 2025, arXiv
    2507.18071, eq. 13); ``cispo`` is ``-min(w, 1+c_high) A logprob`` (MiniMax 2025, arXiv
    2506.13585, eq. 4, without a lower bound as there); ``dis`` is ``-w A logprob``, and 0 outside
    the clip range on either side (SAO, arXiv 2607.07508).

    Value: ``0.5 max((V-R)^2, (V_old + clip(V-V_old, -c, c) - R)^2)``, or ``0.5 (V-R)^2`` without a
    clip range. KL: the estimate between policy and reference, differentiated as it stands (Shao et
    al. 2024, eq. 4, for k3); 0 for a token on which both agree but for fp32's rounding.
    Likelihood of good responses: ``-sum imitated logprob`` (VAPO, Yue et al. 2025, arXiv
    2504.05118: a mean over the tokens of all correct ones).
    total = policy + vf_coef * value - ent_coef * entropy + kl_coef * kl + nll_coef * nll, each but
    the last a sum of ``weights`` times the term.

    Args:
        weights: each token's weight in the loss, from :func:`token_weights`.
        total_tokens: response tokens of the whole update; the diagnostics are means over them,
            whatever the aggregation of the loss.
        values, old_values, returns: all None without a critic.
        entropy: of the policy at each token, or None when it is not computed.
        ref_logprobs: of the reference, or None when the KL is not part of the loss.
        lengths: [b] tokens of each response, whose sum is N; gspo alone needs them.
        imitated: each token's weight in the likelihood of good responses, which over the whole
            update sum to 1; or None.
        full_kl: the KL over the whole vocabulary, in place of an estimate; or None.
        importance: a factor of each token's policy loss, of
            :func:`ppocli.ppo.off_policy.importance_weights`; or None.
    """
    log_ratio, share = logprobs - old_logprobs, 1.0 / max(total_tokens, 1)
    losses, is_clipped, is_bounded = _policy_terms(logprobs, log_ratio, advantages,
                                                   lengths, options)
    policy = (weights * (losses if importance is None else importance * losses)).sum()
    total, zero = policy, policy.new_zeros(())
    square = square_clipped = moved = change = policy.new_zeros(1)
    value = mean_entropy = kl = nll = zero
    if values is not None and old_values is not None and returns is not None:
        square = square_clipped = (values - returns).square()
        if options.cliprange_value is not None:
            moved = values - old_values
            change = moved.clamp(-options.cliprange_value, options.cliprange_value)
            square_clipped = (old_values + change - returns).square()
        value = 0.5 * (weights * torch.maximum(square, square_clipped)).sum()
        total = total + options.vf_coef * value
    if entropy is not None:
        mean_entropy = entropy.detach().sum() * share
        total = total - options.ent_coef * (weights * entropy).sum()
    if ref_logprobs is not None:
        kl = full_kl if full_kl is not None else kl_per_token(
            logprobs, ref_logprobs, options.kl_estimator)
        # the gradient of a KL that is rounding alone is noise, of which Adam makes whole steps
        kl = torch.where((logprobs - ref_logprobs).detach().abs() <= ROUNDING, 0.0, kl)
        kl = (weights * kl).sum()
        total = total + options.kl_coef * kl
    if imitated is not None:
        nll = -(imitated * logprobs).sum()
        total = total + options.nll_coef * nll
    with torch.no_grad():
        return PPOLoss(
            total=total, policy=policy.detach(), value=value.detach(),
            entropy=mean_entropy, kl=kl.detach(), nll=nll.detach(),
            approx_kl=-log_ratio.sum() * share,
            approx_kl_squared=0.5 * log_ratio.square().sum() * share,
            policy_clipfrac=is_clipped.sum() * share, dual_clipfrac=is_bounded.sum() * share,
            # old + (V - old) may be rounded away from V, which is no clipping
            value_clipfrac=((square_clipped > square) & (change != moved)).sum() * share,
            value_error=square.sum() * share,
            ratio=torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)).sum() * share,
            max_log_ratio=log_ratio.abs().max() if log_ratio.numel() else log_ratio.new_zeros(()))
