"""Rows in the shapes of other tools, converted to the standard columns: conversations of ShareGPT,
OpenAI and LLaMA-Factory, with calls of tools."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ppocli.config.text import cut
from ppocli.data.files import Row
from ppocli.data.sources import Source
from ppocli.errors import InputError

Message = dict[str, Any]

TURN_MARKS = ("weight", "train", "training", "train_on_turn", "loss", "loss_weight", "trainable")
"""keys of a message by which 0 or false says that it isn't trained on: OpenAI's and Mistral's
``weight``, axolotl's ``train`` and ``training``, and common values of its
``message_field_training``"""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "ai": "assistant",
          "model": "assistant", "function_call": "assistant", "observation": "tool",
          "function_response": "tool"}
"""role of ShareGPT, LangChain, Gemini or LLaMA-Factory -> role in chat templates"""
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

    def note(self, text: str) -> None:
        """Append a sentence to the notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    def conversation_column(self, values: Mapping[str, Any]) -> str | None:
        """The column of a conversation, under one of the names that other tools use."""
        for name in _CONVERSATIONS:
            if isinstance(listed(values.get(name)), list):
                self.note(f"read as conversations: the column {name}")
                return name
        return None

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
        message = {str(name): value for name, value in one.items() if value is not None
                   } if isinstance(one, Mapping) else {}
        for name, other in (("role", "from"), ("content", "value")):
            if name not in message and other in message and one.keys() & {"role", "from"}:
                message[name] = message.pop(other)
                self.note("read as ShareGPT's turns: from is the role, value the content")
        role = message.get("role")
        if role == "function_call":
            message["function_call"] = message.pop("content", None)
        if isinstance(role, str):
            message["role"] = _ROLES.get(role, role)
        if "function_call" in message and not message.get("tool_calls"):
            calls = _parsed(message["function_call"])
            message["tool_calls"] = [{"type": "function", "function": call}
                                     for call in (calls if isinstance(calls, list) else [calls])]
        if calls := listed(_parsed(message.pop("tool_calls", None))):
            message["tool_calls"] = self._checked(calls, here)
        content = listed(message.get("content", "" if calls else None))
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            if not all(isinstance(text, str) for text in texts):
                self._refuse(f"{here} has a part that is no text: {cut(repr(content), 60)}",
                             'contents are texts, or lists of {"type": "text", "text": "..."}')
            content = "".join(map(str, texts))
        if "role" not in message or content is None:
            self._refuse(f"{here} has no role and content: {cut(repr(one), 60)}",
                         'a message looks like {"role": "user", "content": "..."}, or {"from": '
                         '"human", "value": "..."}')
        return message | {"content": content}

    def _checked(self, calls: Any, here: str) -> list[Any]:
        """The tool calls, if the arguments of each are an object, possibly as JSON text."""
        calls = list(calls) if isinstance(calls, list) else [calls]
        for call in calls:
            function = call.get("function", call) if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or (
                    function.get("arguments") is not None
                    and not isinstance(_arguments(function["arguments"]), Mapping)):
                self._refuse(f"{here} has a malformed tool call: {cut(repr(call), 80)}",
                             'a call looks like {"type": "function", "function": {"name": "...", '
                             '"arguments": {...}}}')
        return calls

    def system_turn(self, row: Row, messages: list[Message]) -> list[Message]:
        """A conversation with the row's text in the column ``system`` as its first turn, unless it
        begins with a system turn itself."""
        text = row.values.get("system")
        if not isinstance(text, str) or not text.strip() or (
                messages and messages[0].get("role") in ("system", "developer")):
            return messages
        self.note("the column system is the first turn of conversations")
        return [{"role": "system", "content": text}, *messages]

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise InputError(f"{what[0].upper()}{what[1:]}.", where=self.source.where, fix=fix)


def listed(cell: Any) -> Any:
    """A cell; an array of numpy, as in pandas, becomes a list."""
    return cell.tolist() if hasattr(cell, "tolist") else cell


def is_blank(cell: Any) -> bool:
    """Whether a prompt is an empty list or a text without visible characters; null isn't blank."""
    cell = listed(cell)
    return cell == [] if isinstance(cell, list) else isinstance(cell, str) and not cell.strip()


def is_masked(message: Mapping[str, Any]) -> bool:
    """Whether a message is marked as not trained on."""
    return any(str(message.get(name)).strip().lower() in ("0", "0.0", "false")
               for name in TURN_MARKS)


def columns_like(names: Iterable[str]) -> str:
    """The settings that take prompt and completion from such columns; "" if none fit."""
    names = list(names)
    asks, says = (next((name for name in likely if name in names), None)
                  for likely in (_QUESTIONS, _ANSWERS))
    if not asks or not says:
        return ""
    more = " 'data.template=\"{prompt}\\n{input}\"'" if asks == "instruction" and (
        "input" in names) else ""  # Alpaca's
    return f"data.columns.prompt={asks} data.columns.completion={says}{more}"


def _parsed(value: Any) -> Any:
    """The value of a JSON text; other values, and texts that are no JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


# Calls of tools -----------------------------------------------------------------------------------

def render(messages: Sequence[Message], template: Callable[[list[Message]], str]) -> str:
    """A conversation rendered by a chat template, without the keys that mark turns as trained on or
    not.

    OpenAI's wire format has a call's arguments as JSON text; most templates encode arguments
    themselves, so they get mappings. A template that refuses mappings, or prints them as Python
    does, gets the texts.
    """
    plain = [{name: value for name, value in message.items() if name not in TURN_MARKS}
             for message in messages]
    as_mappings = [_with_arguments(message, _arguments) for message in plain]
    mappings = [arguments for message in as_mappings for call in message.get("tool_calls") or ()
                if (arguments := call.get("function", call).get("arguments"))]
    try:
        text = template(as_mappings)
    except Exception:  # templates are programs: jinja's errors and any Python error
        if not mappings:
            raise
        return template([_with_arguments(message, _as_text) for message in plain])
    contents = "".join(str(message.get("content")) for message in plain)
    if any(str(one) in text and str(one) not in contents for one in mappings):
        return template([_with_arguments(message, _as_text) for message in plain])
    return text


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """The message with ``change`` applied to the arguments of its tool calls."""
    if not message.get("tool_calls"):
        return message

    def changed(call: Any) -> Any:
        if "function" in call:
            return call | {"function": changed(call["function"])}
        return call if call.get("arguments") is None else call | {
            "arguments": change(call["arguments"])}
    return message | {"tool_calls": [changed(call) for call in message["tool_calls"]]}


def _arguments(value: Any) -> Any:
    """Arguments of a call as a mapping, if they are one or its JSON; else unchanged."""
    return _parsed(value) if str(value).strip() else {}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


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
    prompt is made of the turns of ``messages`` before the assistant's last, or of the common
    beginning of ``chosen`` and ``rejected``.

    Raises:
        InputError: ``messages`` has no turn before the assistant's last, two conversations have no
            common prompt, or as of :class:`Shapes`.
    """
    values = row.values
    pairs = {"chosen", "rejected"} <= values.keys()
    if source.column in values and not (
            pairs and source.column == "prompt" and is_blank(values["prompt"])):
        cell = listed(values[source.column])
        if not isinstance(cell, list) or not cell or not all(
                isinstance(one, Mapping) for one in cell):
            return row
        return replace(row, values=values | {source.column: shapes.messages(
            cell, f"column {source.column!r} in {row.place}")})
    if source.column != "prompt":
        return row
    chosen, rejected = (listed(values.get(name)) for name in ("chosen", "rejected"))
    whole_pairs = pairs and isinstance(chosen, list) and len(chosen) != 1
    column = "messages" if "messages" in values or whole_pairs else (
        shapes.conversation_column(values))
    if column is not None and isinstance(cell := listed(values.get(column)), list):
        messages = shapes.messages(cell, f"column {column!r} in {row.place}")
        says = [] if pairs else [
            i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not (prompt := messages[:says[-1]] if says else messages):
            raise InputError(f"Column {column!r} in {row.place} has no turn before an answer of "
                             "the assistant, so there is no prompt.", where=source.where,
                             fix="begin it with a turn of the user, or leave the row out")
        return replace(row, values=values | {"prompt": prompt})
    if isinstance(chosen, str) and isinstance(rejected, str):
        return replace(row, values=values | {"prompt": chosen[:shared_text(chosen, rejected)]})
    if isinstance(chosen, list) and isinstance(rejected, list):
        one, other = (shapes.messages(cell, f"column {name!r} in {row.place}") for name, cell in (
            ("chosen", chosen), ("rejected", rejected)))
        return replace(row, values=values | {"prompt": shared_turns(one, other, row, source)})
    return row


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
