"""Texts in, texts out: generation outside of training."""

from __future__ import annotations

from typing import Any

import torch

from ppocli.errors import ConfigError
from ppocli.models.generation import generate
from ppocli.models.loading import max_positions
from ppocli.models.sampling import SamplingSpec
from ppocli.models.text import decode_responses, response_ids
from ppocli.ppo.noise import USER, uniform

BATCH = 64
"""prompts decoded together"""


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Some tokenizers close a text with EOS; a prompt is to be continued."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def generate_texts(lm: Any, tokenizer: Any, prompts: list[str], spec: SamplingSpec, *, seed: int
                   ) -> list[str]:
    """One sampled response for each prompt.

    Raises:
        ConfigError: no prompts, an empty one, or one too long for the model.
    """
    if not prompts:
        raise ConfigError("There are no prompts.", fix="give at least one text")
    ids = [_without_end(tokenizer(text)["input_ids"], tokenizer) for text in prompts]
    limit = max_positions(lm)
    for text, row in zip(prompts, ids, strict=True):
        if not row:
            raise ConfigError(f"The prompt {text!r} has no tokens.", fix="give some text")
        if limit is not None and len(row) + spec.max_new_tokens > limit:
            raise ConfigError(f"A prompt of {len(row)} tokens and {spec.max_new_tokens} new ones "
                              f"exceed the model's {limit} positions.",
                              fix="shorten the prompt or max_new_tokens")
    noise = uniform(seed, USER, range(len(prompts)), spec.max_new_tokens)
    texts = []
    for start in range(0, len(ids), BATCH):
        rows = ids[start:start + BATCH]
        width = max(len(row) for row in rows)
        tokens = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        out = generate(lm, tokens, mask, spec, noise[start:start + BATCH], tokenizer=tokenizer)
        texts += decode_responses(tokenizer, rows, response_ids(out.tokens, out.mask),
                                  spec.stop_sequences)
    return texts
