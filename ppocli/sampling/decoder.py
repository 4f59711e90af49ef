"""What a decode loop is told: the model, how tokens are chosen, and who watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ppocli.models.layer_stack import SplitPoint
from ppocli.sampling.token_choice import SamplingSpec

Watch = Callable[[torch.Tensor, torch.Tensor], None]
"""is shown tokens and mask [B, t] of the responses so far, on the model's device"""


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that continues prompts, and how. Made by samplers, read by decode loops."""

    lm: Any
    """a transformers causal LM or encoder-decoder in eval mode"""
    spec: SamplingSpec
    tokenizer: Any = None
    """finds stop sequences; not needed without any"""
    start: int | None = None
    """the token that a decoder beside an encoder starts from; None for a causal LM"""
    value_head: Any = None
    """adds the value of the state before each token"""
    split: SplitPoint | None = None
    """the layer whose inputs are kept (:attr:`Generation.frozen_states`)"""
    poll: Callable[[], None] = _nothing
    """called before every token; may raise to stop"""
    watch: Watch = _nothing
    """shown all tokens so far after every token"""
    all_alive: Callable[[int], int] = int
    """from the number of rows that are still alive here to the most that are anywhere; decoding
    goes on until none is. For ranks whose forward passes must be equally many, which all decode the
    same number of rows at once and never refill"""


def stop_window(spec: SamplingSpec) -> int:
    """How many of the newest tokens can hold a stop sequence: a token holds at least one byte, and
    a few more are for context."""
    return max(len(stop.encode()) for stop in spec.stop_sequences) + 4


def ends_with_stop(tokenizer: Any, spec: SamplingSpec, tokens: torch.Tensor,
                   counts: list[int] | None = None) -> torch.Tensor:
    """[b] bool: a stop sequence is complete within the newest tokens of each row [b, t].

    Looked for in decoded text, since a tokenizer may cut the same text in several ways.

    Args:
        counts: how many tokens of a row, at its end, belong to it (default: all).
    """
    window = stop_window(spec)
    newest = tokens[:, -window:].tolist()
    if counts is not None:
        newest = [ids[-min(window, count):] for ids, count in zip(newest, counts, strict=True)]
    texts = tokenizer.batch_decode(newest, skip_special_tokens=True)
    found = [any(stop in text for stop in spec.stop_sequences) for text in texts]
    return torch.tensor(found, device=tokens.device)
