"""Faster ways of computing what a model of transformers computes, which change its numbers by
rounding only."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ppocli.models.fast.attention import NAME, attention
from ppocli.models.fast.packing import packing_of_lengths
from ppocli.models.layout import SequenceBatch
from ppocli.models.transformers_internals import attention_of, fuse_activations, replace_sdpa
from ppocli.models.trunk import has_encoder
from ppocli.models.virtual_tokens import num_virtual_tokens, trunk_states

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""most difference of packed and padded states, in standard deviations"""


def use_kernels(lm: Any) -> None:
    """Make a model that has just been loaded take this project's attention, and activations in one
    pass where it would make them out of several."""
    if not has_encoder(lm):
        replace_sdpa(lm, NAME, attention)
    fuse_activations(lm)


@torch.no_grad()
def takes_packed(lm: Any) -> bool:
    """Whether a model gives packed rows the states that it gives padded ones; found out by trying.

    Not with an encoder, virtual tokens, windows of attention, an attention of its own, or states
    that run on from token to token.
    """
    if (has_encoder(lm) or num_virtual_tokens(lm)
            or attention_of(lm) != NAME
            or getattr(lm.config, "sliding_window", None) is not None
            or "position_ids" not in inspect.signature(lm.base_model.forward).parameters):
        return False
    device = lm.get_input_embeddings().weight.device
    lengths = torch.tensor([3, 5, 2])
    there = torch.arange(5)[None, :] < lengths[:, None]
    tokens = (torch.arange(15).reshape(3, 5) % 11).masked_fill(~there, 0)
    nothing = torch.zeros(0, dtype=torch.long)
    padded = SequenceBatch(tokens, nothing, nothing).to(device)
    packing = packing_of_lengths(lengths)
    packed = SequenceBatch(
        packing.packed(tokens[there]), nothing, nothing, packing=packing,
        positions=packing.packed(torch.arange(5).expand(3, 5)[there])).to(device)
    try:
        whole = trunk_states(lm, padded)[there.to(device)]
        found = trunk_states(lm, packed)[0, :int(lengths.sum())]
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
        return False
    if whole.shape != found.shape:
        return False
    off = (whole.float() - found.float()).abs().max() / whole.float().std().clamp(min=1e-6)
    return bool(off < CLOSE.get(whole.dtype, 0.0))
