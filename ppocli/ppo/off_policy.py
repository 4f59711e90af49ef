"""Samples of another policy than the one that is trained: importance weights and rejection.

``gap`` is ``log(pi_trainer / pi_sampler)`` of each token: the trained policy at the start of a
step's updates against the one that sampled, an earlier one or the same in other arithmetic. Their
ratio corrects for whose samples they are, and PPO's own ratio, to the policy at the start, bounds
the step (the decoupled objective of Hilton et al. 2021, arXiv 2110.00641, with the trained policy
at the start of the step as the proximal one). Names of criteria are those of
``verl/trainer/ppo/rollout_corr_helper.py`` of ``verl-project/verl@20c30bf``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEVELS = ("token", "sequence")
CRITERIA = (*(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean")
              for kind in ("k1", "k2", "k3")), "seq_max_k2", "seq_max_k3")
"""what a token or a sample can be left out by; those of k1 bound a ratio on both sides"""
MAX_GAP = 20.0
"""where a log-ratio is cut on either side before it is exponentiated, as in verl"""


def importance_weights(gap: torch.Tensor, mask: torch.Tensor, *, level: str, cap: float
                       ) -> torch.Tensor:
    """Truncated importance weights ``min(pi_trainer / pi_sampler, cap)`` (Ionides 2008), which
    have no gradient.

    Args:
        gap: [B, R] log-ratios.
        mask: [B, R] bool.
        level: ``token``, or ``sequence`` for the product over the response, the same on all of its
            tokens.

    Returns:
        [B, R], zero outside the mask.

    Raises:
        ValueError: for another level.
    """
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not one of {LEVELS}")
    log_ratio = gap * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    return log_ratio.clamp(-MAX_GAP, MAX_GAP).exp().clamp(max=cap) * mask


def accepted(gap: torch.Tensor, mask: torch.Tensor, reject: Mapping[str, Any]) -> torch.Tensor:
    """The tokens that meet all criteria.

    With the log-ratio l of a token, k1 = l, k2 = l^2 / 2, k3 = exp(l) - 1 - l. ``token_`` looks at
    each token, ``seq_sum_``, ``seq_mean_`` and ``seq_max_`` at the sum, mean or maximum over a
    response, all of whose tokens are left out together. Of k2 and k3 the bound is the largest
    value; of k1 the smallest and largest ratio ``exp(k1)`` (verl bounds its inverse), or the
    largest alone, whose inverse is the smallest.

    Args:
        gap: [B, R] log-ratios.
        mask: [B, R] bool.
        reject: criterion -> its bound, with which nothing is wrong by :func:`why_no_bound`.

    Returns:
        [B, R] bool, within the mask.
    """
    is_accepted = mask
    log_ratio = (gap * mask).clamp(-MAX_GAP, MAX_GAP)
    kinds = {"k1": log_ratio, "k2": 0.5 * log_ratio.square(), "k3": log_ratio.expm1() - log_ratio}
    for name, bound in reject.items():
        level, kind = name.rsplit("_", 1)
        figure = kinds[kind]
        if level == "seq_max":
            figure = figure.amax(1, keepdim=True)  # zero outside the mask, never negative within
        elif level != "token":
            figure = figure.sum(1, keepdim=True)
            if level == "seq_mean":
                figure = figure / mask.sum(1, keepdim=True).clamp(min=1)
        low, high = bounds_of(name, bound)
        is_accepted = is_accepted & (figure >= low) & (figure <= high)
    return is_accepted


def why_no_bound(name: str, bound: Any) -> str:
    """What is wrong with a criterion or its bound; empty if nothing is."""
    if name not in CRITERIA:
        return f"must be one of {', '.join(CRITERIA)}"
    both = isinstance(bound, list) and len(bound) == 2
    if not all(type(one) in (int, float) and 0 < one < math.inf
               for one in (bound if both else [bound])):
        return f"{bound} must be a number above 0"
    if not name.endswith("k1"):
        return f"{bound} must be the largest value alone: there is no smallest" if both else ""
    if both:
        return "" if bound[0] < bound[1] else f"{bound} must be the smallest ratio and a larger one"
    return "" if bound > 1 else f"{bound} must be above 1: its inverse is the smallest ratio"


def bounds_of(name: str, bound: Any) -> tuple[float, float]:
    """The smallest and the largest value of a criterion with a proper bound."""
    if not name.endswith("k1"):
        return -math.inf, bound
    low, high = bound if isinstance(bound, list) else (1.0 / bound, bound)
    return math.log(low), math.log(high)
