"""Decoding token by token with kept keys and values: prompts to sampled responses, with logprobs
and values from the same pass. Rows are dropped when they end, and others take their places."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from ppocli.models import head, layer_stack, layout, transformers_internals, trunk
from ppocli.parallel.backend import to_device, to_host
from ppocli.sampling.decoder import Decoder, Drawn
from ppocli.sampling.samples import Generation

SHRINK_AT = 0.75
"""rows that have ended are dropped, and others take their places, once at most this share of all is
still alive"""
CHECK_EVERY = 16
"""tokens after which a device other than a CPU is asked which rows have ended, since it has to be
waited for; what it has drawn behind their ends is left out"""


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
    padding: torch.Tensor
    """[b] columns on the left that a row doesn't look at; on the CPU"""
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
        # a row that has ended stays where it is: the model may have no further position
        self.positions = self.positions[:, -1:] + (~self.done)[:, None]
        self.at = self.at + 1
        self.youngest, self.oldest = self.youngest + 1, self.oldest + 1
        if self.attention is not None:
            self.attention = torch.nn.functional.pad(self.attention, (0, 1), value=True)

    def drop_done(self, done: torch.Tensor, at: torch.Tensor) -> None:
        """Go on without the rows that have ended; one of them stays where all have, since others
        may go on and a pass needs a row.

        Args:
            done, at: [b] as those of the rows, on the CPU.
        """
        keep = (~done).nonzero().squeeze(-1)
        keep = keep if len(keep) else torch.zeros(1, dtype=torch.long)
        self.padding, at = self.padding[keep], at[keep]
        self.youngest, self.oldest = int(at.min()), int(at.max())
        keep = to_device(keep, self.rows.device)
        self.cache.batch_select_indices(keep)
        for name in ("rows", "at", "inputs", "positions", "done", "attention", "encoded",
                     "encoder_mask"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value[keep])

    def take_in(self, others: Self) -> None:
        """Go on with these rows and others, each of which has a token to feed."""
        width, widest = (transformers_internals.cached_tokens(one.cache) for one in (self, others))
        first = self.attention
        if first is not None:  # what no row that is left looks at
            skip = int(self.padding.min())
            self.padding = self.padding - skip
            self.attention, width = first[:, skip:], width - skip
            transformers_internals.drop_first_tokens(self.cache, skip)
        most = max(width, widest)
        if width != widest or self.attention is not None or others.attention is not None:
            self.attention = torch.cat([_padded_mask(one, most + 1) for one in (self, others)])
        transformers_internals.append_rows(self.cache, others.cache, most)
        self.padding, others.padding = (self.padding + most - width, others.padding + most - widest)
        for name in ("rows", "at", "inputs", "positions", "done", "padding"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(others, name)]))
        self.youngest = min(self.youngest, others.youngest)
        self.oldest = max(self.oldest, others.oldest)


def _padded_mask(live: LiveRows, width: int) -> torch.Tensor:
    """The attention over so many columns, the row's own on the right."""
    own, mask = transformers_internals.cached_tokens(live.cache) + 1, live.attention
    if mask is None:
        mask = torch.ones(len(live), own, dtype=torch.bool, device=live.rows.device)
    return torch.nn.functional.pad(mask, (width - own, 0), value=False)


class Stepped(Drawn):
    """Responses that are drawn by feeding live rows to a model."""

    def __init__(self, decoder: Decoder, *given: Any) -> None:
        super().__init__(decoder, *given)
        lm = decoder.lm
        self.head, self.logit_map = lm.get_output_embeddings(), head.LogitMap.of(lm)
        self.virtual = trunk.virtual_tokens(lm)
        self._takes_positions = "position_ids" in inspect.signature(
            lm.base_model.forward).parameters

    def first_rows(self, rows: range, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor
                   ) -> LiveRows:
        """Rows whose prompts are to be fed.

        Args:
            prompt_tokens, prompt_mask: [N, Q] of all, padded on the left.
        """
        start, lm = self.decoder.start, self.decoder.lm
        device = lm.base_model.device
        there = prompt_mask[rows.start:rows.stop]
        skip = there.shape[1] - max(int(there.sum(1).max()), 1)
        there = there[:, skip:]
        tokens = to_device(prompt_tokens[rows.start:rows.stop, skip:], device)
        mask, count = to_device(there, device), len(there)
        own: dict[str, Any] = {
            "rows": torch.arange(rows.start, rows.stop, device=device),
            "at": torch.zeros(count, dtype=torch.long, device=device), "youngest": 0, "oldest": 0,
            "done": torch.zeros(count, dtype=torch.bool, device=device),
            "padding": (~there).sum(1), "cache": self._empty_cache(count)}
        if start is not None:
            tokens, mask = layout.right_padded(tokens, mask)
            encoded = lm.get_encoder()(input_ids=tokens, attention_mask=mask.long())
            return LiveRows(
                **own, attention=None, inputs=torch.full((count, 1), start, device=device),
                positions=torch.zeros(count, 1, dtype=torch.long, device=device),
                encoded=encoded.last_hidden_state, encoder_mask=mask.long())
        before = 0 if self.virtual is None else self.virtual.count
        seen = torch.nn.functional.pad(mask, (before, 0), value=True)
        if before:  # which all rows look at
            own["padding"] = torch.zeros_like(own["padding"])
        return LiveRows(**own, inputs=tokens, attention=None if bool(there.all()) else seen,
                        positions=(mask.long().cumsum(1) - 1).clamp(min=0) + before)

    def _empty_cache(self, rows: int) -> Any:
        """transformers' cache of keys and values; it may begin with those of virtual tokens."""
        from transformers import DynamicCache, EncoderDecoderCache

        give_room, virtual = transformers_internals.give_room, self.virtual
        if self.decoder.start is not None:
            return EncoderDecoderCache(give_room(DynamicCache(), self.steps), DynamicCache())
        most = self.prompt_tokens + self.steps + (0 if virtual is None else virtual.count) - 1
        return give_room(virtual.cache(rows) if virtual is not None and virtual.in_cache
                         else DynamicCache(config=self.decoder.lm.config), most)

    def token(self, live: LiveRows) -> None:
        """Feed the live rows and draw one more token of each."""
        self.decoder.poll()
        with layer_stack.inputs_at(self.decoder.split, self.decoder.lm) as entering:
            hidden = self._hidden(live)
        at = live.at.clamp(max=self.steps)
        if entering:
            self._keep_frozen_states(live, at, entering[-1])
        chosen, live.done = self.add(live.rows, at, live.done, self.logit_map(self.head(hidden)),
                                     hidden)
        live.advance(chosen)
        self.show(live.oldest)

    def _hidden(self, live: LiveRows) -> torch.Tensor:
        """[b, D] the trunk's output at the newest position of every live row."""
        lm = self.decoder.lm
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

    def _keep_frozen_states(self, live: LiveRows, at: torch.Tensor, states: torch.Tensor) -> None:
        """Keep what entered a layer in one step: [b, Q, D] of prompts, later [b, 1, D]."""
        if self.frozen_states is None:
            self.frozen_states = states.new_zeros(
                len(self.tokens), self.prompt_tokens + self.steps, states.shape[-1])
        width = live.inputs.shape[1]
        places = self.prompt_tokens - width + at[:, None] + torch.arange(width, device=at.device)
        self.frozen_states[live.rows[:, None], places] = states[:, -width:]


@torch.no_grad()
def decode_in_steps(decoder: Decoder, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                    uniform: Any, *, limits: Any, at_once: int, chunk: int) -> Iterator[Generation]:
    """As :func:`ppocli.sampling.decoding.decode`, by our own loop.

    Rows that have ended are dropped, and the next prompts take their places where the model can do
    that; else they wait for the last of them.
    """
    lm, count = decoder.lm, len(prompt_tokens)
    drawn = Stepped(decoder, prompt_tokens, prompt_mask, uniform, limits)
    # keys and values of rows under way are moved to the right then, behind padding: not with an
    # encoder, nor where a layer keeps something else
    refills = (at_once < count and decoder.all_alive is int and decoder.start is None
               and transformers_internals.caches_all_keys(lm))
    check_every = 1 if lm.base_model.device.type == "cpu" else CHECK_EVERY
    live: LiveRows | None = None
    taken = passes = handed = 0

    while live is not None or taken < count:
        if live is None or (refills and taken < count and len(live) < at_once):
            free = at_once if live is None else at_once - len(live)
            fresh = drawn.first_rows(range(taken, min(taken + free, count)), prompt_tokens,
                                     prompt_mask)
            taken += len(fresh)
            drawn.token(fresh)
            if live is None:
                live = fresh
            else:
                live.take_in(fresh)
        else:
            drawn.token(live)
        passes += 1
        if passes % check_every and live.youngest < drawn.steps:
            continue
        rows, at, done = to_host(live.rows, live.at, live.done)
        remaining = int((~done).sum())
        if decoder.all_alive(remaining) == 0:
            live, ended = None, taken
        else:
            ended = int(rows[~done].min()) if count > chunk and remaining else 0
            if remaining <= SHRINK_AT * len(live) and len(live) > 1:
                live.drop_done(done, at)
        while handed < count and min(handed + chunk, count) <= ended:
            end = min(handed + chunk, count)
            yield drawn.found(slice(handed, end))
            handed = end
