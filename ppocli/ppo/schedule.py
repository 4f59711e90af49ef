"""Learning rate as a pure function of the update number, so that resuming can't get it wrong."""

from __future__ import annotations

import math


def lr_factor(update: int, *, name: str, total_updates: int, warmup_updates: int,
              min_lr_ratio: float) -> float:
    """Factor on the learning rate for the ``update``-th optimizer update (counted from 0).

    Linear warm-up over ``warmup_updates`` (the first update already moves), then ``constant``,
    ``linear`` or ``cosine`` decay to ``min_lr_ratio`` at ``total_updates``.
    """
    if update < warmup_updates:
        return (update + 1) / (warmup_updates + 1)
    if name == "constant":
        return 1.0
    span = max(total_updates - warmup_updates, 1)
    progress = min((update - warmup_updates) / span, 1.0)
    if name == "linear":
        shape = 1.0 - progress
    elif name == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"unknown schedule {name!r}")
    return min_lr_ratio + (1.0 - min_lr_ratio) * shape
