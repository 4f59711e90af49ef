"""Decoding token by token with kept keys and values: prompts to sampled responses, with logprobs
and values from the same pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ppocli.models.head import LogitMap
from ppocli.models.layer_stack import inputs_at
from ppocli.sampling.decoder import Decoder, ends_with_stop, stop_window
from ppocli.sampling.live_rows import LiveRows, Trunk, can_take_in, first_rows
from ppocli.sampling.samples import Generation
from ppocli.sampling.token_choice import choose

SHRINK_AT = 0.75
"""rows that have ended are dropped, and others take their places, once at most this share of all is
still alive"""


class _Drawn:
    """What has been drawn so far of N responses, and how the next tokens are."""

    def __init__(self, decoder: Decoder, uniform: Any, limits: Any, prompt_tokens: int) -> None:
        lm, self.decoder = decoder.lm, decoder
        device = lm.base_model.device
        noise = torch.as_tensor(uniform, dtype=torch.float64).to(device)
        count, steps = noise.shape
        # rows go on after their end until they are dropped: what is drawn then goes to the column
        # after the last, at the latest
        self.noise = torch.nn.functional.pad(noise, (0, 1), value=0.5)
        self.tokens = torch.zeros(count, steps + 1, dtype=torch.long, device=device)
        self.mask = torch.zeros(count, steps + 1, dtype=torch.bool, device=device)
        self.logprobs = torch.zeros(count, steps + 1, device=device)
        self.values = torch.zeros(count, steps + 1, device=device)
        self.finished = torch.zeros(count, dtype=torch.bool, device=device)
        self.limits = torch.full((count,), steps, device=device) if limits is None else \
            torch.as_tensor(limits, dtype=torch.long).to(device)
        self.frozen_states: torch.Tensor | None = None
        self.steps, self.prompt_tokens = steps, prompt_tokens
        self.trunk, self.head = Trunk(lm), lm.get_output_embeddings()
        self.logit_map = LogitMap.of(lm)
        self.stops = torch.tensor(decoder.spec.stop_ids, dtype=torch.long, device=device)

    def token(self, live: LiveRows) -> None:
        """Feed the live rows and draw one more token of each."""
        spec, value_head = self.decoder.spec, self.decoder.value_head
        with inputs_at(self.decoder.split, self.decoder.lm) as entering:
            hidden = self.trunk.step(live)
        if entering:
            self._keep_frozen_states(live, entering[-1])
        logits = self.logit_map(self.head(hidden))
        rows, at = live.rows, live.at.clamp(max=self.steps)
        mixed = live.youngest < min(live.oldest, spec.min_new_tokens)
        chosen, lp = choose(logits, self.noise[rows, at], spec, at if mixed else live.youngest,
                            self.stops)
        alive = ~live.done
        self.tokens[rows, at] = torch.where(alive, chosen, 0)
        self.mask[rows, at] = alive
        self.logprobs[rows, at] = torch.where(alive, lp, 0.0)
        if value_head is not None:
            self.values[rows, at] = torch.where(alive, value_head(hidden), 0.0)
        ended = torch.isin(chosen, self.stops)
        if spec.stop_sequences and live.oldest + 1 >= spec.min_new_tokens:
            ended |= self._ends_with_stop(rows, at) & (at + 1 >= spec.min_new_tokens)
        self.finished[rows] |= alive & ended
        live.done = live.done | ended | (self.limits[rows] <= at + 1)
        live.advance(chosen)

    def _ends_with_stop(self, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        spec = self.decoder.spec
        back = torch.arange(stop_window(spec) - 1, -1, -1, device=at.device)
        newest = self.tokens[rows[:, None], (at[:, None] - back).clamp(min=0)]
        return ends_with_stop(self.decoder.tokenizer, spec, newest, (at + 1).tolist())

    def _keep_frozen_states(self, live: LiveRows, states: torch.Tensor) -> None:
        """Keep what entered a layer in one step: [b, Q, D] of prompts, later [b, 1, D]."""
        depth = states.shape[-1]
        if self.frozen_states is None:
            self.frozen_states = states.new_zeros(len(self.tokens),
                                                  self.prompt_tokens + self.steps, depth)
        if live.oldest == 0:
            width = live.inputs.shape[1]
            self.frozen_states[live.rows, self.prompt_tokens - width:self.prompt_tokens] = \
                states[:, -width:]
        else:
            at = live.at.clamp(max=self.steps)
            self.frozen_states[live.rows, self.prompt_tokens - 1 + at] = states[:, 0]

    def found(self, first: int, end: int) -> Generation:
        """The responses in these places, all of which have ended."""
        rows = slice(first, end)
        width = max(int(self.mask[rows, :self.steps].sum(1).max()), 1)
        return Generation(
            self.tokens[rows, :width].cpu(), self.mask[rows, :width].cpu(),
            self.logprobs[rows, :width].cpu(), self.values[rows, :width].cpu(),
            self.finished[rows].cpu(),
            None if self.frozen_states is None else
            self.frozen_states[rows, :self.prompt_tokens + width - 1])


@torch.no_grad()
def decode_in_steps(decoder: Decoder, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                    uniform: Any, *, limits: Any, at_once: int, chunk: int
                    ) -> Iterator[Generation]:
    """As :func:`ppocli.sampling.decoding.decode`, by our own loop.

    Rows that have ended are dropped, and the next prompts take their places where the model can do
    that (:func:`ppocli.sampling.live_rows.can_take_in`); else they wait for the last of them.
    """
    lm, count = decoder.lm, len(prompt_tokens)
    drawn = _Drawn(decoder, uniform, limits, prompt_tokens.shape[1])
    refills = at_once < count and decoder.all_alive is int and can_take_in(lm, decoder.start)
    # asking the device whether rows are done costs a synchronisation; on a CPU it is free
    check_every = 1 if lm.base_model.device.type == "cpu" else 8
    live: LiveRows | None = None
    taken = passes = handed = 0

    def token(rows: LiveRows) -> None:
        decoder.poll()
        drawn.token(rows)
        shown = min(max(rows.oldest, 0 if live is None else live.oldest), drawn.steps)
        decoder.watch(drawn.tokens[:, :shown], drawn.mask[:, :shown])

    while live is not None or taken < count:
        if live is None or (refills and taken < count and len(live) < at_once):
            free = at_once if live is None else at_once - len(live)
            fresh = first_rows(lm, range(taken, min(taken + free, count)), prompt_tokens,
                               prompt_mask, decoder.start, drawn.trunk.virtual)
            taken += len(fresh)
            token(fresh)
            if live is None:
                live = fresh
            else:
                live.take_in(fresh)
        else:
            token(live)
        passes += 1
        if passes % check_every and live.youngest < drawn.steps:
            continue
        remaining = int((~live.done).sum())
        over = decoder.all_alive(remaining) == 0
        if over:
            live, ended = None, taken
        else:
            ended = int(live.rows[~live.done].min()) if count > chunk and remaining else 0
            if remaining <= SHRINK_AT * len(live) and len(live) > 1:
                live.drop_done()
        while handed < count and min(handed + chunk, count) <= ended:
            end = min(handed + chunk, count)
            yield drawn.found(handed, end)
            handed = end
