"""The rows that are being decoded, and the keys and values kept for them: rows are dropped when
they end, and others take their places."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ppocli.models.layout import right_padded
from ppocli.models.transformers_internals import (
    append_rows,
    cached_tokens,
    caches_all_keys,
    drop_first_tokens,
)
from ppocli.models.virtual_tokens import VirtualTokens, virtual_tokens


@dataclass(slots=True)
class LiveRows:
    """b rows of a batch of N. Those that end are dropped, so they stop costing."""

    rows: torch.Tensor
    """[b] their places in the whole batch"""
    at: torch.Tensor
    """[b] response tokens that are there; counted on after the end"""
    youngest: int
    """the least of ``at``, where the device need not be asked for it"""
    oldest: int
    """the most of ``at``"""
    inputs: torch.Tensor
    """[b, q] tokens to feed next"""
    attention: torch.Tensor | None
    """[b, past + q] bool; None when no row has padding"""
    positions: torch.Tensor
    """[b, q]"""
    done: torch.Tensor
    """[b] bool"""
    cache: Any
    """transformers' own"""
    encoded: torch.Tensor | None = None
    """[b, Q, D] what an encoder made of the prompts"""
    encoder_mask: torch.Tensor | None = None
    """[b, Q]"""

    def __len__(self) -> int:
        return len(self.rows)

    def advance(self, tokens: torch.Tensor) -> None:
        """Feed these tokens, [b], next."""
        self.inputs = tokens[:, None]
        self.positions = self.positions[:, -1:] + 1
        self.at = self.at + 1
        self.youngest, self.oldest = self.youngest + 1, self.oldest + 1
        if self.attention is not None:
            self.attention = torch.nn.functional.pad(self.attention, (0, 1), value=True)

    def drop_done(self) -> None:
        """Go on without the rows that have ended; one of them stays where all have, since others
        may go on and a pass needs a row."""
        keep = (~self.done).nonzero().squeeze(-1)
        if len(keep) == 0:
            keep = torch.zeros(1, dtype=torch.long, device=self.done.device)
        self.cache.batch_select_indices(keep)
        for name in ("rows", "at", "inputs", "positions", "done", "attention", "encoded",
                     "encoder_mask"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[keep])
        if self.youngest < self.oldest:
            self.youngest, self.oldest = int(self.at.min()), int(self.at.max())

    def take_in(self, others: LiveRows) -> None:
        """Go on with these rows and others, each of which has a token to feed."""
        width, widest = (cached_tokens(one.cache) for one in (self, others))
        first = self.attention
        if first is not None:  # what no row that is left looks at
            skip = int(first.any(0).long().argmax())
            if skip:
                self.attention, width = first[:, skip:], width - skip
                drop_first_tokens(self.cache, skip)
        most = max(width, widest)
        masks = [_padded_mask(one, most + 1) for one in (self, others)]
        self.attention = None if all(mask is None for mask in masks) else torch.cat(
            [torch.ones(len(one), most + 1, dtype=torch.bool, device=one.rows.device)
             if mask is None else mask for one, mask in zip((self, others), masks, strict=True)])
        append_rows(self.cache, others.cache, most)
        for name in ("rows", "at", "inputs", "positions", "done"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(others, name)]))
        self.youngest = min(self.youngest, others.youngest)
        self.oldest = max(self.oldest, others.oldest)


def _padded_mask(live: LiveRows, width: int) -> torch.Tensor | None:
    """The attention over so many columns, the row's own on the right; None if it has them all."""
    own = cached_tokens(live.cache) + 1
    if live.attention is None and own == width:
        return None
    mask = live.attention
    if mask is None:
        mask = torch.ones(len(live), own, dtype=torch.bool, device=live.rows.device)
    return torch.nn.functional.pad(mask, (width - own, 0), value=False)


def can_take_in(lm: Any, start: int | None) -> bool:
    """Whether rows can join others that are under way: their keys and values are moved to the right
    for that, behind padding. Not with an encoder, nor where a layer keeps something else than all
    keys and values.

    Args:
        start: the token that a decoder beside an encoder starts from; None for a causal LM.
    """
    return start is None and caches_all_keys(lm)


def first_rows(lm: Any, rows: range, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
               start: int | None, virtual: VirtualTokens | None) -> LiveRows:
    """Rows of a batch whose prompts are to be fed.

    Args:
        prompt_tokens, prompt_mask: [N, Q] of the whole batch, padded on the left.
        virtual: tokens that come first and take the first positions.
    """
    device = lm.base_model.device
    there = prompt_mask[rows.start:rows.stop]
    skip = there.shape[1] - max(int(there.sum(1).max()), 1)
    there = there[:, skip:]
    tokens = prompt_tokens[rows.start:rows.stop, skip:].to(device)
    mask, count = there.to(device), len(there)
    own: dict[str, Any] = {
        "rows": torch.arange(rows.start, rows.stop, device=device),
        "at": torch.zeros(count, dtype=torch.long, device=device), "youngest": 0, "oldest": 0,
        "done": torch.zeros(count, dtype=torch.bool, device=device),
        "cache": _empty_cache(lm, start, virtual, count)}
    if start is not None:
        tokens, mask = right_padded(tokens, mask)
        encoded = lm.get_encoder()(input_ids=tokens, attention_mask=mask.long())
        return LiveRows(
            **own, attention=None, inputs=torch.full((count, 1), start, device=device),
            positions=torch.zeros(count, 1, dtype=torch.long, device=device),
            encoded=encoded.last_hidden_state, encoder_mask=mask.long())
    before = 0 if virtual is None else virtual.count
    seen = torch.nn.functional.pad(mask, (before, 0), value=True)
    return LiveRows(**own, inputs=tokens, attention=None if bool(there.all()) else seen,
                    positions=(mask.long().cumsum(1) - 1).clamp(min=0) + before)


def _empty_cache(lm: Any, start: int | None, virtual: VirtualTokens | None, rows: int) -> Any:
    """transformers' cache of keys and values; it may begin with those of virtual tokens."""
    from transformers import DynamicCache, EncoderDecoderCache

    if start is not None:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    if virtual is not None and virtual.in_cache:
        return virtual.cache(rows)
    return DynamicCache(config=lm.config)


class Trunk:
    """Feeds live rows to a model."""

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self._takes_positions = "position_ids" in inspect.signature(
            lm.base_model.forward).parameters
        self.virtual = virtual_tokens(lm)

    def step(self, live: LiveRows) -> torch.Tensor:
        """[b, D] the trunk's output at the newest position of every live row."""
        lm = self.lm
        arguments: dict[str, Any] = {"input_ids": live.inputs, "past_key_values": live.cache,
                                     "use_cache": True}
        if live.encoded is not None:
            out = lm.get_decoder()(encoder_hidden_states=live.encoded,
                                   encoder_attention_mask=live.encoder_mask, **arguments)
            return out.last_hidden_state[:, -1]
        positions, virtual = live.positions, self.virtual
        if virtual is not None and not virtual.in_cache and live.oldest == 0:
            del arguments["input_ids"]
            arguments["inputs_embeds"] = virtual.in_front(lm.get_input_embeddings()(live.inputs))
            first = torch.arange(virtual.count, device=positions.device)
            positions = torch.cat([first.expand(len(positions), -1), positions], dim=1)
        if live.attention is not None:
            arguments["attention_mask"] = live.attention.long()
        if self._takes_positions:
            arguments["position_ids"] = positions
        return lm.base_model(**arguments).last_hidden_state[:, -1]
