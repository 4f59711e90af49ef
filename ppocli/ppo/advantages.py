"""Per-token rewards and generalised advantage estimation."""

from __future__ import annotations

import torch


def token_rewards(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, *, kl_coef: float,
                  dense: torch.Tensor | None = None) -> torch.Tensor:
    """``r_t = -kl_coef * kl_t``, plus each sample's score on its last response token.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", eq. 2, with the score
    on the last valid token of each sample (its end-of-sequence token if there is one).

    Args:
        scores: [B] score of each sample, added at the last true entry of its mask row.
        kl: [B, R] per-token KL estimates (nats).
        mask: [B, R] bool, contiguous from column 0. A row without a true entry gets no score.
        kl_coef: beta.
        dense: [B, R] rewards that already lie on their own tokens.

    Returns:
        [B, R], zero where ``mask`` is false.
    """
    rewards = -kl_coef * kl
    if dense is not None:
        rewards = rewards + dense
    lengths = mask.sum(dim=1)
    rows = torch.arange(len(scores), device=scores.device)
    last = (lengths - 1).clamp(min=0)
    rewards = rewards.index_put((rows, last), scores.to(rewards.dtype), accumulate=True)
    return rewards * mask


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float,
        lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, eq. 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t``; ``A_t = delta_t + gamma lam A_{t+1}``. The value after
    a sample's last token is 0, whether or not it ended by itself (truncation is terminal).

    Args:
        rewards: [B, R] per-token rewards.
        values: [B, R] value of the state before each response token.
        mask: [B, R] bool, contiguous from column 0.

    Returns:
        advantages [B, R] and returns = advantages + values [B, R], both zero outside the mask.
    """
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(running)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = (delta + gamma * lam * running) * mask[:, t]
        advantages[:, t] = running
        next_value = values[:, t]
    return advantages, (advantages + values) * mask


ESTIMATORS = {"gae": gae}
"""by the name that ``ppo.advantage`` gives them"""
