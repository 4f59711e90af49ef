"""From texts to token ids, cut to the configured lengths."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppocli.data.sources import Source
from ppocli.errors import InputError

_CHUNK = 4096
"""texts tokenised at once: uncut texts may have many times the tokens that are kept"""


@dataclass(slots=True)
class Encoded:
    """n prompts as tokens, from :func:`encode` to :mod:`ppocli.data.prompt_set`."""

    longest: int
    """maximum number of tokens of a prompt"""
    token_ids: list[list[int]] = field(default_factory=list)
    """n lists, none empty"""
    texts: list[str] = field(default_factory=list)
    """n texts; of a prompt that was cut, its remaining tokens decoded"""
    kept: list[int] = field(default_factory=list)
    """n indices into the input texts: texts without any token were dropped"""
    overlong: int = 0
    """number of texts longer than ``longest``, which were cut or dropped"""


def encode(texts: list[str], spec: Source, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
           whole: bool) -> Encoded:
    """Tokenise prompts, draw their lengths, and cut long ones or (``overlong=drop``) drop them.

    A plain text gets the tokens that the tokenizer adds in front (BOS) and none behind, so that the
    response continues the prompt; an encoder's prompt also gets those behind (EOS). Text of a chat
    template gets neither. Lengths count all tokens; BOS survives a cut on the left. A length
    sampler keeps the first tokens, as in TRL's ``LengthSampler`` examples; ``truncation_side``
    applies to all other cuts.

    Args:
        texts: rendered prompts.
        seed: of the length sampler; the length of the i-th prompt depends on (seed, i).
        max_prompt_tokens: tokens that the model can read besides the response; at least 1.
        whole: whether an encoder reads the prompts.

    Raises:
        InputError: the tokenizer fails on a text.
    """
    encoded = Encoded(longest=min(spec.max_length or max_prompt_tokens, max_prompt_tokens))
    front, behind = ([], []) if spec.chat else tokens_around(tokenizer)
    behind = behind if whole else []
    room = max(encoded.longest - len(behind), 1)
    lengths = None
    if spec.length_sampler is not None:
        shortest, most = spec.length_sampler
        lengths = np.random.default_rng(seed).integers(shortest, most + 1, size=len(texts)).tolist()
    for i, body in enumerate(token_ids_of(texts, tokenizer)):
        if not body:
            continue
        ids = front + body
        fixed = len(front) or int(ids[0] == tokenizer.bos_token_id)
        uncut = len(ids)
        if lengths is not None:
            ids = ids[:lengths[len(encoded.kept) + encoded.overlong * (spec.overlong == "drop")]]
        if len(ids) > room:
            encoded.overlong += 1
            if spec.overlong == "drop":
                continue
            # a cut on the left keeps the fixed tokens (BOS)
            head = room if spec.truncation_side == "right" else min(fixed, room)
            ids = ids[:head] + ids[len(ids) - (room - head):]
        encoded.kept.append(i)
        encoded.token_ids.append(ids + behind)
        encoded.texts.append(texts[i] if len(ids) == uncut else str(tokenizer.decode(
            ids[len(front):], skip_special_tokens=False, clean_up_tokenization_spaces=False)))
    return encoded


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds in front of every text (usually BOS or none) and behind it
    (usually EOS or none)."""
    text = "a"
    try:
        bare = _bare_ids([text], tokenizer)[0]
        full = list(tokenizer(text)["input_ids"])
    except Exception:  # closed vocabularies, such as one of digits alone
        bare, full = [], list(tokenizer("")["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start:start + len(bare)] == bare:
            return full[:start], full[start + len(bare):]
    if full and full[0] == tokenizer.bos_token_id:  # no vocabulary for the probe
        return full[:1], full[1:]
    return [], full


def token_ids_of(texts: list[str], tokenizer: Any, size: int = _CHUNK) -> Iterator[list[int]]:
    """The ids of each text, without those that the tokenizer adds around it.

    Raises:
        InputError: the tokenizer fails on a text.
    """
    for start in range(0, len(texts), size):
        chunk = texts[start:start + size]
        try:
            ids = _bare_ids(chunk, tokenizer)
        except Exception as error:  # of tokenizers, e.g. for a vocabulary without unknown token
            if len(chunk) > 1:  # one by one, to find the text
                ids = list(token_ids_of(chunk, tokenizer, 1))
            else:
                raise InputError(f"The tokenizer cannot encode {chunk[0][:80]!r}: {error}",
                                 where="model.tokenizer_path", fix="is it the tokenizer of this "
                                 "model, and has it an unknown token?") from error
        yield from ids


def _bare_ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    # verbose=False: the warning about long texts is premature, since they are cut later
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False,
                     verbose=False)["input_ids"]

