"""Which prompts a step uses, a pure function so that a position is all a resume needs, and the
record that they travel in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """B prompts, left-padded to Q tokens. Made by :mod:`ppocli.data`, read by the rollout."""

    tokens: torch.Tensor
    """[B, Q] int64 token ids; padding carries the pad id."""
    mask: torch.Tensor
    """[B, Q] bool, true on prompt tokens. Every row has at least one."""
    texts: list[str]
    """[B] the prompts as the reward sees them."""
    columns: dict[str, list[Any]]
    """metadata by column name, each of length B"""
    indices: list[int]
    """[B] position of each prompt in its prompt set"""
    episodes: list[int]
    """[B] number of the sample within the run; sampling noise is a function of it"""

    def __len__(self) -> int:
        return len(self.texts)

    def first(self, count: int) -> PromptBatch:
        """The first ``count`` rows, padding and all, which may be none."""
        return PromptBatch(
            tokens=self.tokens[:count], mask=self.mask[:count], texts=self.texts[:count],
            columns={name: values[:count] for name, values in self.columns.items()},
            indices=self.indices[:count], episodes=self.episodes[:count])

    def rows(self, places: Sequence[int]) -> PromptBatch:
        """The rows at ``places``, with the padding that none of them needs cut off."""
        index = torch.tensor(list(places))
        mask = self.mask[index]
        skip = self.tokens.shape[1] - max(int(mask.sum(1).max()), 1)
        return PromptBatch(
            tokens=self.tokens[index, skip:], mask=mask[:, skip:],
            texts=[self.texts[i] for i in places],
            columns={name: [values[i] for i in places] for name, values in self.columns.items()},
            indices=[self.indices[i] for i in places],
            episodes=[self.episodes[i] for i in places])


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
