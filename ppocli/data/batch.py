"""The record that prompts travel in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
