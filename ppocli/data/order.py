"""In which order prompts are used: a pure function, so that a position is all a resume needs."""

from __future__ import annotations

import numpy as np


def prompt_indices(start: int, count: int, *, n: int, seed: int, shuffle: bool) -> list[int]:
    """Which prompts stand at positions ``start`` to ``start + count - 1`` of the endless order.

    Position p belongs to epoch ``p // n``. Each epoch goes through all n prompts once, in their own
    order, or, shuffled, in a permutation that depends on (seed, epoch) alone.

    Args:
        start: first position, at least 0: how many prompts were used before.
        count: how many; may span several epochs.
        n: size of the prompt set, at least 1.
        seed: at least 0.
        shuffle: draw a new order for each epoch.
    """
    if start < 0 or count < 0 or n < 1:
        raise ValueError(f"no such positions: start={start}, count={count}, n={n}")
    indices: list[int] = []
    position, end = start, start + count
    while position < end:
        epoch, offset = divmod(position, n)
        taken = min(n - offset, end - position)
        if shuffle:
            order = np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(n)
            indices.extend(order[offset:offset + taken].tolist())
        else:
            indices.extend(range(offset, offset + taken))
        position += taken
    return indices
