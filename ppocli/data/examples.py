"""Rows of training data as texts and conversations. The columns decide the format, as in TRL's
dataset formats: ``text``; ``messages``; ``prompt`` and ``completion``; ``prompt``, ``chosen`` and
``rejected``, or the latter two alone with the prompt in both. A cell is a text, or a list of
messages with a role and a content."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NoReturn

from ppocli.config.schema_training import DataConfig
from ppocli.config.text import cut, suggestion
from ppocli.data import chat_text, shapes
from ppocli.data.files import Row
from ppocli.data.shapes import Message, Shapes, is_blank, is_masked, listed
from ppocli.data.sources import Source, as_list, open_rows
from ppocli.errors import ConfigError, InputError

Cell = str | list[Message]
Wants = Literal["completions", "pairs"]

FORMATS: dict[str, tuple[tuple[str, ...], ...]] = {
    "completions": (("prompt", "completion"), ("messages",), ("text",)),
    "pairs": (("prompt", "chosen", "rejected"), ("chosen", "rejected"))}
"""the columns of each format, in order of preference"""
_COLUMNS = ("text", "messages", "prompt", "completion", "chosen", "rejected", "margin", "tools",
            "system")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WORDS = {"completions": ("pairs", "examples to learn from",
                          "'text', 'messages', or 'prompt' and 'completion'",
                          "`ppocli reward-model` trains on pairs"),
          "pairs": ("completions", "pairs of a better and a worse answer",
                    "'chosen' and 'rejected', with or without 'prompt'",
                    "`ppocli sft` trains on texts, messages and completions")}
"""the other kind of data; for errors: what is missing, its columns, the command for the other"""


@dataclass(frozen=True, slots=True)
class Example:
    """One text to train on, from :func:`read_examples` to :mod:`ppocli.data.encoding`."""

    place: str
    """where it came from, as in ``line 3 of reviews.jsonl``"""
    prompt: Cell | None
    """None if the row is one text or one conversation"""
    completion: Cell
    """the text or the turns after the prompt, or the whole row; of the prompt's kind"""
    tools: list[Any] | None = None
    """descriptions of functions, for the chat template of a conversation"""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a prompt, the better one first."""

    place: str
    prompt: Cell
    """may be "" if it is the beginning that two texts share"""
    chosen: Cell
    rejected: Cell
    margin: float
    tools: list[Any] | None = None


@dataclass(slots=True)
class Read:
    """The examples or pairs of a source, and counts of the rows that were left out."""

    rows: int = 0
    """number of rows of the source, up to the limit"""
    examples: list[Example] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    empty: int = 0
    """rows left out because a text was empty"""
    identical: int = 0
    """pairs left out because both answers are the same"""
    untrained: int = 0
    """turns of the assistant that are marked as not trained on"""
    notes: list[str] = field(default_factory=list)
    """sentences about settings without effect and rows that were left out"""

    @property
    def conversations(self) -> list[tuple[str, Cell, list[Any] | None]]:
        """Of each row: its place, its prompt (without one, its answer), and its tools."""
        return [*((row.place, row.prompt or row.completion, row.tools) for row in self.examples),
                *((row.place, row.prompt or row.chosen, row.tools) for row in self.pairs)]


def read_examples(cfg: DataConfig, *, wants: Wants, items: Sequence[Any] | None = None,
                  path_key: str = "data.path") -> Read:
    """The examples or pairs of ``data.path``, in its order.

    Rows with an empty text and pairs of two equal answers are left out and counted.

    Args:
        wants: the formats to read.
        items: texts or mappings from Python, in place of the path.
        path_key: ``data.path`` or ``data.val``.

    Raises:
        ConfigError: contradictory keys, or no source.
        InputError: the source is missing, no row is left, or a row can't be used; it is named.
    """
    path = cfg.path if path_key == "data.path" else cfg.val
    if path is None and items is None:
        raise ConfigError("There is no data to train on.", where=f"{path_key}=null",
                          fix=f"{path_key}=FILE, a folder or a data set on the Hub")
    items = as_list(items, "Examples", "data.items")
    source = Source(key="data", noun="data", path=None if items is not None else str(path),
                    path_key=path_key, items=items, column="text", kwargs=cfg.kwargs,
                    name=cfg.name, split=cfg.split,
                    split_is_set=cfg.split != "train", template=cfg.template, chat=cfg.chat,
                    limit=cfg.limit if path_key == "data.path" else None)
    result = Read()
    reader = _Reader(source, dict(cfg.columns), wants, result)
    for row in islice(open_rows(source, result.notes), source.limit):
        reader.take(row)
    if not result.examples and not result.pairs:
        raise InputError("The data is empty." if not result.rows else
                         f"Nothing is left of the {result.rows} rows: {result.empty} are empty, "
                         f"and {result.identical} hold the same answer twice.", where=source.where,
                         fix="give at least one row")
    chat_text.note_count(result.notes, result.empty, "{was} empty: left out", "row")
    if wants == "completions":
        chat_text.note_count(result.notes, result.untrained,
                             "{was} marked as not trained on: masked", "turn")
    reader.note_unread()
    return result


class _Reader:
    """Checks rows against the first one and collects what they hold."""

    def __init__(self, source: Source, columns: dict[str, Any], wants: Wants, into: Read) -> None:
        for name in columns:
            if name not in _COLUMNS:
                raise ConfigError(f"{name!r} is no column that is read; those are "
                                  f"{', '.join(_COLUMNS)}. {suggestion(name, _COLUMNS)}".rstrip(),
                                  where=f"data.columns.{name}", fix="data.columns.STANDARD=YOURS, "
                                  "as in data.columns.completion=summary")
        self.source, self.columns, self.wants, self.read = source, columns, wants, into
        self.named = {name for name, column in columns.items() if column is not None}
        self.format: tuple[str, ...] = ()
        self.first = Row("", {})
        self.kind = ("", "")  # the kind of all cells, texts or messages, and the first place
        self.shapes = Shapes(source, into.notes)
        self.conversation: tuple[str, str] | None = None  # standard column, the rows' column

    def take(self, row: Row) -> None:
        self.read.rows += 1
        values = dict(row.values)
        for name, column in self.columns.items():
            if column is None:
                values.pop(name, None)
            elif column in row.values:
                values[name] = row.values[column]
            else:
                raise chat_text.no_column(column, row, f"data.columns.{name}={column}")
        if not self.format:
            self._settle(Row(row.place, values))
        if self.conversation is not None and self.conversation[1] in values:
            values[self.conversation[0]] = values[self.conversation[1]]
        row = Row(row.place, values)
        for name in (*self.format, *(("margin",) if "margin" in self.first.values else ())):
            if name not in values:
                self._refuse(f"{row.place} has no column {name!r}, where {self.first.place} has "
                             "one", "the rows of one source have the same columns")
        if self.wants == "pairs":
            self._take_pair(row)
        else:
            self._take_example(row)

    def _settle(self, row: Row) -> None:
        """Take the format from the first row, for all rows."""
        self.format, self.first = self._format(row.values, self.wants), row
        if self.format in ((), ("text",), ("chosen", "rejected")) and not (
                self.named & {"text", "messages"}):
            self._find_conversation(row)
        if not self.format:
            others, content, words, command = _WORDS[self.wants]
            named = shapes.columns_like(row.values) if self.wants == "completions" else ""
            self._refuse(f"the columns of {row.place} are not those of {content}: "
                         f"{', '.join(map(str, row.values)) or 'none'}",
                         f"{command}; or name columns with data.columns"
                         if self._format(row.values, others) else named or
                         f"give {words}; data.columns.STANDARD=YOURS takes another column")
        if "prompt" not in self.format:
            for key, value in (("chat", self.source.chat), ("template", self.source.template)):
                if value and self.format != ("messages",):
                    raise ConfigError(f"data.{key} works on prompts, but the rows have no column "
                                      "'prompt'.", where=f"data.{key}={value}",
                                      fix="data.columns.prompt=YOURS, or leave it out")

    def _format(self, values: Mapping[str, Any], wants: str) -> tuple[str, ...]:
        """The format of a row; formats with a column in ``data.columns`` come first."""
        return next((names for names in sorted(FORMATS[wants], key=self.named.isdisjoint)
                     if all(name in values for name in names)), ())

    def _find_conversation(self, row: Row) -> None:
        """Look for a conversation under the name that another tool gives it: the messages of an
        example, or the prompt of a pair whose answers are one message each."""
        answer = listed(row.values.get("chosen"))
        pairs = self.wants == "pairs"
        name = "prompt" if pairs else "messages"
        if name in self.columns or (pairs and isinstance(answer, list) and len(answer) != 1):
            return
        if column := self.shapes.conversation_column(row.values):
            self.conversation = name, column
            self.format = self._format(row.values | {name: None}, self.wants)

    def note_unread(self) -> None:
        """Note the columns of the first row that aren't read."""
        template = self.source.template or ""
        read = {*self.format, *map(str, self.columns.values()), *(self.conversation or ()),
                *self.columns, "margin", "tools",
                *(("system",) if self.kind[0] == "messages" else ())}
        if unread := [name for name in map(str, self.first.values)
                      if name not in read and f"{{{name}}}" not in template]:
            self.shapes.note(f"columns that are not read: {', '.join(unread)}; "
                             "data.columns.STANDARD=NAME reads one")

    def _refuse(self, what: str, fix: str | None = None) -> NoReturn:
        raise InputError(f"{what[0].upper()}{what[1:]}.", where=self.source.where, fix=fix)

    # Cells

    def _cell(self, row: Row, name: str) -> Cell | None:
        """A text or a conversation, checked; None if it is empty."""
        cell, here = listed(row.values[name]), f"column {name!r} in {row.place}"
        if name in ("chosen", "rejected") and isinstance(cell, Mapping):
            cell = [cell]  # LLaMA-Factory's answers are one message each
        if cell is None or cell == []:
            return None
        if not isinstance(cell, list) and (name == "messages" or not isinstance(cell, str)):
            self._refuse(f"{here} holds {cut(repr(cell), 40)} ({type(cell).__name__}), not a "
                         + ("list of messages" if name == "messages" else "text"),
                         "give a list of {role, content} messages, or a text in a column such as "
                         "'text' or 'completion'")
        self._check_kind(here, "a text" if isinstance(cell, str) else "messages")
        if isinstance(cell, str):
            return cell if cell.strip() else None
        messages = self.shapes.messages(cell, here)
        for number, message in enumerate(messages, start=1):
            self._check_message(f"message {number} of {here}", message)
        last = messages[-1]
        if name == "prompt":
            if last["role"] == "assistant":
                self._refuse(f"{here} ends in a turn of the assistant, which leaves nothing to "
                             "answer", "end it before that turn")
        elif name == "messages":
            says = [message for message in messages if message["role"] == "assistant"]
            if not says:
                self._refuse(f"{here} has no turn of the assistant, so there is nothing to learn "
                             "from it", "leave the row out")
            last = says[-1]
        elif last["role"] != "assistant":
            self._refuse(f"{here} ends in a turn of {last['role']!r}, not of the assistant",
                         "end it in the assistant's turn")
        return messages if last["content"].strip() or last.get("tool_calls") else None

    def _check_kind(self, here: str, kind: str) -> None:
        if self.source.template is not None and kind == "messages":
            self._refuse(f"{here} holds messages, but data.template works on texts",
                         "data.template=null")
        self.kind = self.kind if self.kind[0] else (kind, here)
        if self.kind[0] != kind:
            self._refuse(f"{here} holds {kind}, where {self.kind[1]} holds {self.kind[0]}",
                         "a source has either texts or lists of messages")

    def _check_message(self, here: str, message: Message) -> None:
        role, content = message["role"], message["content"]
        if role not in _ROLES or not isinstance(content, str):
            self._refuse(f"{here} has the role {cut(repr(role), 40)} and the content "
                         f"{cut(repr(content), 40)}", f"roles are {', '.join(_ROLES)}, contents "
                         "are texts")
        if role == "assistant" and is_masked(message):
            self.read.untrained += 1

    def _prompt(self, row: Row) -> Cell | None:
        cell = row.values["prompt"]
        if is_blank(cell) and isinstance(cell, str):  # the answer alone is learned
            self._check_kind(f"column 'prompt' in {row.place}", "a text")
        else:
            cell = self._cell(row, "prompt")
        if self.source.template is not None and cell is not None:
            cell = chat_text.filled(str(cell), row, self.source)
        return None if cell is None else self._turn("user", cell)

    def _turn(self, role: str, cell: Cell) -> Cell:
        return [{"role": role, "content": cell}] if (
            self.source.chat and isinstance(cell, str)) else cell

    # Examples and pairs

    def _tools(self, row: Row, cell: Cell) -> list[Any] | None:
        """The descriptions in the column ``tools``, for a conversation; None for a text."""
        return None if isinstance(cell, str) else chat_text.described_tools(
            row, "tools", self.source.where, "data.columns.tools=null")

    def _take_example(self, row: Row) -> None:
        asks = "prompt" in self.format
        prompt = self._prompt(row) if asks else None
        completion = self._cell(row, self.format[-1])
        if completion is None or (asks and prompt is None):
            self.read.empty += 1
            return
        completion = self._turn("assistant", completion)
        if isinstance(prompt, list):
            prompt = self.shapes.system_turn(row, prompt)
        elif isinstance(completion, list):
            completion = self.shapes.system_turn(row, completion)
        self.read.examples.append(
            Example(row.place, prompt, completion, self._tools(row, completion)))

    def _take_pair(self, row: Row) -> None:
        chosen, rejected = self._cell(row, "chosen"), self._cell(row, "rejected")
        cell = row.values.get("prompt")
        forms = isinstance(chosen, str) and (self.source.chat or self.source.template is not None)
        implicit = "prompt" not in self.format or _repeats(cell, chosen) or (
            is_blank(cell) and not forms and (isinstance(chosen, str) or len(chosen or ()) > 1))
        prompt: Cell | None = "" if implicit else self._prompt(row)
        margin = self._margin(row) if "margin" in row.values else 0.0
        if chosen is None or rejected is None or prompt is None:
            self.read.empty += 1
            return
        if chosen == rejected:
            self.read.identical += 1
            return
        if not implicit:
            chosen, rejected = self._turn("assistant", chosen), self._turn("assistant", rejected)
        elif isinstance(chosen, str):
            shared = shapes.shared_text(chosen, str(rejected))
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        else:
            prompt = shapes.shared_turns(chosen, list(rejected), row, self.source)
            chosen, rejected = chosen[-1:], rejected[-1:]
        if isinstance(prompt, list):
            prompt = self.shapes.system_turn(row, prompt)
        self.read.pairs.append(Pair(row.place, prompt, chosen, rejected, margin,
                                    self._tools(row, chosen)))

    def _margin(self, row: Row) -> float:
        cell = row.values["margin"]
        try:
            value = float("nan" if isinstance(cell, bool) else cell)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            self._refuse(f"column 'margin' in {row.place} holds {cut(repr(cell), 40)}, not a "
                         "finite number", "give a number in every row, or drop the column")
        return value


def _repeats(prompt: Any, chosen: Any) -> bool:
    """Whether a conversation has the prompt, a text, as one of its turns, as in UltraFeedback."""
    return isinstance(prompt, str) and isinstance(chosen, list) and any(
        message["content"].strip() == prompt.strip() for message in chosen[:-1])
