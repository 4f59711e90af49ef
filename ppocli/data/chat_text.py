"""From raw rows to the texts of prompts: first words, template, chat template; and conversations
in pieces, the model's turns and the rest."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from ppocli.config.text import counted, cut, nearest, pasted, suggestion
from ppocli.data.files import Row, is_conversation, without_nulls
from ppocli.data.shapes import Message, Shapes, is_masked, render, with_prompt
from ppocli.data.sources import Source
from ppocli.errors import ConfigError, InputError

Piece = tuple[str, bool]
"""a text, and whether it is trained on"""


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
    return [cell if isinstance(cell, str) else rendered_chat(
        cell, row.place, tokenizer, prompt=True, where=f"{spec.key}.chat=true",
        tools=row_tools(row, spec)) for row, cell in zip(rows, cells, strict=True)]


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
               tokenizer: Any, column: str = "tools") -> None:
    """Note that the chat template leaves out tools; the first conversation with tools is checked,
    for all others.

    Args:
        conversations: place, conversation and descriptions of tools of each row.
        column: the column of the descriptions.
    """
    for place, messages, tools in conversations:
        if tools:
            if rendered_chat(messages, place, tokenizer) == rendered_chat(
                    messages, place, tokenizer, tools=tools):
                notes.append(f"the chat template leaves out what the column {column} describes")
            return


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
    names = [] if spec.template is None else column_names(rows)
    cells: list[Any] = []
    for row in rows:
        cell = row.values[spec.column]
        if isinstance(cell, str):
            if spec.first_words is not None:
                cell = " ".join(cell.split()[:spec.first_words])
            if spec.template is not None:
                cell = filled(cell, row, spec, names)
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


def filled(prompt: str, row: Row, spec: Source, names: Sequence[str] = ()) -> str:
    """``spec.template`` with a row's prompt and cells in place of its placeholders.

    Args:
        names: columns of all rows, for errors.

    Raises:
        ConfigError: the template is malformed, or names another column or none.
        InputError: a cell that it needs is empty.
    """
    template, columns = spec.template or "", {**row.values, "prompt": prompt, spec.column: prompt}
    where, fix = f"{spec.key}.template={template!r}", "write a literal brace twice: {{ or }}"
    try:
        text = template.format_map(columns)
    except KeyError as error:
        name = str(error.args[0])
        if name in names:
            raise _empty_cell(name, row, spec) from None
        present = list(dict.fromkeys(["prompt", *columns, *names]))
        near = nearest(name, present, count=1)
        raise ConfigError(f"The template's placeholder {{{name}}} is no column; there are "
                          f"{', '.join(present)}."
                          + (f" Did you mean {{{near[0]}}}?" if near else ""),
                          where=where, fix=fix) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f"The template is malformed: {error}.", where=where, fix=fix) from error
    for name, cell in row.values.items():
        if cell is None and f"{{{name}}}" in template:
            raise _empty_cell(name, row, spec)
    if text == template.format_map(dict.fromkeys(columns, "")):
        raise ConfigError("The template has no placeholder: every prompt would be the same.",
                          where=where, fix="put {prompt} where the prompt goes")
    return text


def _empty_cell(name: str, row: Row, spec: Source) -> InputError:
    return InputError(f"The template needs column {name!r}, which is empty in {row.place}.",
                      where=f"{spec.key}.template",
                      fix=f"fill it in, or leave {{{name}}} out of the template")


# Conversations ------------------------------------------------------------------------------------

def rendered_chat(messages: Sequence[Message], place: str, tokenizer: Any, *,
                  tools: list[Any] | None = None, prompt: bool = False,
                  where: str = "model.tokenizer_path") -> str:
    """A conversation rendered by the chat template.

    Args:
        tools: descriptions of the functions that may be called.
        prompt: add the generation prompt.

    Raises:
        InputError: the template refuses the conversation.
    """
    try:
        return render(messages, lambda conversation: str(tokenizer.apply_chat_template(
            conversation, tools=tools, tokenize=False, add_generation_prompt=prompt)))
    except Exception as error:  # templates are programs: jinja's errors and any Python error
        raise InputError(f"The chat template refuses {place}: {error}", where=where) from error


def chat_pieces(messages: list[Message], place: str, tokenizer: Any, *, since: int,
                tools: list[Any] | None = None, others: bool = False) -> list[Piece]:
    """A conversation as the template renders it, in pieces that are trained on (turns of the
    assistant, each through the token that ends it) and pieces that aren't.

    A turn is the text that the template adds to the conversation before it and the generation
    prompt. Turns that the data marks as not trained on (:func:`ppocli.data.shapes.is_masked`)
    aren't.

    Args:
        messages: with at least one turn of the assistant.
        place: where they came from, for errors.
        since: turns before this one aren't trained on.
        tools: as of :func:`rendered_chat`.
        others: train on all text but the masked turns.

    Raises:
        InputError: the chat template refuses the conversation, or writes earlier turns differently
            once others follow, so that turns can't be told apart.
    """
    whole = rendered_chat(messages, place, tokenizer, tools=tools)
    turns = [i for i, message in enumerate(messages) if is_masked(message)] if others else [
        i for i, message in enumerate(messages)
        if message["role"] == "assistant" and i >= since and not is_masked(message)]
    pieces: list[Piece] = []
    at = 0
    for turn in turns:
        start, end = _turn_span(messages, turn, whole, place, tokenizer, tools)
        pieces += [(whole[at:start], others), (whole[start:end], not others)]
        at = end
    return [piece for piece in [*pieces, (whole[at:], others)] if piece[0]]


def _turn_span(messages: list[Message], turn: int, whole: str, place: str, tokenizer: Any,
               tools: list[Any] | None) -> tuple[int, int]:
    """The span (start, end) of a turn in the rendered text, without the generation prompt."""
    is_assistant = messages[turn]["role"] == "assistant"
    if not turn and is_assistant:
        raise InputError(f"The conversation in {place} begins with the assistant: the chat "
                         "template doesn't show where that turn begins.", where=place,
                         fix="begin it with a turn of the user or the system; or "
                             "data.train_on=completion trains on the last answer alone")
    before = "" if not turn else rendered_chat(messages[:turn], place, tokenizer, tools=tools,
                                               prompt=is_assistant)
    through = rendered_chat(messages[:turn + 1], place, tokenizer, tools=tools)
    start = len(before)
    # the turn ends after its last special token if only white space follows
    kept = through[start:].rstrip()
    specials = (*map(str, tokenizer.all_special_tokens), *(
        str(token) for token in tokenizer.added_tokens_decoder.values() if token.special))
    end = start + len(kept) if kept.endswith(specials) else len(through)
    if not through.startswith(before) or not whole.startswith(through[:end]):
        raise InputError(f"The turns in {place} can't be told apart: the chat template writes turn "
                         f"{turn + 1} or what is before it differently once the conversation goes "
                         "on.", where="model.tokenizer_path",
                         fix="data.train_on=completion trains on the last answer alone; or give a "
                         "template that leaves earlier turns as they are (model.chat_template=FILE"
                         "), or split conversations up so that each has one turn of the assistant")
    return start, end
