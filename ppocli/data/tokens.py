"""From texts to token ids, cut to the lengths that were asked for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppocli.data.sources import Source
from ppocli.errors import InputError

_CHUNK = 4096
"""texts tokenised at once: the tokens of all uncut texts may be many times those that are kept"""


@dataclass(slots=True)
class Encoded:
    """n prompts as tokens. Made by :func:`encode`, read by :mod:`ppocli.data.prompt_set`."""

    longest: int
    """tokens a prompt may have"""
    token_ids: list[list[int]] = field(default_factory=list)
    """n lists, none empty"""
    texts: list[str] = field(default_factory=list)
    """n texts; of a prompt that was cut, what its tokens still say"""
    kept: list[int] = field(default_factory=list)
    """which of the given texts these are: those without any token were dropped"""
    overlong: int = 0
    """how many were longer than ``longest``, and were cut to it or dropped"""
    ended: list[int] = field(default_factory=list)
    """which of the given texts that were kept end in an EOS token of their own"""


def encode(texts: list[str], spec: Source, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
           whole: bool) -> Encoded:
    """Tokenise, draw lengths, cut or (``overlong=drop``) leave out.

    Text is given the tokens that the tokenizer puts in front of a text (BOS), and none behind it,
    so that the response continues the prompt; the prompts of an encoder are whole texts and get
    those behind it (EOS) too. Chat text is taken as its template wrote it. Lengths
    count all tokens; what stands in front survives a cut on the left. A length sampler keeps the
    first tokens, as TRL's ``LengthSampler`` examples do; ``truncation_side`` is for the rest.

    Args:
        texts: rendered prompts.
        seed: of the length sampler; the length of the i-th prompt is a function of (seed, i).
        max_prompt_tokens: what fits the model beside the response; at least 1.
        whole: whether prompts are read by an encoder.

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
            # on the left, what is fixed (BOS) stays
            head = room if spec.truncation_side == "right" else min(fixed, room)
            ids = ids[:head] + ids[len(ids) - (room - head):]
        if ids[-1] == tokenizer.eos_token_id and len(ids) > len(front):
            encoded.ended.append(i)
        encoded.kept.append(i)
        encoded.token_ids.append(ids + behind)
        encoded.texts.append(texts[i] if len(ids) == uncut else str(tokenizer.decode(
            ids[len(front):], skip_special_tokens=False, clean_up_tokenization_spaces=False)))
    return encoded


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts in front of every text by itself, most often BOS or none, and
    those behind it, most often EOS or none."""
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
    """The ids of each text, without those that the tokenizer puts around it.

    Raises:
        InputError: the tokenizer fails on a text.
    """
    for start in range(0, len(texts), size):
        chunk = texts[start:start + size]
        try:
            ids = _bare_ids(chunk, tokenizer)
        except Exception as error:  # what tokenizers raises, say where it has no unknown token
            if len(chunk) > 1:  # one by one, to find the text
                ids = list(token_ids_of(chunk, tokenizer, 1))
            else:
                raise InputError(f"The tokenizer cannot encode {chunk[0][:80]!r}: {error}",
                                 where="model.tokenizer_path", fix="is it the tokenizer of this "
                                 "model, and has it an unknown token?") from error
        yield from ids


def _bare_ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    # verbose=False: the warning about long texts is premature, they are cut later
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False,
                     verbose=False)["input_ids"]

