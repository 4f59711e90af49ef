"""From prompt texts to token ids, cut to the lengths that were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppocli.data.spec import PromptSpec
from ppocli.errors import ConfigError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Encoded:
    """n prompts as tokens. Made by :func:`encode`, read by :mod:`ppocli.data.prompt_set`."""

    token_ids: list[list[int]]
    """n lists, none empty"""
    texts: list[str]
    """n texts; of a prompt that was cut, what its tokens still say"""
    kept: list[int]
    """which of the given texts these are: those without any token were dropped"""
    cut: int
    """how many were longer than ``longest`` and were cut to it"""
    longest: int
    """tokens a prompt may have"""


def encode(texts: list[str], spec: PromptSpec, tokenizer: PreTrainedTokenizerBase, *, seed: int,
           max_prompt_tokens: int, whole: bool = False) -> Encoded:
    """Tokenise, draw lengths, cut.

    Text is given the tokens that the tokenizer puts in front of a text (BOS), and none behind it,
    so that the response continues the prompt; the prompts of an encoder are whole texts and get
    those behind it (EOS) too. Chat text is taken as its template wrote it. Lengths
    count all tokens; what stands in front survives a cut on the left. A length sampler keeps the
    first tokens, as TRL's ``LengthSampler`` examples do; ``truncation_side`` is for the rest.

    Args:
        texts: rendered prompts.
        seed: of the length sampler; the length of the i-th prompt is a function of (seed, i).
        max_prompt_tokens: what fits the model beside the response.
        whole: whether prompts are read by an encoder.

    Raises:
        ConfigError: the response leaves no room for a prompt.
        InputError: the tokenizer fails on a text.
    """
    longest = _longest(spec, max_prompt_tokens)
    front = [] if spec.chat else front_tokens(tokenizer)
    behind = tokens_behind(tokenizer) if whole and not spec.chat else []
    room = max(longest - len(behind), 1)
    lengths = _drawn_lengths(spec, seed, len(texts))
    token_ids: list[list[int]] = []
    kept_texts: list[str] = []
    kept: list[int] = []
    cut = 0
    for i, body in enumerate(_token_ids(texts, tokenizer)):
        if not body:
            continue
        ids = front + body
        fixed = len(front) or int(ids[0] == tokenizer.bos_token_id)
        uncut = len(ids)
        if lengths is not None:
            ids = ids[:lengths[len(kept)]]
        if len(ids) > room:
            cut += 1
            ids = _cut(ids, room, fixed, spec.truncation_side)
        kept.append(i)
        token_ids.append(ids + behind)
        kept_texts.append(texts[i] if len(ids) == uncut
                          else _decode(ids[len(front):], tokenizer))
    return Encoded(token_ids=token_ids, texts=kept_texts, kept=kept, cut=cut, longest=longest)


def front_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts in front of every text by itself, most often BOS or none."""
    return _tokens_around(tokenizer)[0]


def tokens_behind(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts behind every text by itself, most often EOS or none."""
    return _tokens_around(tokenizer)[1]


def _tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
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


def bos_alone(tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """The id that starts a text, and its name: BOS, or EOS where a tokenizer has no BOS.

    Raises:
        InputError: the tokenizer has neither.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id, "BOS"
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id, "EOS"
    raise InputError("There are no prompts, and the tokenizer has neither a BOS nor an EOS token "
                     "to start from.", where="prompts.path=null",
                     fix="prompts.path=FILE or prompts.items=[...]")


def _longest(spec: PromptSpec, max_prompt_tokens: int) -> int:
    if max_prompt_tokens < 1:
        raise ConfigError("generation.max_new_tokens leaves no position of the model for a prompt.",
                          where="generation.max_new_tokens", fix="lower it")
    return min(spec.max_length or max_prompt_tokens, max_prompt_tokens)


def _token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    # by chunks: the tokens of all uncut texts may be many times those that are kept
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start:start + _CHUNK]
        try:
            ids = _bare_ids(chunk, tokenizer)
        except Exception as error:  # what tokenizers raises, say where it has no unknown token
            shown = next((text for text in chunk if _fails(text, tokenizer)), chunk[0])
            raise InputError(f"The tokenizer cannot encode {shown[:80]!r}: {error}",
                             where="model.tokenizer_path",
                             fix="is it the tokenizer of this model, and has it an unknown token?"
                             ) from error
        yield from ids


def _bare_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # verbose=False: the warning about long texts is premature, they are cut later
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False,
                                     verbose=False)["input_ids"]
    return ids


def _fails(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        _bare_ids([text], tokenizer)
    except Exception:
        return True
    return False


def _drawn_lengths(spec: PromptSpec, seed: int, n: int) -> list[int] | None:
    if spec.length_sampler is None:
        return None
    shortest, most = spec.length_sampler
    return np.random.default_rng(seed).integers(shortest, most + 1, size=n).tolist()


def _cut(ids: list[int], longest: int, fixed: int, side: str) -> list[int]:
    """``longest`` ids; on the left, the first ``fixed`` (BOS) stay."""
    if side == "right" or longest <= fixed:
        return ids[:longest]
    return ids[:fixed] + ids[len(ids) - (longest - fixed):]


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
