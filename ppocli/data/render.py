"""From raw rows to the texts of their prompts (first words, template, chat template), and on to
token ids, cut to the lengths that were asked for."""

import string
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppocli.data.files import Row
from ppocli.data.sources import Source, with_prompt
from ppocli.errors import ConfigError, InputError
from ppocli.text import counted, cut, nearest, pasted, suggestion

Piece = tuple[str, str | None]
"""literal text, then the name of the placeholder that follows it (None at the end)"""
_CHUNK = 4096
"""texts tokenised at once: the tokens of all uncut texts may be many times those that are kept"""


def take_rows(rows: Iterable[Row], spec: Source, notes: list[str], *,
              most: int | None = None) -> list[Row]:
    """The first ``most`` rows that hold a prompt (None: all). A cell without any visible character,
    or null, is blank; how many of those were passed is said in ``notes``.

    Raises:
        InputError: no row at all, only blank ones, no such column, or a cell that is no prompt.
    """
    kept: list[Row] = []
    blank = 0
    for row in (with_prompt(row, spec) for row in rows):
        if _is_blank(row, spec):
            blank += 1
            continue
        kept.append(row)
        if len(kept) == most:
            break
    if not kept:
        what = f"All prompts are blank ({blank} of {blank})." if blank else (
            "The prompt set is empty.")
        raise InputError(what, where=spec.where, fix="give at least one prompt")
    note_count(notes, blank, "{was} blank: dropped")
    return kept


def note_count(notes: list[str], count: int, what: str, noun: str = "prompt") -> None:
    """Add to ``notes`` what holds of so many prompts, or others, unless of none."""
    if count:
        was = "was" if count == 1 else "were"
        notes.append(f"{counted(count, noun)} {what.format(was=was)}")


def ends_in_eos(rows: Sequence[Row], eos: str) -> str:
    """The warning that these prompts end in the EOS token."""
    ends, they = ("ends", "it") if len(rows) == 1 else ("end", "they")
    return (f"{counted(len(rows), 'prompt')} {ends} in the EOS token {eos} (the first: "
            f"{rows[0].place}): to the model the text is over before the response begins. Leave "
            f"the token out if {they} should be continued")


def _is_blank(row: Row, spec: Source) -> bool:
    if spec.column not in row.values:
        fit = [name for name, cell in row.values.items() if isinstance(cell, str)
               or _is_conversation(cell)]
        near = nearest(spec.column, fit, count=1) or fit
        raise no_column(spec.column, row, f"{spec.key}.column={spec.column}",
                        pasted(f"{spec.key}.column={near[0]}") if near else None)
    if (cell := row.values[spec.column]) is None:
        return True
    if isinstance(cell, str):
        return not cell.strip()
    if _is_conversation(cell):
        if not spec.chat:
            raise InputError(f"Column {spec.column!r} in {row.place} holds chat messages, not a "
                             "text.", where=f"{spec.key}.column={spec.column}",
                             fix=f"{spec.key}.chat=true renders them with the chat template")
        return False
    raise InputError(
        f"Column {spec.column!r} in {row.place} holds {cut(repr(cell), 40)} "
        f"({type(cell).__name__}), not a text.", where=f"{spec.key}.column={spec.column}",
        fix="prompts are texts" + (", or lists of {role, content} messages" if spec.chat else ""))


def _is_conversation(cell: Any) -> bool:
    return isinstance(cell, list) and bool(cell) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str)
        and "content" in message for message in cell)


def no_column(column: Any, row: Row, where: str, fix: str | None = None) -> InputError:
    """The error for a row without that column, with the nearest that it has."""
    have = f"its columns are {', '.join(row.values)}" if row.values else "it has no columns"
    return InputError(f"There is no column {column!r} in {row.place}: {have}. "
                      f"{suggestion(str(column), row.values)}".rstrip(), where=where, fix=fix)


def column_names(rows: Sequence[Row]) -> list[str]:
    """All column names of all rows, in the order of first sight."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def metadata(rows: Sequence[Row], spec: Source) -> dict[str, list[Any]]:
    """The metadata columns: ``spec.columns``, or all but the prompt's; None where a row has none.

    Raises:
        InputError: a column of ``spec.columns`` is in no row.
    """
    present = column_names(rows)
    wanted = ([name for name in present if name != spec.column] if spec.columns is None
              else spec.columns)
    for name in wanted:
        if name not in present:
            raise InputError(f"There is no metadata column {name!r} in the prompts; their columns "
                             f"are {', '.join(present)}. {suggestion(name, present)}".rstrip(),
                             where=f"{spec.key}.columns={wanted}",
                             fix=f"take it out of {spec.key}.columns")
    return {name: [row.values.get(name) for row in rows] for name in wanted}


def prompt_texts(cells: Sequence[Any], rows: Sequence[Row], spec: Source, tokenizer: Any
                 ) -> list[str]:
    """The text of each row's prompt, made of what :func:`prompt_cells` gives for it by the chat
    template.

    Raises:
        InputError: the tokenizer has no chat template, or it refuses the messages of a row.
    """
    if spec.chat and not getattr(tokenizer, "chat_template", None):
        raise InputError("The tokenizer has no chat template.", where=f"{spec.key}.chat=true",
                         fix=f"{spec.key}.chat=false (with {spec.key}.template=... if the model "
                             "expects a form), or model.chat_template=FILE")
    return [encodable(cell if isinstance(cell, str) else rendered_chat(
        cell, row.place, tokenizer, prompt=True, where=f"{spec.key}.chat=true"), row, spec)
            for row, cell in zip(rows, cells, strict=True)]


def prompt_cells(rows: Sequence[Row], spec: Source) -> list[Any]:
    """Each row's prompt after first words and template, before the chat template: a text, or with
    ``chat`` a conversation, a list of messages.

    ``first_words`` joins the words by one space, as trlX's sentiment example does
    (``examples/ppo_sentiments.py``).

    Raises:
        ConfigError: the template is malformed or names a column that does not exist.
        InputError: first words or a template are asked for, and a row holds messages; or the
            template needs a cell that is empty.
    """
    pieces = None if spec.template is None else parse_template(spec, column_names(rows))
    cells: list[Any] = []
    for row in rows:
        cell = row.values[spec.column]
        if isinstance(cell, str):
            if spec.first_words is not None:
                cell = " ".join(cell.split()[:spec.first_words])
            if pieces is not None:
                cell = fill(pieces, cell, row, spec)
            if spec.chat:
                cell = [{"role": "user", "content": cell}]
        elif given := [name for name in ("first_words", "template")
                       if getattr(spec, name) is not None]:
            raise InputError(f"{spec.key}.{given[0]} works on texts, but {row.place} holds chat "
                             "messages.", where=f"{spec.key}.{given[0]}={getattr(spec, given[0])}",
                             fix=f"{spec.key}.{given[0]}=null")
        cells.append(cell)
    return cells


def encodable(text: str, row: Row, spec: Source) -> str:
    """``text``, which is in that row.

    Raises:
        InputError: it holds half of a UTF-16 pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The {spec.noun} in {row.place} holds {text[error.start]!a}, half of a "
                         "UTF-16 pair, which is no character.",
                         where=(f"{spec.key}.column={spec.column}" if spec.noun == "prompt"
                                else spec.where),
                         fix="write the character itself, or both halves") from error
    return text


def rendered_chat(messages: list[dict[str, Any]], place: str, tokenizer: Any, *,
                  tools: list[Any] | None = None, prompt: bool = False,
                  where: str = "model.tokenizer_path") -> str:
    """What the template makes of a conversation, with the generation prompt where asked.

    Args:
        tools: descriptions of the functions that may be called.

    Raises:
        InputError: it refuses it.
    """
    with template_errors(place, where):
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                                 add_generation_prompt=prompt))


@contextmanager
def template_errors(place: str, where: str = "model.tokenizer_path") -> Iterator[None]:
    """Name the conversation that a chat template refuses inside the block."""
    try:
        yield
    except Exception as error:  # templates are programs: jinja's errors and any Python error
        raise InputError(f"The chat template refuses {place}: {error}", where=where) from error


def parse_template(spec: Source, names: list[str]) -> list[Piece]:
    """``spec.template`` in pieces; ``names`` are the columns that it may name.

    Raises:
        ConfigError: it is malformed, or names none of them.
    """
    template = spec.template or ""
    where = f"{spec.key}.template={template!r}"
    known = list(dict.fromkeys(["prompt", *names]))
    pieces: list[Piece] = []
    try:
        for literal, name, form, conversion in string.Formatter().parse(template):
            if name is None:
                pieces.append((literal, None))
                continue
            # with a format or a conversion it is no bare {name}, most often a brace meant literally
            full = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            if full not in known:
                near = nearest(full, known, count=1)
                raise ConfigError(f"The template's placeholder {{{full}}} is no column; there are "
                                  f"{', '.join(known)}."
                                  + (f" Did you mean {{{near[0]}}}?" if near else ""),
                                  where=where, fix="write a literal brace twice: {{ or }}")
            pieces.append((literal, full))
    except ValueError as error:
        raise ConfigError(f"The template is malformed: {error}.", where=where,
                          fix="write a literal brace twice: {{ or }}") from error
    if all(name is None for _, name in pieces):
        raise ConfigError("The template has no placeholder: every prompt would be the same.",
                          where=where, fix="put {prompt} where the prompt goes")
    return pieces


def fill(pieces: list[Piece], prompt: str, row: Row, spec: Source) -> str:
    """The template with one row's cells.

    Raises:
        InputError: a cell that it needs is empty.
    """
    parts = []
    for literal, name in pieces:
        value = ("" if name is None else prompt if name in ("prompt", spec.column)
                 else row.values.get(name))
        if value is None:
            raise InputError(f"The template needs column {name!r}, which is empty in {row.place}.",
                             where=f"{spec.key}.template",
                             fix=f"fill it in, or leave {{{name}}} out of the template")
        parts += [literal, str(value)]
    return "".join(parts)


# Tokens -------------------------------------------------------------------------------------------

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
    found = Encoded(longest=min(spec.max_length or max_prompt_tokens, max_prompt_tokens))
    front, behind = ([], []) if spec.chat else tokens_around(tokenizer)
    behind = behind if whole else []
    room = max(found.longest - len(behind), 1)
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
            ids = ids[:lengths[len(found.kept) + found.overlong * (spec.overlong == "drop")]]
        if len(ids) > room:
            found.overlong += 1
            if spec.overlong == "drop":
                continue
            # on the left, what is fixed (BOS) stays
            head = room if spec.truncation_side == "right" else min(fixed, room)
            ids = ids[:head] + ids[len(ids) - (room - head):]
        if ids[-1] == tokenizer.eos_token_id and len(ids) > len(front):
            found.ended.append(i)
        found.kept.append(i)
        found.token_ids.append(ids + behind)
        found.texts.append(texts[i] if len(ids) == uncut else str(tokenizer.decode(
            ids[len(front):], skip_special_tokens=False, clean_up_tokenization_spaces=False)))
    return found


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

