"""Decoding: prompts to sampled responses, with logprobs and values from the same pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ppocli.models.decoding_method import Decoding, decoding_of
from ppocli.models.head import LogitMap
from ppocli.models.layer_stack import SplitPoint, inputs_at
from ppocli.sampling.live_rows import LiveRows, Trunk, can_take_in, first_rows
from ppocli.sampling.token_choice import SamplingSpec, choose

Watch = Callable[[torch.Tensor, torch.Tensor], None]
"""is shown tokens and mask [B, t] of the responses so far, on the model's device"""
SHRINK_AT = 0.75
"""rows that have ended are dropped, and others take their places, once at most this share of all is
still alive"""


@dataclass(frozen=True, slots=True)
class Generation:
    """B sampled responses, right-padded to R tokens, on the CPU. Made here, read by the engine."""

    tokens: torch.Tensor
    """[B, R] int64; 0 where the mask is false"""
    mask: torch.Tensor
    """[B, R] bool, true through the token that ended the response"""
    logprobs: torch.Tensor
    """[B, R] fp32, under softmax(logits / temperature)"""
    values: torch.Tensor
    """[B, R] fp32, of the state before each token; zero without a value head"""
    finished: torch.Tensor
    """[B] bool, true where a stop token or stop sequence ended the response"""
    frozen_states: torch.Tensor | None = None
    """[B, Q + R - 1, D] what entered a layer that was asked for, of every token but the last; on
    the device"""

    def first(self, count: int) -> Generation:
        """The first ``count`` responses."""
        return Generation(self.tokens[:count], self.mask[:count], self.logprobs[:count],
                          self.values[:count], self.finished[:count],
                          None if self.frozen_states is None else self.frozen_states[:count])

    def behind(self, prompt_tokens: int) -> Generation:
        """The same, with ``frozen_states`` for prompts of so many tokens: less padding on the left.
        """
        if self.frozen_states is None:
            return self
        kept = prompt_tokens + self.tokens.shape[1] - 1
        return replace(self, frozen_states=self.frozen_states[:, -kept:])


    @staticmethod
    def joined(parts: list[Generation]) -> Generation:
        """All responses of several batches, padded to the longest; without states of layers."""
        width = max(part.tokens.shape[1] for part in parts)

        def rows(name: str) -> torch.Tensor:
            tensors = [getattr(part, name) for part in parts]
            return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]))
                              for t in tensors])

        return Generation(rows("tokens"), rows("mask"), rows("logprobs"), rows("values"),
                          torch.cat([part.finished for part in parts]))


def ends_with_stop(tokenizer: Any, spec: SamplingSpec, tokens: torch.Tensor,
                   counts: list[int] | None = None) -> torch.Tensor:
    """[b] bool: a stop sequence is complete within the newest tokens of each row [b, t].

    Looked for in decoded text, since a tokenizer may cut the same text in several ways. A token
    holds at least one byte, so that many tokens, and a few for context, are enough to look at.

    Args:
        counts: how many tokens of a row, at its end, belong to it (default: all).
    """
    window = _window(spec)
    newest = tokens[:, -window:].tolist()
    if counts is not None:
        newest = [ids[-min(window, count):] for ids, count in zip(newest, counts, strict=True)]
    texts = tokenizer.batch_decode(newest, skip_special_tokens=True)
    found = [any(stop in text for stop in spec.stop_sequences) for text in texts]
    return torch.tensor(found, device=tokens.device)


def _window(spec: SamplingSpec) -> int:
    return max(len(stop.encode()) for stop in spec.stop_sequences) + 4


class _Drawn:
    """What has been drawn so far of N responses, and how the next tokens are."""

    def __init__(self, lm: Any, spec: SamplingSpec, uniform: Any, limits: Any, tokenizer: Any,
                 value_head: Any, split: SplitPoint | None, prompt_tokens: int) -> None:
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
        self.steps, self.spec, self.tokenizer, self.value_head = steps, spec, tokenizer, value_head
        self.trunk, self.head = Trunk(lm), lm.get_output_embeddings()
        self.logit_map = LogitMap.of(lm)
        self.lm, self.split, self.prompt_tokens = lm, split, prompt_tokens
        self.stops = torch.tensor(spec.stop_ids, dtype=torch.long, device=device)

    def token(self, live: LiveRows) -> None:
        """Feed the live rows and draw one more token of each."""
        spec, trunk, value_head = self.spec, self.trunk, self.value_head
        with inputs_at(self.split, self.lm) as entering:
            hidden = trunk.step(live)
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
        back = torch.arange(_window(self.spec) - 1, -1, -1, device=at.device)
        newest = self.tokens[rows[:, None], (at[:, None] - back).clamp(min=0)]
        return ends_with_stop(self.tokenizer, self.spec, newest, (at + 1).tolist())

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


def _by_library(*args: Any, **words: Any) -> Generation:
    from ppocli.sampling.transformers_generate import library_generate  # which imports this module

    return library_generate(*args, **words)


@torch.no_grad()
def generate(lm: Any, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor, spec: SamplingSpec,
             uniform: Any, *, tokenizer: Any, start: int | None = None, value_head: Any = None,
             limits: Any = None, poll: Callable[[], None] = lambda: None,
             watch: Watch = lambda *_: None, all_alive: Callable[[int], int] = int,
             split: SplitPoint | None = None, at_once: int | None = None, chunk: int | None = None,
             ready: Callable[[Generation], None] = lambda _: None) -> Generation:
    """Sample one response per prompt.

    Args:
        lm: a transformers causal LM or encoder-decoder in eval mode.
        prompt_tokens, prompt_mask: [B, Q], padding on the left.
        uniform: [B, max_new_tokens] array in (0, 1); row i, column t decides token t of row i.
        tokenizer: used to find stop sequences.
        start: the token that a decoder beside an encoder starts from; None for a causal LM.
        value_head: adds the value of the state before each token.
        limits: [B] most tokens of each response, at least 1 (default: ``max_new_tokens``).
        poll: called before every token; may raise to stop.
        watch: shown all tokens so far after every token.
        all_alive: from the number of rows that are still alive here to the most that are anywhere;
            decoding goes on until none is. For ranks whose forward passes must be equally many,
            which all decode the same number of rows at once and never refill.
        split: the layer whose inputs are kept (:attr:`Generation.frozen_states`).
        at_once: most rows that are decoded together (default: all). The next prompts take the
            places of rows that have ended, where the model can do that
            (:func:`ppocli.sampling.live_rows.can_take_in`), else they wait for the last of them.
        chunk: prompts whose responses are handed to ``ready`` as soon as they have all ended, while
            later ones are still decoded; those of the first such prompts first (default: all).

    Returns:
        A :class:`Generation` with R = the longest response (at least 1).
    """
    count = len(prompt_tokens)
    most = min(at_once or count, count)
    ends = [*range(chunk or count, count, chunk or count), count]
    if decoding_of(lm) is not Decoding.STEPS:
        found, first = [], 0
        for end in ends:
            found.append(Generation.joined([_by_library(
                lm, prompt_tokens[rows], prompt_mask[rows], spec, uniform[rows],
                tokenizer=tokenizer, start=start, value_head=value_head,
                limits=None if limits is None else limits[rows], poll=poll, watch=watch)
                for rows in (slice(at, min(at + most, end)) for at in range(first, end, most))]))
            ready(found[-1])
            first = end
        return Generation.joined(found)
    drawn = _Drawn(lm, spec, uniform, limits, tokenizer, value_head, split, prompt_tokens.shape[1])
    refills = most < count and all_alive is int and can_take_in(lm, start)
    # asking the device whether rows are done costs a synchronisation; on a CPU it is free
    check_every = 1 if lm.base_model.device.type == "cpu" else 8
    live: LiveRows | None = None
    taken = passes = 0

    def token(rows: LiveRows) -> None:
        poll()
        drawn.token(rows)
        shown = min(max(rows.oldest, 0 if live is None else live.oldest), spec.max_new_tokens)
        watch(drawn.tokens[:, :shown], drawn.mask[:, :shown])

    first = 0

    def hand_over(ended: int) -> None:
        nonlocal first
        while ends and ends[0] <= ended:
            ready(drawn.found(first, ends[0]))
            first = ends.pop(0)

    while live is not None or taken < count:
        if live is None or (refills and taken < count and len(live) < most):
            free = most if live is None else most - len(live)
            fresh = first_rows(lm, range(taken, min(taken + free, count)), prompt_tokens,
                               prompt_mask, start, drawn.trunk.virtual)
            taken += len(fresh)
            token(fresh)
            if live is None:
                live = fresh
            else:
                live.take_in(fresh)
        else:
            token(live)
        passes += 1
        if passes % check_every and live.youngest < spec.max_new_tokens:
            continue
        remaining = int((~live.done).sum())
        if len(ends) > 1 and remaining:
            hand_over(int(live.rows[~live.done].min()))
        if all_alive(remaining) == 0:
            live = None
            hand_over(taken)
        elif remaining <= SHRINK_AT * len(live) and len(live) > 1:
            live.drop_done()
    return drawn.found(0, count)
