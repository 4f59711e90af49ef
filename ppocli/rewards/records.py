"""What a reward is asked, what it answers, after checking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """N samples to be scored. Made by the engine, one per generated chunk."""

    prompts: Sequence[str]
    responses: Sequence[str]
    """decoded responses: special tokens left out, trimmed at a stop sequence"""
    response_ids: Sequence[Sequence[int]]
    """the sampled ids, through the end-of-sequence token"""
    columns: Mapping[str, Sequence[Any]]
    """metadata columns of the prompts, each of length N"""
    tokenizer: Any
    """the policy's tokenizer"""

    def __len__(self) -> int:
        return len(self.responses)


@dataclass(frozen=True, slots=True)
class RewardScores:
    """Checked scores of N samples."""

    scores: list[float]
    """[N] weighted sum of all rewards; a dense reward's sum over its tokens; 0.0 where invalid"""
    dense: list[list[float]] | None
    """[N][response tokens] per-token rewards, or None when every reward is one number a sample.
    With mixed rewards the per-sample ones have been added to the last token."""
    valid: list[bool]
    """[N] false where every reward was None/NaN and ``on_invalid=skip`` drops the sample"""
    parts: dict[str, list[float | None]]
    """reward name -> [N] unweighted scores (None: does not apply), for logging"""
