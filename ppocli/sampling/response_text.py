"""From sampled ids to the text that rewards see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def response_ids(tokens: Any, mask: Any) -> list[list[int]]:
    """[B] lists of sampled ids from right-padded [B, R] tensors."""
    return [row[:n] for row, n in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]


def decode_responses(tokenizer: Any, prompt_ids: Sequence[Sequence[int]],
                     responses: Sequence[Sequence[int]],
                     stop_sequences: Sequence[str] = ()) -> list[str]:
    """The responses as text: without special tokens, trimmed at the first stop sequence.

    A response is decoded behind its prompt and the prompt's text is taken off again: tokenizers
    that mark words by a leading space would lose that space on a response decoded alone.
    """
    if not responses:
        return []
    together = tokenizer.batch_decode([list(p) + list(r) for p, r in
                                       zip(prompt_ids, responses, strict=True)],
                                      skip_special_tokens=True)
    prompts = tokenizer.batch_decode([list(p) for p in prompt_ids], skip_special_tokens=True)
    texts = []
    for whole, prompt, ids in zip(together, prompts, responses, strict=True):
        if whole.startswith(prompt):
            text = whole[len(prompt):]
        else:
            text = tokenizer.decode(list(ids), skip_special_tokens=True)
        cuts = [at for stop in stop_sequences if (at := text.find(stop)) >= 0]
        texts.append(text[:min(cuts)] if cuts else text)
    return texts
