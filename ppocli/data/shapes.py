"""Rows in the shapes of other tools, converted to the standard columns: conversations of ShareGPT,
OpenAI and LLaMA-Factory, and Alpaca's instructions."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ppocli.config.text import cut, pasted
from ppocli.data.files import Row
from ppocli.data.sources import Source
from ppocli.errors import InputError

Message = dict[str, Any]

TURN_MARKS = ("weight", "train", "training", "train_on_turn", "loss", "loss_weight", "trainable")
"""keys of a message that say whether it is trained on: OpenAI's and Mistral's ``weight``, axolotl's
``train`` and ``training``, and common values of its ``message_field_training``"""
_PART_MARKS = ("train_detail", "training_detail")
_OFF, _ON = ("0", "0.0", "false"), ("1", "1.0", "true")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "ai": "assistant",
          "model": "assistant", "function_call": "assistant", "observation": "tool",
          "function_response": "tool"}
"""role of ShareGPT, LangChain, Gemini or LLaMA-Factory -> role in chat templates"""
_ROLES_READ = "roles that are read as others: "
_CONVERSATIONS = ("conversations", "conversation", "dialogue", "dialog", "chat")
_QUESTIONS = ("instruction", "question", "query", "problem", "input", "article", "document")
_ANSWERS = ("output", "answer", "response", "completion", "solution", "target", "summary")


class Shapes:
    """Converts the rows of one source, and notes each shape once.

    Args:
        source: of the rows; has the keys for errors.
        notes: sentences about recognised shapes are appended here.
    """

    def __init__(self, source: Source, notes: list[str]) -> None:
        self.source, self.notes = source, notes
        self.roles: dict[str, str] = {}  # roles of other tools in the rows so far

    def note(self, text: str) -> None:
        """Append a sentence to the notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _note_role(self, role: str) -> None:
        if role not in self.roles:
            self.roles[role] = _ROLES[role]
            self.notes[:] = [note for note in self.notes if not note.startswith(_ROLES_READ)]
            self.notes.append(_ROLES_READ + ", ".join(
                f"{name} as {standard}" for name, standard in self.roles.items()))

    def recognised(self, values: Mapping[str, Any], *, pairs: bool = False, alpaca: bool = True
                   ) -> dict[str, str]:
        """Standard column -> the row's column that takes its place: ``messages`` (for pairs:
        ``prompt``) for a conversation, ``prompt`` and ``completion`` for Alpaca's columns.

        Args:
            alpaca: look for Alpaca's columns too.

        Raises:
            InputError: Alpaca's columns, without ``chat`` or ``template``.
        """
        answer = listed(values.get("chosen"))
        if pairs and isinstance(answer, list) and len(answer) != 1:
            return {}  # whole conversations, which contain their prompt
        talk = next((name for name in _CONVERSATIONS if isinstance(listed(values.get(name)), list)),
                    None)
        if talk is not None:
            self.note(f"read as conversations: the column {talk}")
            return {"prompt" if pairs else "messages": talk}
        if alpaca and isinstance(values.get("instruction"), str) and (
                isinstance(answer, str) if pairs else {"input", "output"} & values.keys()):
            key = self.source.key
            if not self.source.chat and self.source.template is None:
                raise InputError(
                    "The rows have Alpaca's columns (instruction, input, output), and their form "
                    "for the model isn't set.", where=self.source.where,
                    fix=f"{key}.chat=true makes them turns of the chat template; " + pasted(
                        f'{key}.template="### Instruction:\\n{{prompt}}\\n\\n### Response:\\n"')
                    + " makes them a text")
            learns = "output" in values and not pairs and self.source.noun != "prompt"
            self.note("read as Alpaca's rows: the prompt is instruction and, in a new line, input"
                      + ", the completion is output" * learns)
            return {"prompt": "instruction"} | ({"completion": "output"} if learns else {})
        return {}

    def messages(self, cell: Any, here: str) -> list[Message]:
        """A conversation as messages with a role and a content each, without null values.

        ShareGPT's ``from`` and ``value`` become role and content, parts that are texts one text,
        and ``function_call`` becomes ``tool_calls``. A turn that only calls tools gets the content
        "".

        Args:
            here: the cell, for errors.

        Raises:
            InputError: a message without role or content, with a content other than text, or with
                a tool call whose arguments are no JSON object.
        """
        legacy = False  # an answer to a function_call has the role "function"
        messages: list[Message] = []
        for number, one in enumerate(listed(cell), start=1):
            message = self._message(one, f"message {number} of {here}")
            legacy = legacy or message.pop("function_call", None) is not None
            if legacy and message["role"] == "function":
                message["role"] = "tool"
            messages.append(message)
        return messages

    def _message(self, one: Any, here: str) -> Message:
        if not isinstance(one, Mapping):
            self._no_message(one, here)
        message = {str(name): value for name, value in one.items() if value is not None}
        for name, other in (("role", "from"), ("content", "value")):
            if name not in message and other in message and one.keys() & {"role", "from"}:
                message[name] = message.pop(other)
                self.note("read as ShareGPT's turns: from is the role, value the content")
        role = message.get("role")
        if role == "function_call":
            message["function_call"] = message.pop("content", None)
        if isinstance(role, str) and role in _ROLES:
            message["role"] = _ROLES[role]
            self._note_role(role)
        if "function_call" in message and not message.get("tool_calls"):
            self.note("function_call is read as tool_calls, the answer to it as a turn of the tool")
            calls = _parsed(message["function_call"])
            message["tool_calls"] = [{"type": "function", "function": call}
                                     for call in (calls if isinstance(calls, list) else [calls])]
        if "tool_calls" in message:
            calls = listed(_parsed(message.pop("tool_calls")))
            calls = [calls] if isinstance(calls, Mapping) else calls
            if calls:
                message["tool_calls"] = self._checked(calls, here)
        content = listed(message.get("content", "" if "tool_calls" in message else None))
        if "role" not in message or content is None:
            self._no_message(one, here)
        if isinstance(content, list):
            content = "".join(self._part(part, here) for part in content)
            self.note("contents that are lists of parts are read as one text")
        return message | {"content": content}

    def _no_message(self, one: Any, here: str) -> NoReturn:
        self._refuse(f"{here} has no role and content: {cut(repr(one), 60)}",
                     'a message looks like {"role": "user", "content": "..."}, or {"from": '
                     '"human", "value": "..."}')

    def _part(self, part: Any, here: str) -> str:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            return text
        kind = part.get("type") if isinstance(part, Mapping) else None
        self._refuse(f"{here} has a part that is no text: {cut(repr(kind or part), 60)}",
                     'contents are texts, or lists of {"type": "text", "text": "..."}')

    def _checked(self, calls: Any, here: str) -> list[Any]:
        """The tool calls, if the arguments of each are an object, possibly as JSON text."""
        for call in calls if isinstance(calls, list) else [calls]:
            inner = call.get("function", call) if isinstance(call, Mapping) else None
            if not isinstance(inner, Mapping):
                self._refuse(f"{here} has a malformed tool call: {cut(repr(call), 60)}",
                             'a call looks like {"type": "function", "function": {"name": "...", '
                             '"arguments": {...}}}')
            arguments = inner.get("arguments")
            if arguments is not None and arguments_of(arguments) is None:
                self._refuse(f"{here} calls {inner.get('name')!r} with arguments that are no JSON "
                             f"object: {cut(repr(arguments), 60)}", 'arguments look like {"place": '
                             '"Oslo"}, as an object or in JSON')
        return list(calls)

    def system_turn(self, row: Row, messages: list[Message]) -> list[Message]:
        """A conversation with the row's text in the column ``system`` as its first turn, unless it
        begins with a system turn itself."""
        text = row.values.get("system")
        if not isinstance(text, str) or not text.strip():
            return messages
        if messages and messages[0].get("role") in ("system", "developer"):
            if messages[0].get("content") != text:
                self.note("conversations that begin with a system turn keep it: the column system "
                          "is left out there")
            return messages
        self.note("the column system is the first turn of conversations")
        return [{"role": "system", "content": text}, *messages]

    def is_trained(self, message: Mapping[str, Any], here: str) -> bool | None:
        """Whether a message is marked as trained on; None if it has no mark.

        Raises:
            InputError: the mark is neither true nor false.
        """
        for name in _PART_MARKS:
            if message.get(name):
                self._refuse(f"{here} marks parts of its text with {name!r}, and only whole turns "
                             "can be left untrained", f"leave {name!r} out, or split the turn up")
        marks = {name: str(message[name]).strip().lower() for name in TURN_MARKS
                 if message.get(name) is not None}
        for name, mark in marks.items():
            if mark not in (*_OFF, *_ON):
                self._refuse(f"{here} has the {name} {cut(repr(message[name]), 40)}",
                             "a turn is trained on or not: 0 or 1, false or true")
        for name, value in message.items():
            if isinstance(value, bool) and name not in TURN_MARKS:
                self.note(f"the key {name!r} of messages doesn't say what is trained on; keys that "
                          f"do are {', '.join(TURN_MARKS)}")
        return not is_masked(message) if marks else None

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise InputError(f"{what[0].upper()}{what[1:]}.", where=self.source.where, fix=fix)


def listed(cell: Any) -> Any:
    """A cell; an array of numpy, as in pandas, becomes a list."""
    return cell.tolist() if hasattr(cell, "tolist") else cell


def is_conversation(cell: Any) -> bool:
    """Whether a cell is a list of messages with a role each (``from`` in ShareGPT's form)."""
    return isinstance(cell, list) and bool(cell) and all(
        isinstance(one, dict) and isinstance(one.get("role", one.get("from")), str)
        for one in cell)


def is_blank(cell: Any) -> bool:
    """Whether a prompt is an empty list or a text without visible characters; null isn't blank."""
    cell = listed(cell)
    return cell == [] if isinstance(cell, list) else isinstance(cell, str) and not cell.strip()


def is_masked(message: Mapping[str, Any]) -> bool:
    """Whether a message is marked as not trained on."""
    return any(str(message.get(name)).strip().lower() in _OFF for name in TURN_MARKS)


def alpaca_prompt(values: Mapping[str, Any]) -> str:
    """The instruction and, if there is one, the input on a new line."""
    added = values.get("input")
    return str(values["instruction"]) + (
        f"\n{added}" if isinstance(added, str) and added.strip() else "")


def columns_like(names: Iterable[str]) -> str:
    """The settings that take prompt and completion from such columns; "" if none fit."""
    names = list(names)
    asks, says = (next((name for name in likely if name in names), None)
                  for likely in (_QUESTIONS, _ANSWERS))
    return f"data.columns.prompt={asks} data.columns.completion={says}" if asks and says else ""


def arguments_of(value: Any) -> dict[str, Any] | None:
    """Arguments of a tool call as a mapping; None if they are neither an object nor its JSON."""
    value = _parsed(value) if str(value).strip() else {}
    return dict(value) if isinstance(value, Mapping) else None


def _parsed(value: Any) -> Any:
    """The value of a JSON text; other values, and texts that are no JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


# Rows without a prompt ----------------------------------------------------------------------------

_ANSWER_MARKS = (re.compile(
    r"(?:^|\n)[ \t#*]*(?i:assistant|ai|bot|chatbot|gpt|chatgpt)[ \t]*:[*]*|(?:^|\s)ASSISTANT:|"
    r"<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n|"
    r"<\|assistant\|>\n?|<start_of_turn>model\n|\[/INST\]"), re.compile(
    r"(?:^|\n)[ \t#*]*(?i:answer|response|tl;dr)[ \t]*:[*]*|(?s:(?:^|\n)Q:.*?\nA:)|"
    r"(?:^|\n)#+[ \t]*(?i:assistant|response|answer|output)[ \t]*\n"))
"""marks in front of an answer, in plain text and in the forms of chat templates. The second
pattern, which an answer may contain too, is used if the first doesn't match"""


def with_prompt(row: Row, source: Source, shapes: Shapes) -> Row:
    """``row`` with its prompt in ``source.column``, converted by :meth:`Shapes.messages` if it is a
    conversation. If the column is ``prompt`` and the row has none (for pairs: or an empty one), the
    prompt is made of the turns of ``messages`` before the assistant's last, the common beginning of
    ``chosen`` and ``rejected``, or Alpaca's instruction.

    Raises:
        InputError: ``messages`` has no turn before the assistant's last, two conversations have no
            common prompt, or as of :class:`Shapes`.
    """
    values = row.values
    pairs = {"chosen", "rejected"} <= values.keys()
    if source.column in values and not (
            pairs and source.column == "prompt" and is_blank(values["prompt"])):
        return _with_messages(row, source.column, shapes)
    if source.column != "prompt":
        return row
    if "messages" not in values and (names := shapes.recognised(values, pairs=pairs)):
        name, column = next(iter(names.items()))
        row = replace(row, values=values | {name: alpaca_prompt(values) if column == "instruction"
                                       else values[column]})
        if name == "prompt":
            return _with_messages(row, "prompt", shapes)
    if isinstance(listed(row.values.get("messages")), list):
        row = _with_messages(row, "messages", shapes)
        messages = row.values["messages"]
        says = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not (prompt := messages[:says[-1]] if says else messages):
            raise InputError(f"Column 'messages' in {row.place} has no turn before an answer of "
                             "the assistant, so there is no prompt.", where=source.where,
                             fix="begin it with a turn of the user, or leave the row out")
        return replace(row, values=values | {"prompt": prompt})
    chosen, rejected = (listed(values.get(name)) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        return replace(row, values=values | {"prompt": chosen[:shared_text(chosen, rejected)]})
    if isinstance(chosen, list) and isinstance(rejected, list):
        one, other = (shapes.messages(cell, f"column {name!r} in {row.place}") for name, cell in (
            ("chosen", chosen), ("rejected", rejected)))
        return replace(row, values=values | {"prompt": shared_turns(one, other, row, source)})
    return row


def _with_messages(row: Row, column: str, shapes: Shapes) -> Row:
    cell = listed(row.values[column])
    if not isinstance(cell, list) or not cell or not all(isinstance(one, Mapping) for one in cell):
        return row
    return replace(row, values=row.values | {
        column: shapes.messages(cell, f"column {column!r} in {row.place}")})


def shared_turns(one: list[Any], other: list[Any], row: Row, source: Source) -> list[Any]:
    """All turns but the last, which two conversations share.

    Raises:
        InputError: there are no such turns, or they differ.
    """
    if one[:-1] != other[:-1] or len(one) < 2:
        raise InputError(f"The conversations in {row.place} have no prompt in common: all turns "
                         "but the last must be the same, and there must be one.",
                         where=source.where, fix="give the prompt in a column 'prompt'")
    return one[:-1]


def shared_text(one: str, other: str) -> int:
    """The number of characters in the prompt with which two texts begin: through the last common
    mark of an answer, such as ``Assistant:``, so that the prompt contains no part of an answer.
    Without a mark, the common beginning, cut back to white space in both, so that no word is split
    and neither rest is empty."""
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
               min(len(one), len(other)))
    for marks in _ANSWER_MARKS:
        ends = [mark.end() for mark in marks.finditer(one, 0, end)]
        if ends and one[ends[-1]:].strip() and other[ends[-1]:].strip():
            return ends[-1]
    while end and not (one[end:end + 1].isspace() and other[end:end + 1].isspace()):
        end -= 1
    return len(one[:end].rstrip())
