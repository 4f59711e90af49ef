"""From raw rows to the texts of prompts: first words, template, chat template."""

import json
import string
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ppocli.config.text import counted, cut, nearest, pasted, suggestion
from ppocli.data.files import Row, is_conversation, without_nulls
from ppocli.data.shapes import Shapes, with_prompt
from ppocli.data.sources import Source
from ppocli.data.tool_calls import names_of, with_arguments
from ppocli.errors import ConfigError, InputError

Piece = tuple[str, str | None]
"""a literal text, and the name of the placeholder after it (None at the end)"""


def take_rows(rows: Iterable[Row], spec: Source, notes: list[str], *,
              most: int | None = None) -> list[Row]:
    """The first ``most`` rows with a prompt (None: all). Cells that are null or have no visible
    character are skipped, and ``notes`` gets their number.

    Raises:
        InputError: there is no row, only blank ones, no such column, or a cell that is no prompt.
    """
    kept: list[Row] = []
    blank = 0
    shapes = Shapes(spec, notes)
    for row in (with_prompt(row, spec, shapes) for row in rows):
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
    """Append "``count`` prompts ``what``" to ``notes``, unless ``count`` is 0.

    Args:
        what: the rest of the sentence; ``{was}`` becomes was or were.
        noun: what is counted.
    """
    if count:
        was = "was" if count == 1 else "were"
        notes.append(f"{counted(count, noun)} {what.format(was=was)}")


def ends_in_eos(rows: Sequence[Row], eos: str) -> str:
    """The warning for prompts that end in the EOS token."""
    ends, they = ("ends", "it") if len(rows) == 1 else ("end", "they")
    return (f"{counted(len(rows), 'prompt')} {ends} in the EOS token {eos} (the first: "
            f"{rows[0].place}): to the model the text is over before the response begins. Leave "
            f"the token out if {they} should be continued")


def _is_blank(row: Row, spec: Source) -> bool:
    if spec.column not in row.values:
        fit = [name for name, cell in row.values.items() if isinstance(cell, str)
               or is_conversation(cell)]
        near = nearest(spec.column, fit, count=1) or fit
        raise no_column(spec.column, row, f"{spec.key}.column={spec.column}",
                        pasted(f"{spec.key}.column={near[0]}") if near else None)
    if (cell := row.values[spec.column]) is None:
        return True
    if isinstance(cell, str):
        return not cell.strip()
    if is_conversation(cell):
        if not spec.chat:
            raise InputError(f"Column {spec.column!r} in {row.place} holds chat messages, not a "
                             "text.", where=f"{spec.key}.column={spec.column}",
                             fix=f"{spec.key}.chat=true renders them with the chat template")
        return False
    raise InputError(
        f"Column {spec.column!r} in {row.place} holds {cut(repr(cell), 40)} "
        f"({type(cell).__name__}), not a text.", where=f"{spec.key}.column={spec.column}",
        fix="prompts are texts" + (", or lists of {role, content} messages" if spec.chat else ""))


def no_column(column: Any, row: Row, where: str, fix: str | None = None) -> InputError:
    """The error for a row without that column; suggests the nearest that it has."""
    have = f"its columns are {', '.join(row.values)}" if row.values else "it has no columns"
    return InputError(f"There is no column {column!r} in {row.place}: {have}. "
                      f"{suggestion(str(column), row.values)}".rstrip(), where=where, fix=fix,
                      code="no-such-column")


def column_names(rows: Sequence[Row]) -> list[str]:
    """The column names of all rows, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def metadata(rows: Sequence[Row], spec: Source) -> dict[str, list[Any]]:
    """Cells by metadata column: ``spec.columns``, or all but the prompt's. Missing cells are None.

    Raises:
        InputError: a column of ``spec.columns`` is in no row.
    """
    present = column_names(rows)
    names = ([name for name in present if name != spec.column] if spec.columns is None
             else spec.columns)
    for name in names:
        if name not in present:
            raise InputError(f"There is no metadata column {name!r} in the prompts; their columns "
                             f"are {', '.join(present)}. {suggestion(name, present)}".rstrip(),
                             where=f"{spec.key}.columns={names}",
                             fix=f"take it out of {spec.key}.columns")
    cells = [row.values if row.typed is None else row.typed for row in rows]
    return {name: [values.get(name) for values in cells] for name in names}


def prompt_texts(cells: Sequence[Any], rows: Sequence[Row], spec: Source, tokenizer: Any
                 ) -> list[str]:
    """The text of each row's prompt; conversations are rendered by the chat template.

    Args:
        cells: the result of :func:`prompt_cells`.

    Raises:
        InputError: the tokenizer has no chat template, or it refuses the messages of a row.
    """
    if spec.chat and not getattr(tokenizer, "chat_template", None):
        plain = all(isinstance(row.values.get(spec.column), str) for row in rows)
        raise InputError("The tokenizer has no chat template.", where=f"{spec.key}.chat=true",
                         fix=f"{spec.key}.chat=false (with {spec.key}.template=... if the model "
                             "expects a form), or model.chat_template=FILE" if plain else
                             "model.chat_template=FILE, which the prompts need: they are lists "
                             "of messages", code="no-chat-template")
    return [encodable(cell if isinstance(cell, str) else rendered_chat(
        cell, row.place, tokenizer, prompt=True, where=f"{spec.key}.chat=true",
        tools=row_tools(row, spec)), row, spec) for row, cell in zip(rows, cells, strict=True)]


def row_tools(row: Row, spec: Source) -> list[Any] | None:
    """:func:`described_tools` of a prompt."""
    return None if spec.tools is None or not spec.chat else described_tools(
        row, spec.tools, f"{spec.key}.tools={spec.tools}", f"{spec.key}.tools=null")


def described_tools(row: Row, column: str, where: str, without: str) -> list[Any] | None:
    """The descriptions of functions in a row, from a list or its JSON; None if there are none.

    Args:
        without: the setting that leaves the column out, for errors.

    Raises:
        InputError: the column holds something else.
    """
    cell = without_nulls(row.values.get(column))
    with suppress(ValueError, RecursionError):
        cell = json.loads(cell) if isinstance(cell, str) else cell
    # in pandas, missing values are NaN or NA
    if not cell if isinstance(cell, list) else str(cell).strip() in ("None", "", "nan", "<NA>"):
        return None
    if not isinstance(cell, list) or not all(isinstance(one, dict) for one in cell):
        raise InputError(f"Column {column!r} in {row.place} holds {cut(repr(cell), 40)}, not a "
                         "list of descriptions of functions.", where=where, fix="give JSON schemas,"
                         f" as a list or in JSON; {without} leaves the column out")
    return cell


def note_tools(notes: list[str], conversations: Iterable[tuple[str, Any, list[Any] | None]],
               tokenizer: Any, *, prompt: bool = False, column: str = "tools") -> None:
    """Note that the chat template leaves out tools or calls of tools. The first conversation with
    tools and the first with calls are checked, for all others.

    Args:
        conversations: place, conversation and descriptions of tools of each row.
        prompt: whether the conversations are prompts, which an answer follows.
        column: the column of the descriptions.
    """
    conversations = list(conversations)
    for place, messages, tools in conversations:
        if tools:
            without, with_tools = (rendered_chat(messages, place, tokenizer, tools=each,
                                                 prompt=prompt) for each in (None, tools))
            if without == with_tools:
                notes.append(f"the chat template leaves out what the column {column} describes")
            break
    for place, messages, _ in conversations:
        if isinstance(messages, list) and (names := names_of(messages)):
            text = rendered_chat(messages, place, tokenizer, tools=None, prompt=prompt)
            if not any(name in text for name in names):
                notes.append("the chat template leaves out the calls of tools (tool_calls)")
            break


def prompt_cells(rows: Sequence[Row], spec: Source, notes: list[str] | None = None) -> list[Any]:
    """Each row's prompt after ``first_words`` and ``template``, before the chat template: a text,
    or with ``chat`` a list of messages, beginning with the row's cell in the column ``system``.

    ``first_words`` joins the words by one space, as trlX's sentiment example does
    (``examples/ppo_sentiments.py``).

    Raises:
        ConfigError: the template is malformed or names a column that doesn't exist.
        InputError: ``first_words`` or ``template`` is set and a row holds messages, or the template
            needs a cell that is empty.
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
        elif text_key := next((name for name in ("first_words", "template")
                               if getattr(spec, name) is not None), None):
            key = f"{spec.key}.{text_key}"
            raise InputError(f"{key} works on texts, but {row.place} holds chat messages.",
                             where=f"{key}={getattr(spec, text_key)}", fix=f"{key}=null")
        cells.append(with_system_turn(cell, row, spec, [] if notes is None else notes))
    return cells


def with_system_turn(cell: Any, row: Row, spec: Source, notes: list[str]) -> Any:
    """A prompt with the row's cell in the column ``system`` in front
    (:meth:`ppocli.data.shapes.Shapes.system_turn`); unchanged without ``chat`` or such a cell."""
    if not spec.chat or not isinstance(row.values.get("system"), str):
        return cell
    messages = [{"role": "user", "content": cell}] if isinstance(cell, str) else cell
    fronted = Shapes(spec, notes).system_turn(row, messages)
    return cell if fronted is messages else fronted


def encodable(text: str, row: Row, spec: Source) -> str:
    """``text``, of that row, if it can be encoded.

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
    """A conversation rendered by the chat template.

    Args:
        tools: descriptions of the functions that may be called.
        prompt: add the generation prompt.

    Raises:
        InputError: the template refuses the conversation.
    """
    with template_errors(place, where):
        return with_arguments(messages, lambda conversation: str(tokenizer.apply_chat_template(
            conversation, tools=tools, tokenize=False, add_generation_prompt=prompt)), str)


def by_template(texts: Sequence[str], tokenizer: Any) -> bool | None:
    """False for texts that no chat template has rendered; None if all contain what this template
    writes between a question and its answer, so that it may have rendered them."""
    if getattr(tokenizer, "chat_template", None):
        question = "a question"
        with suppress(InputError):
            text = rendered_chat([{"role": "user", "content": question}], question, tokenizer,
                                 prompt=True)
            between = text.rpartition(question)[2].strip()
            if between and all(between in text for text in texts if text):
                return None
    return False


@contextmanager
def template_errors(place: str, where: str = "model.tokenizer_path") -> Iterator[None]:
    """Turn errors of the chat template inside the block into one that names the conversation."""
    try:
        yield
    except Exception as error:  # templates are programs: jinja's errors and any Python error
        raise InputError(f"The chat template refuses {place}: {error}", where=where) from error


def parse_template(spec: Source, names: list[str]) -> list[Piece]:
    """``spec.template`` in pieces.

    Args:
        names: columns that it may name.

    Raises:
        ConfigError: it is malformed, names another column, or names none.
    """
    template = spec.template or ""
    where = f"{spec.key}.template={template!r}"
    columns = list(dict.fromkeys(["prompt", *names]))
    pieces: list[Piece] = []
    try:
        for literal, name, form, conversion in string.Formatter().parse(template):
            if name is None:
                pieces.append((literal, None))
                continue
            # a format or a conversion after the name: usually a brace that is meant literally
            full = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            if full not in columns:
                near = nearest(full, columns, count=1)
                raise ConfigError(f"The template's placeholder {{{full}}} is no column; there are "
                                  f"{', '.join(columns)}."
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
    """The template filled with one row's cells.

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
