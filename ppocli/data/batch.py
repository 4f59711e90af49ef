"""The record that prompts travel in."""

from __future__ import annotations

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
