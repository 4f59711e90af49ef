"""From a raw row to the text of its prompt: first words, template, chat template."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ppocli.data.files import Row
from ppocli.data.spec import PromptSpec
from ppocli.errors import ConfigError, InputError
from ppocli.text import cut, nearest, suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, str | None]
"""literal text, then the name of the placeholder that follows it (None at the end)"""


def take_rows(rows: Iterable[Row], spec: PromptSpec, *,
              most: int | None) -> tuple[list[Row], int]:
    """The first ``most`` rows that hold a prompt (None: all), and the number of blank ones passed.

    A cell without any visible character, or null, is blank.

    Raises:
        InputError: no row at all, only blank ones, no such column, or a cell that is no prompt.
    """
    kept: list[Row] = []
    blank = 0
    for row in rows:
        if _is_blank(row, spec):
            blank += 1
            continue
        kept.append(row)
        if len(kept) == most:
            break
    if not kept:
        source = f"{spec.path_key}={spec.path}" if spec.items is None else f"{spec.key}.items"
        what = f"All prompts are blank ({blank} of {blank})." if blank else (
            "The prompt set is empty.")
        raise InputError(what, where=source, fix="give at least one prompt")
    return kept, blank


def _is_blank(row: Row, spec: PromptSpec) -> bool:
    if spec.column not in row.values:
        _no_column(row, spec)
    cell = row.values[spec.column]
    if cell is None:
        return True
    if isinstance(cell, str):
        return not cell.strip()
    if _looks_like_messages(cell):
        if not spec.chat:
            raise InputError(f"Column {spec.column!r} in {row.place} holds chat messages, not a "
                             "text.", where=f"{spec.key}.column={spec.column}",
                             fix=f"{spec.key}.chat=true renders them with the chat template")
        return False
    raise InputError(f"Column {spec.column!r} in {row.place} holds {cut(repr(cell), 40)} "
                     f"({type(cell).__name__}), not a text.",
                     where=f"{spec.key}.column={spec.column}",
                     fix="prompts are texts" + (", or lists of {role, content} messages"
                                                if spec.chat else ""))


def _no_column(row: Row, spec: PromptSpec) -> None:
    names = [name for name in row.values if isinstance(name, str)]
    near = nearest(spec.column, names, count=1)
    texts = near or [name for name in names if isinstance(row.values[name], str)] or names
    have = f"its columns are {', '.join(names)}" if names else "it has no columns"
    raise InputError(f"There is no column {spec.column!r} in {row.place}: {have}. "
                     f"{suggestion(spec.column, names)}".rstrip(),
                     where=f"{spec.key}.column={spec.column}",
                     fix=f"{spec.key}.column={texts[0]}" if texts else None)


def _looks_like_messages(cell: Any) -> bool:
    return (isinstance(cell, list) and len(cell) > 0
            and all(isinstance(message, dict) and isinstance(message.get("role"), str)
                    and "content" in message for message in cell))


def column_names(rows: Sequence[Row]) -> list[str]:
    """All column names of all rows, in the order of first sight."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def metadata(rows: Sequence[Row], spec: PromptSpec) -> dict[str, list[Any]]:
    """The metadata columns: ``spec.columns``, or all but the prompt's; None where a row has none.

    Raises:
        InputError: a column of ``spec.columns`` is in no row.
    """
    present = column_names(rows)
    if spec.columns is None:
        wanted = [name for name in present if name != spec.column]
    else:
        wanted = list(spec.columns)
    for name in wanted:
        if name not in present:
            raise InputError(f"There is no metadata column {name!r} in the prompts; their columns "
                             f"are {', '.join(present)}. {suggestion(name, present)}".rstrip(),
                             where=f"{spec.key}.columns={wanted}",
                             fix=f"take it out of {spec.key}.columns")
    return {name: [row.values.get(name) for row in rows] for name in wanted}


def prompt_texts(rows: Sequence[Row], spec: PromptSpec,
                 tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each row's prompt after first words, template and chat template.

    ``first_words`` joins the words by one space, as trlX's sentiment example does
    (``examples/ppo_sentiments.py``).

    Raises:
        ConfigError: the template is malformed or names a column that does not exist.
        InputError: the tokenizer has no chat template, or it refuses the messages of a row.
    """
    if spec.chat and not getattr(tokenizer, "chat_template", None):
        raise InputError("The tokenizer has no chat template.", where=f"{spec.key}.chat=true",
                         fix=f"{spec.key}.chat=false (with {spec.key}.template=... if the model "
                             "expects a form), or model.tokenizer_path= a tokenizer that has one")
    pieces = None if spec.template is None else _parse_template(spec, column_names(rows))
    texts = []
    for row in rows:
        cell = row.values[spec.column]
        if not isinstance(cell, str):
            cell = _render_chat(_only_messages(cell, row, spec), row, spec, tokenizer)
            texts.append(_encodable(cell, row, spec))
            continue
        if spec.first_words is not None:
            cell = " ".join(cell.split()[:spec.first_words])
        if pieces is not None:
            cell = _fill(pieces, cell, row, spec)
        if spec.chat:
            messages = [{"role": "user", "content": cell}]
            cell = _render_chat(messages, row, spec, tokenizer)
        texts.append(_encodable(cell, row, spec))
    return texts


def _encodable(text: str, row: Row, spec: PromptSpec) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The prompt in {row.place} holds {text[error.start]!a}, half of a "
                         "UTF-16 pair, which is no character.",
                         where=f"{spec.key}.column={spec.column}",
                         fix="write the character itself, or both halves") from error
    return text


def _only_messages(cell: list[dict[str, Any]], row: Row, spec: PromptSpec) -> list[dict[str, Any]]:
    for name, value in (("first_words", spec.first_words), ("template", spec.template)):
        if value is not None:
            raise InputError(f"{spec.key}.{name} works on texts, but {row.place} holds chat "
                             "messages.", where=f"{spec.key}.{name}={value}",
                             fix=f"{spec.key}.{name}=null")
    return cell


def _render_chat(messages: list[dict[str, Any]], row: Row, spec: PromptSpec,
                 tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False,
                                                 add_generation_prompt=True)
    except Exception as error:  # templates are programs: jinja's errors and any Python error
        raise InputError(f"The chat template refuses {row.place}: {error}",
                         where=f"{spec.key}.chat=true") from error
    return str(rendered)


def _parse_template(spec: PromptSpec, names: list[str]) -> list[Piece]:
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


def _fill(pieces: list[Piece], prompt: str, row: Row, spec: PromptSpec) -> str:
    parts = []
    for literal, name in pieces:
        parts.append(literal)
        if name is None:
            continue
        if name in ("prompt", spec.column):
            parts.append(prompt)
            continue
        value = row.values.get(name)
        if value is None:
            raise InputError(f"The template needs column {name!r}, which is empty in {row.place}.",
                             where=f"{spec.key}.template",
                             fix=f"fill it in, or leave {{{name}}} out of the template")
        parts.append(str(value))
    return "".join(parts)
