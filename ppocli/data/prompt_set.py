"""The prompts of a run, loaded and tokenised once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from ppocli.config.schema import SOURCE, PromptsConfig
from ppocli.data import chat_text
from ppocli.data.data_set import PromptSet, joined, source_counts
from ppocli.data.files import Row
from ppocli.data.sources import Source, evaluation_specs, open_rows, training_specs
from ppocli.errors import InputError

_CHUNK = 4096
"""texts tokenised at once: uncut texts may have many times the tokens that are kept"""


def load_prompts(cfg: PromptsConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
                 items: list[Any] | None = None, whole: bool = False) -> PromptSet:
    """The training prompts.

    Rows come from ``cfg.path``, ``cfg.items`` or the sources of ``cfg.mix``; without any, the set
    is one prompt: the BOS token alone, with the text "". Blank prompts are dropped, duplicates
    kept, long prompts cut or, with ``cfg.overlong=drop``, dropped; the notes count them.
    ``PromptSet.indices`` applies ``cfg.shuffle``.

    Args:
        seed: of the length sampler.
        max_prompt_tokens: tokens that the model can read besides the response; at least 1.
        items: prompts from Python (texts or mappings) in place of ``cfg.path``.
        whole: whether an encoder reads the prompts, instead of a causal model that continues them.

    Raises:
        ConfigError: contradictory keys, or a template that names no column.
        InputError: the source is missing, unreadable or empty, a row has no prompt, a column is
            missing, or the tokenizer has no chat template or no token to start from.
    """
    specs, parts = training_specs(cfg, items), list[tuple[Source, PromptSet]]()
    if not specs[0].has_source:
        return _bos_set(tokenizer, 1)
    for spec in specs:
        notes: list[str] = []
        rows = chat_text.take_rows(open_rows(spec, notes), spec, notes, most=spec.limit)
        parts.append((spec, _build(
            rows, spec, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens, notes=notes,
            num_eval=cfg.eval.limit, whole=whole)))
    return _one_set(parts)


def load_eval_prompts(cfg: PromptsConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
                      training: PromptSet, items: list[Any] | None = None, whole: bool = False
                      ) -> PromptSet:
    """The evaluation prompts: at most ``cfg.eval.limit``, spread evenly over their source.

    The source is ``items``, ``cfg.eval.items``, ``cfg.eval.path``, or another split or
    configuration of ``cfg.path``; without any, the rows of ``training``, of each source of a mix as
    many as its weight says. Keys of ``cfg.eval`` that
    are null take the value in ``cfg``. The result depends on the arguments alone, so it stays the
    same for the whole run and across resumes.

    Args:
        training: the result of :func:`load_prompts` for the same ``cfg``.
        items: evaluation prompts from Python.
        whole: as of :func:`load_prompts`.

    Raises:
        ConfigError, InputError: as :func:`load_prompts`.
    """
    specs, parts = evaluation_specs(cfg, items), list[tuple[Source, PromptSet]]()
    if not specs[0].has_source and not training.eval_rows:
        return _bos_set(tokenizer, cfg.eval.limit)
    shares = source_counts(cfg.eval.limit, 0, [spec.weight for spec in specs])
    for spec, [share] in zip(specs, shares, strict=True):
        if (most := int(share)) == 0:
            continue
        notes: list[str] = []
        source = open_rows(spec, notes) if spec.has_source else training.eval_rows
        # read the whole source: its first rows are often of one kind (imdb is sorted by label)
        rows = chat_text.take_rows(source, spec, notes, most=spec.limit if spec.mix_name else None)
        if spec.overlong != "drop":  # else spread the rows that are left
            rows = _spread(rows, most)
        prompts = _build(rows, spec, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens,
                         notes=notes, whole=whole)
        parts.append((spec, prompts.rows(_evenly(len(prompts), most))))
    return _one_set(parts)


# Tokens -------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Encoded:
    """n prompts as tokens."""

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


# Sets ---------------------------------------------------------------------------------------------

def _build(rows: list[Row], spec: Source, tokenizer: Any, *, seed: int,
           max_prompt_tokens: int, notes: list[str], whole: bool, num_eval: int = 0) -> PromptSet:
    columns = chat_text.metadata(rows, spec)
    if spec.mix_name:
        if SOURCE in columns:
            raise InputError(f"The rows have a column {SOURCE!r}, in which prompts.mix names the "
                             "source.", where=spec.where, fix="rename it, or leave it out: "
                             f"{spec.key}.columns=[...]")
        columns[SOURCE] = [spec.mix_name] * len(rows)
    cells = chat_text.prompt_cells(rows, spec, notes)
    if spec.tools is not None and spec.tools not in chat_text.column_names(rows):
        raise chat_text.no_column(spec.tools, rows[0], f"{spec.key}.tools={spec.tools}")
    encoded = encode(chat_text.prompt_texts(cells, rows, spec, tokenizer), spec, tokenizer,
                     seed=seed, max_prompt_tokens=max_prompt_tokens, whole=whole)
    drops = spec.overlong == "drop"
    if not encoded.kept and encoded.overlong:
        raise InputError(f"All prompts are longer than {encoded.longest} tokens "
                         f"({encoded.overlong} of {len(rows)}).", where=f"{spec.key}.overlong=drop",
                         fix=f"{spec.key}.overlong=cut, or a higher {spec.key}.max_length or lower "
                             "generation.max_new_tokens")
    if not encoded.kept:
        raise InputError(f"The tokenizer returns no token for any of the {len(rows)} prompts.",
                         where=f"{spec.key}.column={spec.column}",
                         fix="is it the tokenizer of this model? (model.tokenizer_path)")
    same = len(encoded.kept) - len({tuple(ids) for ids in encoded.token_ids})
    chat_text.note_count(notes, len(rows) - len(encoded.kept) - drops * encoded.overlong,
                         "had no token: dropped")
    chat_text.note_count(notes, encoded.overlong, f"{{was}} longer than {encoded.longest} tokens: "
                         + ("dropped" if drops else f"cut on the {spec.truncation_side}"))
    chat_text.note_count(notes, same, "{was} the same as an earlier one: kept")
    chat_text.note_tools(notes, ((row.place, cell, chat_text.row_tools(row, spec))
                                 for row, cell in zip(rows, cells, strict=True)),
                         tokenizer, column=spec.tools or "")
    return PromptSet(
        token_ids=encoded.token_ids, texts=encoded.texts,
        columns={name: [values[i] for i in encoded.kept] for name, values in columns.items()},
        messages=[cells[i] for i in encoded.kept] if spec.chat else [], notes=tuple(notes),
        eval_rows=tuple(_spread([rows[i] for i in encoded.kept] if drops else rows, num_eval)))


def _one_set(parts: Sequence[tuple[Source, PromptSet]]) -> PromptSet:
    """The only set; or the sources of a mix, one after another, with the columns of all of them:
    None where a source has no such column."""
    sets = [one for _, one in parts]
    if not parts[0][0].mix_name:
        return sets[0]
    names = dict.fromkeys(name for one in sets for name in one.columns)
    columns = {name: list(chain.from_iterable(one.columns.get(name, [None] * len(one))
                                              for one in sets)) for name in names}
    notes = tuple(f"{spec.mix_name}: {note}" for spec, one in parts for note in one.notes)
    return replace(joined([replace(one, columns={}) for one in sets]), columns=columns, notes=notes,
                   eval_rows=(),
                   mix=tuple((len(one), spec.weight) for spec, one in parts))


def _bos_set(tokenizer: Any, n: int) -> PromptSet:
    """n prompts of one token, which starts a text: BOS, or EOS for a tokenizer without BOS."""
    name = "BOS" if tokenizer.bos_token_id is not None else "EOS"
    token = tokenizer.bos_token_id if name == "BOS" else tokenizer.eos_token_id
    if token is None:
        raise InputError("There are no prompts, and the tokenizer has neither a BOS nor an EOS "
                         "token to start from.", where="prompts.path=null",
                         fix="prompts.path=FILE or prompts.items=[...]")
    return PromptSet(token_ids=[[token]] * n, texts=[""] * n, columns={},
                     notes=(f"no prompts were given: every response starts from {name} alone",))


def _spread(rows: list[Row], most: int) -> list[Row]:
    """At most ``most`` rows, evenly spread, each with all columns of all rows (None if empty)."""
    names = chat_text.column_names(rows)
    picked = (rows[i] for i in _evenly(len(rows), most))
    return [replace(row, values={name: row.values.get(name) for name in names}) for row in picked]


def _evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` places, evenly spread."""
    picked = min(count, most)
    return [i * count // picked for i in range(picked)]


