"""Decoding by transformers' own loop, for models that ours can't step: those that keep other things
than keys and values from token to token (Mamba, RWKV), or nothing at all.

The loop is theirs; which token comes next is chosen as in :mod:`ppocli.sampling.decode_loop`, with
the same random numbers, so that both give the same responses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ppocli.models.trunk import state_scale
from ppocli.sampling.decoder import Decoder, ends_with_stop
from ppocli.sampling.samples import Generation
from ppocli.sampling.token_choice import choose


@dataclass(slots=True)
class _Sampled:
    """The responses so far, and what decides how they go on. B rows, R = ``max_new_tokens``."""

    decoder: Decoder
    noise: torch.Tensor
    """[B, R]"""
    limits: torch.Tensor
    """[B] most tokens of each response"""
    stops: torch.Tensor
    tokens: torch.Tensor
    """[B, R], as all below"""
    mask: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    finished: torch.Tensor
    """[B]"""
    width: int = 0
    """tokens of the longest response"""

    def add(self, rows: torch.Tensor, done: torch.Tensor, t: int, logits: torch.Tensor,
            hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ``t`` of some rows.

        Args:
            rows: [g] their places in the batch.
            done: [g] bool, true where the response has ended before.
            logits: [g, V].
            hidden: [g, D] the states before the token, for the value head.

        Returns:
            The tokens [g], and bool [g] that is true where the response has ended now.
        """
        spec, tokenizer = self.decoder.spec, self.decoder.tokenizer
        chosen, logprobs = choose(logits, self.noise[rows, t], spec, t, self.stops)
        alive = ~done
        live = rows[alive]
        self.tokens[live, t] = chosen[alive]
        self.mask[live, t] = True
        self.logprobs[live, t] = logprobs[alive]
        if hidden is not None:
            self.values[live, t] = self.decoder.value_head(hidden)[alive]
        ended = torch.isin(chosen, self.stops)
        if spec.stop_sequences and t + 1 >= spec.min_new_tokens:
            ended |= ends_with_stop(tokenizer, spec, self.tokens[rows, : t + 1])
        self.finished[live] = ended[alive]
        if len(live):
            self.width = max(self.width, t + 1)
        return chosen, done | ended | (self.limits[rows] <= t + 1)


def _nothing_sampled(decoder: Decoder, count: int, uniform: Any, limits: Any) -> _Sampled:
    steps, device = decoder.spec.max_new_tokens, decoder.lm.base_model.device
    most = torch.full((count,), steps) if limits is None else torch.as_tensor(limits)
    return _Sampled(
        decoder, torch.as_tensor(uniform, dtype=torch.float64).to(device), most.long().to(device),
        torch.tensor(decoder.spec.stop_ids, dtype=torch.long, device=device),
        torch.zeros(count, steps, dtype=torch.long, device=device),
        torch.zeros(count, steps, dtype=torch.bool, device=device),
        torch.zeros(count, steps, device=device), torch.zeros(count, steps, device=device),
        torch.zeros(count, dtype=torch.bool, device=device))


@dataclass(slots=True)
class _Steering:
    """What transformers' loop asks after each forward pass over the rows of one prompt length."""

    sampled: _Sampled
    rows: torch.Tensor
    done: torch.Tensor
    scale: float
    """of the states on their way into the output layer (:func:`state_scale`)"""
    t: int = 0
    """tokens of each row so far"""
    entered: list[torch.Tensor] = field(default_factory=list)
    """[g, q, D] what went into the output layer, where values are wanted"""

    def scores(self, _: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """A logits processor that leaves transformers no choice: [g, V], 0 for the token that was
        chosen, else -inf."""
        hidden = self.entered[-1][:, -1] / self.scale if self.entered else None
        self.entered.clear()
        chosen, self.done = self.sampled.add(self.rows, self.done, self.t, logits, hidden)
        self.t += 1
        width = self.sampled.width
        self.sampled.decoder.watch(self.sampled.tokens[:, :width], self.sampled.mask[:, :width])
        return torch.full_like(logits, float("-inf")).scatter_(1, chosen[:, None], 0.0)

    def stop(self, *_: Any, **__: Any) -> torch.Tensor:
        """A stopping criterion, [g] bool: all rows end together, since a row that is said to have
        ended is fed on all the same."""
        decoder = self.sampled.decoder
        over = self.t >= decoder.spec.max_new_tokens or bool(self.done.all())
        if not over:
            decoder.poll()
        return torch.full_like(self.done, over)


@contextmanager
def _no_defaults(lm: Any) -> Iterator[None]:
    """The model's own generation settings are never used to sample; transformers lays them under
    whatever it is given."""
    from transformers import GenerationConfig

    own = lm.generation_config
    lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        lm.generation_config = own


@contextmanager
def _entering(head: Any, found: list[torch.Tensor]) -> Iterator[None]:
    handle = head.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    try:
        yield
    finally:
        handle.remove()


def _run(prompts: torch.Tensor, steering: _Steering, *, cached: bool) -> None:
    """Decode the rows of one group.

    Args:
        prompts: [g, n], none of them padded.
        cached: whether the model's cache is right; without it every token takes a pass over all
            tokens before it.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    decoder = steering.sampled.decoder
    lm, start = decoder.lm, decoder.start
    given: dict[str, Any] = {"inputs": prompts}
    if start is not None or "attention_mask" in inspect.signature(lm.forward).parameters:
        given["attention_mask"] = torch.ones_like(prompts)
    # the processor lets one token through
    config = GenerationConfig(max_new_tokens=decoder.spec.max_new_tokens, do_sample=False,
                              num_beams=1, use_cache=cached, decoder_start_token_id=start)
    tap = (nullcontext() if decoder.value_head is None
           else _entering(lm.get_output_embeddings(), steering.entered))
    with _no_defaults(lm), tap:
        decoder.poll()
        lm.generate(generation_config=config, synced_gpus=False,
                    logits_processor=LogitsProcessorList([steering.scores]),
                    stopping_criteria=StoppingCriteriaList([steering.stop]), **given)


@torch.no_grad()
def decode_by_transformers(decoder: Decoder, prompt_tokens: torch.Tensor,
                           prompt_mask: torch.Tensor, uniform: Any, *, limits: Any, at_once: int,
                           chunk: int, cached: bool) -> Iterator[Generation]:
    """As :func:`ppocli.sampling.decoding.decode`, by transformers' ``generate``.

    Prompts of one length are decoded together: some models read padding as if it were words.
    ``watch`` is shown all rows that are decoded together; those of later groups are empty until
    their turn. What enters a layer is not kept.

    Args:
        cached: whether the model's cache is right; else each token takes a pass over all before it.
    """
    count = len(prompt_tokens)
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        yield Generation.joined([_decode_rows(
            decoder, prompt_tokens[rows], prompt_mask[rows], uniform[rows],
            None if limits is None else limits[rows], cached=cached)
            for rows in (slice(at, min(at + at_once, end)) for at in range(start, end, at_once))])


def _decode_rows(decoder: Decoder, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                 uniform: Any, limits: Any, *, cached: bool) -> Generation:
    device = decoder.lm.base_model.device
    sampled = _nothing_sampled(decoder, len(prompt_tokens), uniform, limits)
    lengths = prompt_mask.sum(1)
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().squeeze(-1)
        done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        steering = _Steering(sampled, rows.to(device), done, state_scale(decoder.lm))
        _run(prompt_tokens[rows][:, prompt_tokens.shape[1] - length:].to(device), steering,
             cached=cached)
    width = max(sampled.width, 1)
    return Generation(sampled.tokens[:, :width].cpu(), sampled.mask[:, :width].cpu(),
                      sampled.logprobs[:, :width].cpu(), sampled.values[:, :width].cpu(),
                      sampled.finished.cpu())
