"""Finds out by trying how a model can be decoded."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ppocli.models.decoding_method import Decoding, set_decoding
from ppocli.models.head import HeadWeights, token_logprobs
from ppocli.models.layout import lay_out
from ppocli.models.loading.model_config import first_line, max_positions
from ppocli.models.trunk import response_hidden
from ppocli.sampling.decode_loop import generate
from ppocli.sampling.token_choice import SamplingSpec

log = logging.getLogger("ppocli")

CLOSE = 1e-3
"""most difference of decoded figures and those of one pass, root of the mean square: of states in
standard deviations, of logprobs in nats"""
ROUGH = 0.1
"""the same in bf16 and with quantised weights: a token that is taken for the first, or a state that
is lost, is off by about 1"""


@torch.no_grad()
def try_decoding(lm: Any, start: int | None) -> Decoding | None:
    """The fastest way to decode that gives what one pass over prompt and response gives, which
    scoring and training rely on; the model is left to decode so. None where no way does: the passes
    themselves are not causal, or change with the rows beside.

    Args:
        lm: a model in eval mode whose logits are ``output_embeddings(trunk(x))``.
        start: the token that a decoder beside an encoder starts from; None for a causal LM.
    """
    for way in Decoding:
        set_decoding(lm, way)
        try:
            off, most = _off(lm, start)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # foreign code, handed what it may not know
            log.debug("%s, decoding %s: %s", type(lm).__name__, way.value, first_line(error))
            continue
        log.debug("%s, decoding %s: off by %.1e", type(lm).__name__, way.value, off)
        if off < most:
            return way
    return None


def _off(lm: Any, start: int | None) -> tuple[float, float]:
    """How far decoded logprobs and states are from those of one pass, and how far they may be.

    Prompts differ in length, two each are equally long, and a row ends early, whose place the last
    one takes: padding, dropped rows and several rows at once are all tried.
    """
    head, device = lm.get_output_embeddings(), lm.base_model.device
    half = min(3, (max_positions(lm) or 6) // 2)
    lengths = torch.tensor([half - 1, half, half, half - 1]).clamp(min=1)
    mask = torch.arange(half).flip(0)[None, :] < lengths[:, None]
    vocabulary = min(11, lm.get_input_embeddings().weight.shape[0] - 1)
    tokens = 1 + torch.arange(mask.numel()).view(-1, half) % vocabulary
    spec = SamplingSpec(max_new_tokens=half, stop_ids=())
    project = torch.randn(head.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    project = (project / project.norm()).to(device)
    noise = torch.linspace(0.05, 0.95, mask.shape[0] * half, dtype=torch.float64).view(-1, half)
    out = generate(lm, tokens.masked_fill(~mask, 0), mask, spec, noise, tokenizer=None, start=start,
                   value_head=lambda hidden: hidden.float() @ project, at_once=3,
                   limits=[1, half, half, half])
    batch = lay_out(tokens, mask, out.tokens, out.mask, start).to(device)
    states = response_hidden(lm, batch)
    logprobs, _ = token_logprobs(states, HeadWeights.of(lm), batch.targets, temperature=1.0,
                                 want_entropy=False)
    rough = (getattr(lm, "is_quantized", False)
             or {states.dtype, head.weight.dtype} != {torch.float32})
    wanted = (states.float() @ project).cpu()
    off = _distance(out.values[out.mask], wanted) / float(wanted.std().clamp(min=1e-6))
    # a nat is much for any distribution, and next to nothing may be all that they differ by
    off_nats = _distance(out.logprobs[out.mask], logprobs.cpu())
    return max(off, off_nats), ROUGH if rough else CLOSE


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Between two [N], the root of the mean square."""
    return float((found - wanted).square().mean().sqrt())
