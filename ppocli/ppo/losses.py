"""The clipped PPO objective over response tokens laid flat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def token_weights(lengths: torch.Tensor, *, aggregation: str, total_tokens: int,
                  total_samples: int) -> torch.Tensor:
    """The weight of each sample's tokens in the loss of one optimizer update.

    Weighting tokens instead of averaging micro-batches makes the gradient independent of
    micro-batch size, accumulation and number of ranks.

    Args:
        lengths: [B] response tokens of each sample in this part of the update.
        aggregation: ``token-mean`` divides by all response tokens of the update,
            ``seq-mean-token-mean`` by samples and own length, ``seq-mean-token-sum`` by samples.
        total_tokens, total_samples: of the whole update, over all micro-batches and ranks.

    Returns:
        [B] weight of each token of the sample.
    """
    ones = torch.ones_like(lengths, dtype=torch.float32)
    if aggregation == "token-mean":
        return ones / max(total_tokens, 1)
    if aggregation == "seq-mean-token-mean":
        return 1.0 / (lengths.clamp(min=1).float() * max(total_samples, 1))
    if aggregation == "seq-mean-token-sum":
        return ones / max(total_samples, 1)
    raise ValueError(f"{aggregation!r} is not one of {AGGREGATIONS}")


@dataclass(frozen=True, slots=True)
class PPOLoss:
    """The loss of one micro-batch and what it is made of; scalars.

    Summed over the micro-batches of an update, the terms are the update's loss and the diagnostics
    are means over its response tokens (``max_log_ratio`` apart).
    """

    total: torch.Tensor
    policy: torch.Tensor
    value: torch.Tensor
    entropy: torch.Tensor
    approx_kl: torch.Tensor
    """mean of (old - new logprob): what early stopping looks at"""
    approx_kl_squared: torch.Tensor
    """half the mean squared log-ratio"""
    policy_clipfrac: torch.Tensor
    value_clipfrac: torch.Tensor
    value_error: torch.Tensor
    """mean squared (value - return)"""
    ratio: torch.Tensor
    max_log_ratio: torch.Tensor
    """largest absolute log-ratio"""


def ppo_loss(*, logprobs: torch.Tensor, values: torch.Tensor, entropy: torch.Tensor | None,
             old_logprobs: torch.Tensor, old_values: torch.Tensor, advantages: torch.Tensor,
             returns: torch.Tensor, weights: torch.Tensor, total_tokens: int, cliprange: float,
             cliprange_value: float, vf_coef: float, ent_coef: float) -> PPOLoss:
    """Clipped policy and value losses (Schulman et al. 2017, eq. 7 and 9), all inputs [N].

    ``max(-A ratio, -A clip(ratio, 1-c, 1+c))`` and
    ``0.5 max((V-R)^2, (V_old + clip(V-V_old, -c, c) - R)^2)``;
    total = policy + vf_coef * value - ent_coef * entropy, each a sum of ``weights`` times the term.

    Args:
        entropy: of the policy at each token, or None when it is not computed.
        weights: each token's weight in the loss, from :func:`token_weights`.
        total_tokens: response tokens of the whole update; the diagnostics are means over them,
            whatever the aggregation of the loss.
    """
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    policy = (weights * torch.maximum(unclipped, clipped)).sum()

    value_change = (values - old_values).clamp(-cliprange_value, cliprange_value)
    square = (values - returns).square()
    square_clipped = (old_values + value_change - returns).square()
    value = 0.5 * (weights * torch.maximum(square, square_clipped)).sum()

    mean_entropy = policy.new_zeros(()) if entropy is None else (weights * entropy).sum()
    total = policy + vf_coef * value - ent_coef * mean_entropy
    share = 1.0 / max(total_tokens, 1)
    with torch.no_grad():
        return PPOLoss(
            total=total, policy=policy.detach(), value=value.detach(),
            entropy=mean_entropy.detach(),
            approx_kl=-log_ratio.sum() * share,
            approx_kl_squared=0.5 * log_ratio.square().sum() * share,
            policy_clipfrac=(clipped > unclipped).sum() * share,
            value_clipfrac=(square_clipped > square).sum() * share,
            value_error=square.sum() * share,
            ratio=ratio.sum() * share,
            max_log_ratio=log_ratio.abs().max() if log_ratio.numel() else log_ratio.new_zeros(()),
        )
