"""Rows of a batch that are under way: what is fed to the model next, with the keys and values of
what was; and the drawing of one more token of each."""

import inspect
from dataclasses import dataclass
from typing import Any, Self

import torch

from ppocli.models import head, layer_stack, layout, transformers_internals, trunk
from ppocli.parallel.backend import to_device
from ppocli.sampling.decoder import Decoder, Drawn


@dataclass(slots=True)
class LiveRows:
    """b rows of a batch of N. Those that end are dropped, so they stop costing."""

    rows: torch.Tensor
    """[b] their places in the whole batch"""
    at: torch.Tensor
    """[b] response tokens that are there; counted on after the end"""
    youngest: int
    """the least of ``at``, where the device need not be asked for it"""
    inputs: torch.Tensor
    """[b, q] tokens to feed next"""
    attention: torch.Tensor | None
    """[b, past + q] bool, or [b, 1, 1, S] over a cache's whole room; None without padding"""
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
        self.youngest += 1
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
        self.padding, self.youngest = self.padding[keep], int(at[keep].min())
        keep = to_device(keep, self.rows.device)
        self.cache.batch_select_indices(keep)
        for name in ("rows", "at", "inputs", "positions", "done", "attention", "encoded",
                     "encoder_mask"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value[keep])

    def take_in(self, others: Self) -> None:
        """Go on with these rows and others, each of which has a token to feed."""
        width, widest = (transformers_internals.cached_tokens(one.cache) for one in (self, others))
        if self.attention is not None:
            skip = int(self.padding.min())  # what no row that is left looks at
            self.padding, width = self.padding - skip, width - skip
            self.attention = self.attention[:, skip:]
            transformers_internals.drop_first_tokens(self.cache, skip)
        most = max(width, widest)
        if width != widest or self.attention is not None or others.attention is not None:
            self.attention = torch.cat([_padded_mask(one, most + 1) for one in (self, others)])
        transformers_internals.append_rows(self.cache, others.cache, most)
        self.padding, others.padding = (self.padding + most - width, others.padding + most - widest)
        for name in ("rows", "at", "inputs", "positions", "done", "padding"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(others, name)]))
        self.youngest = min(self.youngest, others.youngest)


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
        self.logits = head.DecodingHead(lm)
        self.virtual = trunk.virtual_tokens(lm)
        self._module = lm.get_decoder() if trunk.has_encoder(lm) else lm.base_model
        self._cache_name = transformers_internals.cache_name(self._module)
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
            "at": torch.zeros(count, dtype=torch.long, device=device), "youngest": 0,
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
        chosen, live.done = self.draw(live)
        live.advance(chosen)
        self.decoder.watch(self.tokens, self.mask)

    def draw(self, live: LiveRows) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`token`; the rows themselves stay as they are.

        Returns:
            the tokens and which responses have ended, as of :meth:`Drawn.add`.
        """
        with layer_stack.inputs_at(self.decoder.split, self.decoder.lm) as entering:
            hidden = self._hidden(live)
        at = live.at.clamp(max=self.steps)
        if entering:
            self._keep_frozen_states(live, at, entering[-1])
        return self.add(live.rows, at, live.done, self.logits(hidden), hidden)

    def _hidden(self, live: LiveRows) -> torch.Tensor:
        """[b, D] the trunk's output at the newest position of every live row."""
        lm = self.decoder.lm
        arguments: dict[str, Any] = {"input_ids": live.inputs, self._cache_name: live.cache,
                                     "use_cache": True}
        if live.encoded is not None:
            out = self._module(encoder_hidden_states=live.encoded,
                               encoder_attention_mask=live.encoder_mask, **arguments)
            return out.last_hidden_state[:, -1]
        positions, virtual = live.positions, self.virtual
        if virtual is not None and not virtual.in_cache and not live.cache.get_seq_length():
            del arguments["input_ids"]
            arguments["inputs_embeds"] = virtual.in_front(lm.get_input_embeddings()(live.inputs))
            first = torch.arange(virtual.count, device=positions.device)
            positions = torch.cat([first.expand(len(positions), -1), positions], dim=1)
        if (mask := live.attention) is not None:
            arguments["attention_mask"] = mask.long() if mask.dim() == 2 else mask
        if self._takes_positions:
            arguments["position_ids"] = positions
        return self._module(**arguments).last_hidden_state[:, -1]

    def _keep_frozen_states(self, live: LiveRows, at: torch.Tensor, states: torch.Tensor) -> None:
        """Keep what entered a layer in one step: [b, Q, D] of prompts, later [b, 1, D]."""
        if self.frozen_states is None:
            self.frozen_states = states.new_zeros(
                len(self.tokens), self.prompt_tokens + self.steps, states.shape[-1])
        width = live.inputs.shape[1]
        places = self.prompt_tokens - width + at[:, None] + torch.arange(width, device=at.device)
        self.frozen_states[live.rows[:, None], places] = states[:, -width:]
