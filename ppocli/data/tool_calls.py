"""Tool calls in the form that chat templates expect. OpenAI's wire format has a call's arguments as
JSON text; templates encode arguments themselves, so a text would be encoded twice."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ppocli.data.shapes import TURN_MARKS, Message, arguments_of

T = TypeVar("T")


def with_arguments(messages: Sequence[Message], render: Callable[[list[Message]], T],
                   text_of: Callable[[T], str]) -> T:
    """The result of ``render`` for a conversation whose tool calls have mappings as arguments; for
    one with JSON texts if the template refuses mappings or prints them as Python does.

    Keys that mark turns as trained on or not are left out.

    Args:
        render: passes messages to the template; its exceptions are raised again.
        text_of: takes the text out of its result.
    """
    plain = [{name: value for name, value in message.items() if name not in TURN_MARKS}
             for message in messages]
    as_mappings = [_changed(message, _as_mapping) for message in plain]
    mappings = [function["arguments"] for function in _functions(as_mappings)
                if function.get("arguments")]
    if not mappings:
        return render(as_mappings)
    result: T | None = None
    refusal: Exception | None = None
    try:
        result = render(as_mappings)
        contents = "".join(str(message.get("content")) for message in plain)
        if not any(str(one) in text_of(result) and str(one) not in contents for one in mappings):
            return result
    except Exception as error:  # templates are programs: jinja's errors and any Python error
        refusal = error
    try:
        return render([_changed(message, _as_text) for message in plain])
    except Exception:
        if result is not None:
            return result
        raise refusal or ValueError from None


def names_of(messages: Sequence[Message]) -> list[str]:
    """The names of the tools that a conversation calls."""
    return [str(function.get("name")) for function in _functions(messages)]


def _functions(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Name and arguments of each tool call."""
    return [call.get("function", call) for message in messages
            for call in message.get("tool_calls") or ()]


def _changed(message: Message, change: Callable[[Any], Any]) -> Message:
    """The message with ``change`` applied to the arguments of its tool calls."""
    if not message.get("tool_calls"):
        return message

    def changed(call: Any) -> Any:
        if "function" in call:
            return call | {"function": changed(call["function"])}
        return call if call.get("arguments") is None else call | {
            "arguments": change(call["arguments"])}
    return message | {"tool_calls": [changed(call) for call in message["tool_calls"]]}


def _as_mapping(arguments: Any) -> Any:
    mapping = arguments_of(arguments)
    return arguments if mapping is None else mapping


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
