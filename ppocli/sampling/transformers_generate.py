"""Decoding by transformers' own loop, for models that ours can't step: those that keep other things
than keys and values from token to token (Mamba, RWKV), or nothing at all.

The loop is theirs; which token comes next is chosen as in :mod:`ppocli.sampling.decode_state`, with
the same random numbers, so that both give the same responses.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from ppocli.models.trunk import state_scale
from ppocli.sampling.decode_state import Decoder, DecodeState
from ppocli.sampling.samples import Generation


@dataclass(slots=True)
class _Steering:
    """What transformers' loop asks after each forward pass over the rows of one prompt length."""

    state: DecodeState
    rows: torch.Tensor
    done: torch.Tensor
    t: int = 0
    """tokens of each row so far"""
    entered: list[torch.Tensor] = field(default_factory=list)
    """[g, q, D] what went into the output layer, where values are wanted"""

    def scores(self, _: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """A logits processor that leaves transformers no choice: [g, V], 0 for the token that was
        chosen, else -inf."""
        state, lm = self.state, self.state.decoder.lm
        hidden = self.entered[-1][:, -1] / state_scale(lm) if self.entered else None
        self.entered.clear()
        chosen, self.done = state.add(self.rows, torch.full_like(self.rows, self.t), self.done,
                                      logits, hidden)
        self.t += 1
        if state.decoder.watch is not None:
            state.decoder.watch(state.tokens, state.mask)
        return torch.full_like(logits, float("-inf")).scatter_(1, chosen[:, None], 0.0)

    def stop(self, *_: Any, **__: Any) -> torch.Tensor:
        """A stopping criterion, [g] bool: all rows end together, since a row that is said to have
        ended is fed on all the same."""
        over = self.t >= self.state.decoder.spec.max_new_tokens or bool(self.done.all())
        if not over:
            self.state.decoder.poll()
        return torch.full_like(self.done, over)


@contextmanager
def _no_defaults(lm: Any) -> Iterator[None]:
    """The model's own generation settings are never used to sample; transformers lays them under
    whatever it is given."""
    defaults = lm.generation_config
    lm.generation_config = transformers.GenerationConfig()
    try:
        yield
    finally:
        lm.generation_config = defaults


def _draw(state: DecodeState, prompts: torch.Tensor, rows: torch.Tensor, *, cached: bool) -> None:
    """Decode rows whose prompts are equally long.

    Args:
        prompts: [g, n], none of them padded.
        rows: [g] their places among all.
    """
    decoder, done = state.decoder, torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    steering, lm = _Steering(state, rows, done), decoder.lm
    inputs: dict[str, Any] = {"inputs": prompts}
    if decoder.start is not None or "attention_mask" in inspect.signature(lm.forward).parameters:
        inputs["attention_mask"] = torch.ones_like(prompts)
    # the processor lets one token through
    config = transformers.GenerationConfig(
        max_new_tokens=decoder.spec.max_new_tokens, do_sample=False, num_beams=1,
        use_cache=cached, decoder_start_token_id=decoder.start)
    tap = nullcontext() if decoder.value_head is None else (
        lm.get_output_embeddings().register_forward_pre_hook(
            lambda _, arguments: steering.entered.append(arguments[0])))
    with _no_defaults(lm), tap:
        decoder.poll()
        lm.generate(generation_config=config, synced_gpus=False,
                    logits_processor=transformers.LogitsProcessorList([steering.scores]),
                    stopping_criteria=transformers.StoppingCriteriaList([steering.stop]), **inputs)


@torch.no_grad()
def decode_by_transformers(decoder: Decoder, prompt_tokens: torch.Tensor,
                           prompt_mask: torch.Tensor, uniform: Any, *, limits: Any, at_once: int,
                           chunk: int, cached: bool) -> Iterator[Generation]:
    """As :func:`ppocli.sampling.sampler.decode`, by transformers' ``generate``.

    Prompts of one length are decoded together: some models read padding as if it were words. What
    enters a layer is not kept.

    Args:
        cached: whether the model's cache is right; else each token takes a pass over all before it.
    """
    width, device = prompt_tokens.shape[1], decoder.lm.base_model.device
    state = DecodeState(decoder, prompt_tokens, prompt_mask, uniform, limits)
    lengths = prompt_mask.sum(1)
    for start in range(0, len(lengths), chunk):
        end = min(start + chunk, len(lengths))
        for first in range(start, end, at_once):
            together = lengths[first:min(first + at_once, end)]
            for length in together.unique().tolist():
                rows = first + (together == length).nonzero().squeeze(-1)
                _draw(state, prompt_tokens[rows][:, width - length:].to(device), rows.to(device),
                      cached=cached)
        yield state.generation(slice(start, end))
