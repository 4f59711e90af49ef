"""Loading models to sample from: a trial determines whether our own loop decodes them or, where
that gives wrong results, transformers' does."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ppocli.config import schema, tasks
from ppocli.config.text import first_line
from ppocli.errors import InputError
from ppocli.models import layout, trunk
from ppocli.models.head import HeadWeights, token_logprobs
from ppocli.models.loading import language_model
from ppocli.models.loading.language_model import DTYPES, LoadedLM, frozen_dtype
from ppocli.models.loading.load_adapters import Adapter, attach, identify, peft_config
from ppocli.models.loading.model_config import check_text_alone, max_positions
from ppocli.runs.model_files import is_adapter
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.sampler import decode
from ppocli.sampling.samples import SamplingSpec

log = logging.getLogger("ppocli")


def load_decodable(cfg: schema.ModelConfig, *, dtype: torch.dtype = torch.float32,
                   key: str = "model.path", lm: Any = None,
                   goes_on: Mapping[str, Any] | None = None) -> LoadedLM:
    """As :func:`load_lm`, with the fastest way of decoding selected that is right for the model. If
    none is, its forward passes give tokens other probabilities than they were sampled with, and
    ratios would be meaningless.

    Args:
        lm: a model to take in place of loading one.

    Raises:
        InputError: as there; or no way of decoding is right.
    """
    loaded = (language_model.load_lm(cfg, dtype=dtype, key=key, goes_on=goes_on) if lm is None
              else language_model.take_lm(cfg, lm.to(dtype)))
    lm = loaded.lm
    if try_decoding(lm, loaded.decoder_start) is None:
        raise InputError(f"{type(lm).__name__} ({cfg.path}) gives a token other probabilities when "
                         "it is sampled than in one pass over prompt and response: its states look "
                         "ahead, or depend on the rows beside; ppocli can't train it.", where=key,
                         fix="use a causal language model")
    return loaded


def load_policy(cfg: schema.ModelConfig, hardware: schema.HardwareConfig, seed: int,
                lm: Any = None, *, scores: bool = False) -> LoadedLM:
    """The model that a training starts from, with a new adapter on it where one is asked for. An
    adapter that ``model.path`` names goes on; or, where none is asked for, it is merged.

    Args:
        lm: a model to take in place of loading one.
        scores: whether it is a model that scores texts, which isn't sampled from.

    Raises:
        InputError: as :func:`load_decodable`.
        ConfigError: the adapter doesn't fit the model.
    """
    kind = tasks.adapter_kind(cfg)
    dtype = DTYPES[hardware.weights] if kind is None else frozen_dtype(cfg, hardware)
    settings = tasks.adapter_settings(cfg)
    goes_on = None if kind is None else settings
    if scores:
        loaded = language_model.load_lm(cfg, dtype=dtype, goes_on=goes_on, score_seed=seed)
    else:
        loaded = load_decodable(cfg, dtype=dtype, lm=lm, goes_on=goes_on)
        say_decoding(loaded.lm)
    check_text_alone(loaded.lm)
    if loaded.adapter is not None:
        log.info("%s is an adapter on %s: %s", cfg.path, loaded.adapter.base.path,
                 "merged, and all weights train" if kind is None else "it trains on")
        return language_model.merged(loaded) if kind is None else loaded
    if kind is None:
        return loaded
    base = identify(loaded.lm, cfg.path, cfg.revision)
    config = peft_config(settings, pair=trunk.has_encoder(loaded.lm), revision=cfg.revision,
                         scores=scores)
    return replace(loaded, adapter=Adapter(attach(loaded.lm, config, seed=seed), base))


def load_judged(cfg: schema.ModelConfig, hardware: schema.HardwareConfig) -> LoadedLM:
    """A policy to be judged; the base of an adapter in the type that a training holds it in."""
    frozen = is_adapter(cfg.path) and cfg.quantization is None
    loaded = load_decodable(cfg, dtype=frozen_dtype(cfg, hardware) if frozen
                            else DTYPES[hardware.weights])
    say_decoding(loaded.lm)
    return loaded


def say_decoding(lm: Any) -> None:
    """Log, for a model that our loop can't decode, what this costs."""
    if trunk.decoding_of(lm) is not trunk.Decoding.STEPS:
        every = (", and old logprobs take a forward pass"
                 if trunk.decoding_of(lm) is trunk.Decoding.LIBRARY else
                 ", and it reads all tokens so far anew for each new one")
        log.info("ppocli's own loop can't step %s: responses are decoded by transformers' generate,"
                 " prompts of one length at a time, and those that have ended cost as much as the "
                 "others until the last has%s. Nothing else changes.", type(lm).__name__, every)


CLOSE = 1e-3
"""most difference of decoded figures and those of one pass, root of the mean square: of states in
standard deviations, of logprobs in nats"""
ROUGH = 0.1
"""the same in bf16 and with quantised weights: a token that is taken for the first, or a state that
is lost, is off by about 1"""


@torch.no_grad()
def try_decoding(lm: Any, start: int | None) -> trunk.Decoding | None:
    """The fastest way to decode that gives what one pass over prompt and response gives, which
    scoring and training rely on; the model is left to decode so. None where no way does: the passes
    themselves are not causal, or change with the rows beside.

    Args:
        lm: a model in eval mode whose logits are ``output_embeddings(trunk(x))``.
        start: the token that a decoder beside an encoder starts from; None for a causal LM.
    """
    for way in trunk.Decoding:
        trunk.set_decoding(lm, way)
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
    decoder = Decoder(lm, spec, start=start, value_head=lambda hidden: hidden.float() @ project)
    out, = decode(decoder, tokens.masked_fill(~mask, 0), mask, noise, at_once=3,
                  limits=[1, half, half, half])
    samples = layout.Sequences.of_responses(tokens, mask, out.tokens, out.mask, start)
    batch = layout.lay_out(samples).to(device)
    states = trunk.response_hidden(lm, batch)
    logprobs = token_logprobs(states, HeadWeights.of(lm), batch.targets, temperature=1.0).logprobs
    rough = (getattr(lm, "is_quantized", False)
             or {states.dtype, head.weight.dtype} != {torch.float32})
    expected = (states.float() @ project).cpu()
    off = _distance(out.values[out.mask], expected) / float(expected.std().clamp(min=1e-6))
    # a nat is much for any distribution, and next to nothing may be all that they differ by
    off_nats = _distance(out.logprobs[out.mask], logprobs.cpu())
    return max(off, off_nats), ROUGH if rough else CLOSE


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Between two [N], the root of the mean square."""
    return float((actual - expected).square().mean().sqrt())
