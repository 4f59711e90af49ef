"""Decoding: prompts to sampled responses, with logprobs and values from the same pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ppocli.models.decoding import Decoding, decoding_of
from ppocli.models.layers import Border
from ppocli.models.layout import right_padded
from ppocli.models.sampling import SamplingSpec, choose
from ppocli.models.trunk import logit_scale
from ppocli.models.virtual_tokens import VirtualTokens, virtual_tokens

Watch = Callable[[torch.Tensor, torch.Tensor], None]
"""is shown tokens and mask [B, t] of the responses so far, on the model's device"""
SHRINK_AT = 0.75
"""the batch is compacted once at most this share of its rows is still alive"""


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
    below: torch.Tensor | None = None
    """[B, Q + R - 1, D] what entered a layer that was asked for, of every token but the last; on
    the device"""

    def first(self, count: int) -> Generation:
        """The first ``count`` responses."""
        return Generation(self.tokens[:count], self.mask[:count], self.logprobs[:count],
                          self.values[:count], self.finished[:count],
                          None if self.below is None else self.below[:count])

    @staticmethod
    def joined(parts: list[Generation]) -> Generation:
        """All responses of several batches, padded to the longest."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.tokens.shape[1] for part in parts)

        def rows(name: str) -> torch.Tensor:
            tensors = [getattr(part, name) for part in parts]
            return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]))
                              for t in tensors])

        below = [part.below for part in parts if part.below is not None]
        longest = max((states.shape[1] for states in below), default=0)
        return Generation(
            rows("tokens"), rows("mask"), rows("logprobs"), rows("values"),
            torch.cat([part.finished for part in parts]),
            torch.cat([torch.nn.functional.pad(states, (0, 0, 0, longest - states.shape[1]))
                       for states in below]) if below else None)


@dataclass(slots=True)
class _Live:
    """The rows still being decoded. Rows that end are dropped, so they stop costing."""

    rows: torch.Tensor
    """[b] their places in the whole batch"""
    inputs: torch.Tensor
    """[b, q] tokens to feed next"""
    attention: torch.Tensor | None
    """[b, past + q] bool; None when no row has padding"""
    positions: torch.Tensor
    """[b, q]"""
    done: torch.Tensor
    """[b] bool"""
    encoded: torch.Tensor | None = None
    """[b, Q, D] what an encoder made of the prompts"""
    encoder_mask: torch.Tensor | None = None
    """[b, Q]"""


def ends_with_stop(tokenizer: Any, spec: SamplingSpec, tokens: torch.Tensor) -> torch.Tensor:
    """[b] bool: a stop sequence is complete within the newest tokens of each row [b, t].

    Looked for in decoded text, since a tokenizer may cut the same text in several ways. A token
    holds at least one byte, so that many tokens, and a few for context, are enough to look at.
    """
    window = max(len(stop.encode()) for stop in spec.stop_sequences) + 4
    texts = tokenizer.batch_decode(tokens[:, -window:].tolist(), skip_special_tokens=True)
    found = [any(stop in text for stop in spec.stop_sequences) for text in texts]
    return torch.tensor(found, device=tokens.device)


def _trunk_step(lm: Any, live: _Live, cache: Any, takes_positions: bool,
                virtual: VirtualTokens | None) -> torch.Tensor:
    """[b, D] the trunk's output at the newest position of every live row.

    Args:
        virtual: tokens to embed in front of the prompts, in the first step.
    """
    arguments: dict[str, Any] = {"input_ids": live.inputs, "past_key_values": cache,
                                 "use_cache": True}
    if live.encoded is not None:
        out = lm.get_decoder()(encoder_hidden_states=live.encoded,
                               encoder_attention_mask=live.encoder_mask, **arguments)
        return out.last_hidden_state[:, -1]
    positions = live.positions
    if virtual is not None:
        del arguments["input_ids"]
        arguments["inputs_embeds"] = virtual.in_front(lm.get_input_embeddings()(live.inputs))
        first = torch.arange(virtual.count, device=positions.device)
        positions = torch.cat([first.expand(len(positions), -1), positions], dim=1)
    if live.attention is not None:
        arguments["attention_mask"] = live.attention.long()
    if takes_positions:
        arguments["position_ids"] = positions
    return lm.base_model(**arguments).last_hidden_state[:, -1]


def _advance(live: _Live, tokens: torch.Tensor) -> None:
    live.inputs = tokens[:, None]
    live.positions = live.positions[:, -1:] + 1
    if live.attention is not None:
        live.attention = torch.nn.functional.pad(live.attention, (0, 1), value=True)


def _compact(live: _Live, cache: Any) -> None:
    keep = (~live.done).nonzero().squeeze(-1)
    if len(keep) == 0:  # others go on, and a pass needs a row
        keep = torch.zeros(1, dtype=torch.long, device=live.done.device)
    cache.batch_select_indices(keep)
    live.rows, live.inputs = live.rows[keep], live.inputs[keep]
    live.positions = live.positions[keep]
    live.done = live.done[keep]
    for name in ("attention", "encoded", "encoder_mask"):
        value = getattr(live, name)
        if value is not None:
            setattr(live, name, value[keep])


def _first_live(lm: Any, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                device: torch.device, start: int | None, before: int) -> _Live:
    """All rows; ``before`` virtual tokens come first and take the first positions."""
    mask = prompt_mask.to(device)
    count = len(mask)
    if start is not None:
        tokens, there = right_padded(prompt_tokens.to(device), mask)
        encoded = lm.get_encoder()(input_ids=tokens, attention_mask=there.long())
        return _Live(
            rows=torch.arange(count, device=device), attention=None,
            inputs=torch.full((count, 1), start, device=device),
            positions=torch.zeros(count, 1, dtype=torch.long, device=device),
            done=torch.zeros(count, dtype=torch.bool, device=device),
            encoded=encoded.last_hidden_state, encoder_mask=there.long())
    seen = torch.nn.functional.pad(mask, (before, 0), value=True)
    return _Live(
        rows=torch.arange(count, device=device), inputs=prompt_tokens.to(device),
        attention=None if bool(prompt_mask.all()) else seen,
        positions=(mask.long().cumsum(1) - 1).clamp(min=0) + before,
        done=torch.zeros(count, dtype=torch.bool, device=device))


def _empty_cache(lm: Any, start: int | None, virtual: VirtualTokens | None, rows: int) -> Any:
    """transformers' cache of keys and values; it may begin with those of virtual tokens."""
    from transformers import DynamicCache, EncoderDecoderCache

    if start is not None:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    if virtual is not None and virtual.in_cache:
        return virtual.cache(rows)
    return DynamicCache(config=lm.config)


def _keep_below(kept: torch.Tensor | None, states: torch.Tensor, rows: torch.Tensor, step: int,
                steps: int) -> torch.Tensor:
    """[B, Q + steps - 1, D] with the states of one step: [b, Q, D] of the prompts, later [b, 1, D].
    """
    if kept is None:
        count, width, depth = states.shape
        kept = states.new_zeros(count, width + steps - 1, depth)
        kept[:, :width] = states
        return kept
    kept[rows, kept.shape[1] - steps + step] = states[:, 0]
    return kept


def _by_library(*args: Any, **words: Any) -> Generation:
    from ppocli.models.library_generation import library_generate  # which imports this module

    return library_generate(*args, **words)


@torch.no_grad()
def generate(lm: Any, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor, spec: SamplingSpec,
             uniform: Any, *, tokenizer: Any, start: int | None = None, value_head: Any = None,
             limits: Any = None, poll: Callable[[], None] = lambda: None,
             watch: Watch = lambda *_: None, all_alive: Callable[[int], int] = int,
             border: Border | None = None) -> Generation:
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
            decoding goes on until none is. For ranks whose forward passes must be equally many.
        border: the layer whose inputs are kept (:attr:`Generation.below`).

    Returns:
        A :class:`Generation` with R = the longest response (at least 1).
    """
    if decoding_of(lm) is not Decoding.STEPS:
        return _by_library(lm, prompt_tokens, prompt_mask, spec, uniform, tokenizer=tokenizer,
                           start=start, value_head=value_head, limits=limits, poll=poll,
                           watch=watch)
    device = lm.base_model.device
    count, steps = len(prompt_tokens), spec.max_new_tokens
    noise = torch.as_tensor(uniform, dtype=torch.float64).to(device)
    most = None if limits is None else torch.as_tensor(limits, dtype=torch.long).to(device)
    head, scale = lm.get_output_embeddings(), logit_scale(lm)
    takes_positions = "position_ids" in inspect.signature(lm.base_model.forward).parameters
    stops = torch.tensor(spec.stop_ids, dtype=torch.long, device=device)
    tokens = torch.zeros(count, steps, dtype=torch.long, device=device)
    mask = torch.zeros(count, steps, dtype=torch.bool, device=device)
    logprobs = torch.zeros(count, steps, device=device)
    values = torch.zeros(count, steps, device=device)
    finished = torch.zeros(count, dtype=torch.bool, device=device)
    virtual = virtual_tokens(lm)
    live = _first_live(lm, prompt_tokens, prompt_mask, device, start,
                       0 if virtual is None else virtual.count)
    below: torch.Tensor | None = None
    cache = _empty_cache(lm, start, virtual, count)
    if virtual is not None and virtual.in_cache:
        virtual = None
    # asking the device whether rows are done costs a synchronisation; on a CPU it is free
    check_every = 1 if device.type == "cpu" else 8
    for t in range(steps):
        poll()
        with nullcontext([]) if border is None else border.tap(lm) as entering:
            hidden = _trunk_step(lm, live, cache, takes_positions, virtual if t == 0 else None)
        if entering:
            below = _keep_below(below, entering[-1], live.rows, t, steps)
        logits = head(hidden) if scale == 1.0 else head(hidden) * scale
        chosen, lp = choose(logits, noise[live.rows, t], spec, t, stops)
        alive = ~live.done
        tokens[live.rows, t] = torch.where(alive, chosen, 0)
        mask[live.rows, t] = alive
        logprobs[live.rows, t] = torch.where(alive, lp, 0.0)
        if value_head is not None:
            values[live.rows, t] = torch.where(alive, value_head(hidden), 0.0)
        ended = torch.isin(chosen, stops)
        if spec.stop_sequences and t + 1 >= spec.min_new_tokens:
            ended |= ends_with_stop(tokenizer, spec, tokens[live.rows, : t + 1])
        finished[live.rows] |= alive & ended
        watch(tokens[:, : t + 1], mask[:, : t + 1])
        live.done = live.done | ended
        if most is not None:
            live.done |= most[live.rows] <= t + 1
        _advance(live, chosen)
        if (t + 1) % check_every == 0 and t + 1 < steps:
            remaining = int((~live.done).sum())
            if all_alive(remaining) == 0:
                break
            if remaining <= SHRINK_AT * len(live.done) and len(live.done) > 1:
                _compact(live, cache)
    width = max(int(mask.sum(1).max()), 1)
    return Generation(tokens[:, :width].cpu(), mask[:, :width].cpu(), logprobs[:, :width].cpu(),
                      values[:, :width].cpu(), finished.cpu(),
                      None if below is None else below[:, :prompt_tokens.shape[1] + width - 1])
