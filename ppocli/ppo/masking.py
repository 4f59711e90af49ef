"""Masked statistics and whitening over all response tokens of a rollout."""

from __future__ import annotations

from collections.abc import Callable

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all ranks; the identity in one process."""


def no_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks when there is one."""
    return x


def masked_mean(x: torch.Tensor, mask: torch.Tensor, reduce: Reduce = no_reduce) -> torch.Tensor:
    """Mean of ``x`` where ``mask`` is true, a scalar; 0 if nothing is."""
    sums = reduce(torch.stack([(x * mask).sum(dtype=torch.float64), mask.sum(dtype=torch.float64)]))
    return (sums[0] / sums[1].clamp(min=1)).to(x.dtype)


def whiten(x: torch.Tensor, mask: torch.Tensor, *, center: bool,
           reduce: Reduce = no_reduce) -> torch.Tensor:
    """Scale to unit variance over the true entries of ``mask``, and to zero mean if ``center``.

    ``(x - mean) / sqrt(var + 1e-8)``, plus the mean again without ``center``; biased variance, as
    openai/lm-human-preferences (``lm_human_preferences/utils/core.py::whiten``) has it. The moments
    are taken over every rank's entries, so the result does not depend on how rows are spread.

    Args:
        x: [B, R] values.
        mask: [B, R] bool.
        center: true leaves mean 0 (advantages), false keeps the mean (rewards).
        reduce: sum over ranks.

    Returns:
        [B, R], zero where ``mask`` is false.
    """
    mean = masked_mean(x, mask, reduce)
    var = masked_mean((x - mean).square(), mask, reduce)
    scaled = (x - mean) * torch.rsqrt(var + 1e-8)
    if not center:
        scaled = scaled + mean
    return scaled * mask
