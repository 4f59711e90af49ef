"""Prompts and responses laid out for a forward pass: right-padded rows, response tokens flat.

Rollouts are stored left-padded (prompt) and right-padded (response). For scoring and training the
left padding is cut out, so that a row is its prompt, its response, then padding: a causal model
needs no attention mask for that, absolute positions are right by construction, and the result of a
row does not depend on the rows beside it. Where rows differ much in length they are packed into one
row without padding instead. For an encoder-decoder the prompt goes to the encoder,
with padding on the right and a mask, and the decoder reads its start token and the response.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from ppocli.models.fast.packing import Packing, packing_of_lengths

PACK_ABOVE = 0.03
"""share of padding from which on rows are packed, where the model allows it: moving tokens into a
grid for the attention and back is not worth less"""


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """b rows of T tokens that hold N response tokens; packed, one row of all their tokens. Made per
    micro-batch, read by the models."""

    tokens: torch.Tensor
    """[b, T] int64, prompt (or the decoder's start) then response without its last token, then
    padding"""
    predictors: torch.Tensor
    """[N] int64 index into b*T of the position whose output predicts each response token"""
    targets: torch.Tensor
    """[N] int64 response token ids, row by row"""
    encoder_tokens: torch.Tensor | None = None
    """[b, Q] int64 prompts, padded on the right; None for a model without an encoder"""
    encoder_mask: torch.Tensor | None = None
    """[b, Q] int64, 1 where there is a token"""
    positions: torch.Tensor | None = None
    """[1, T] int64 place of each token in its own row, where rows are packed"""
    packing: Packing | None = None
    frozen_states: torch.Tensor | None = None
    """[b, T, D] what enters the lowest layer that trains; the layers below it need not run"""

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on ``device``."""
        there: Any = [None if (value := getattr(self, f.name)) is None else value.to(device)
                      for f in fields(self)]
        return SequenceBatch(*there)


def right_padded(tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded [b, Q] tokens and mask with the padding, less what no row needs, on the right."""
    lengths = mask.sum(dim=1)
    width = max(int(lengths.max()), 1)
    places = torch.arange(width, device=tokens.device)[None, :]
    columns = places + (tokens.shape[1] - lengths)[:, None]
    there = places < lengths[:, None]
    return tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1)).masked_fill(~there, 0), there


def _lay_out_pair(prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                  response_tokens: torch.Tensor, response_mask: torch.Tensor, start: int
                  ) -> SequenceBatch:
    width = max(int(response_mask.sum(dim=1).max()), 1)
    encoder_tokens, encoder_mask = right_padded(prompt_tokens, prompt_mask)
    first = torch.full((len(response_tokens), 1), start, dtype=torch.long)
    before = response_tokens[:, :width - 1].masked_fill(~response_mask[:, :width - 1], 0)
    row, position = response_mask.nonzero(as_tuple=True)
    return SequenceBatch(torch.cat([first, before], dim=1), row * width + position,
                         response_tokens[row, position], encoder_tokens, encoder_mask.long())


def lay_out(prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor, response_tokens: torch.Tensor,
            response_mask: torch.Tensor, decoder_start: int | None = None, *, pack: bool = False
            ) -> SequenceBatch:
    """Build a :class:`SequenceBatch` from left-padded prompts and right-padded responses.

    Args:
        prompt_tokens, prompt_mask: [b, Q], padding on the left; each row has at least one token.
        response_tokens, response_mask: [b, R], padding on the right.
        decoder_start: the token that a decoder beside an encoder starts from; None where there is
            no encoder.
        pack: whether the models that read it can take packed rows.
    """
    if decoder_start is not None:
        return _lay_out_pair(prompt_tokens, prompt_mask, response_tokens, response_mask,
                             decoder_start)
    num_prompt = prompt_tokens.shape[1]
    prompt_lengths = prompt_mask.sum(dim=1)
    lengths = prompt_lengths + response_mask.sum(dim=1) - 1  # the last token predicts nothing
    width = max(int(lengths.max()), 1)
    both = torch.cat([prompt_tokens, response_tokens], dim=1)
    places = torch.arange(width)[None, :]
    tokens = both.gather(1, (places + (num_prompt - prompt_lengths)[:, None]).clamp(
        max=both.shape[1] - 1))
    there = places < lengths[:, None]
    row, position = response_mask.nonzero(as_tuple=True)
    targets = response_tokens[row, position]
    before = prompt_lengths[row] + position - 1
    if pack and 1.0 - int(lengths.sum()) / there.numel() > PACK_ABOVE:
        starts, packing = lengths.cumsum(0) - lengths, packing_of_lengths(lengths)
        return SequenceBatch(
            packing.packed(tokens[there]), starts[row] + before, targets,
            positions=packing.packed(places.expand(len(tokens), -1)[there]), packing=packing)
    return SequenceBatch(tokens.masked_fill(~there, 0), row * width + before, targets)
