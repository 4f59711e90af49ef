"""Prompts of rows that have no column of that name: what is before an answer."""

from typing import Any

from ppocli.data.files import Row
from ppocli.data.sources import Source
from ppocli.errors import InputError


def with_prompt(row: Row, source: Source) -> Row:
    """``row`` with a cell ``prompt``, if it has none and that is the column asked for: the turns of
    ``messages`` before the assistant's last, or what ``chosen`` and ``rejected`` begin with.

    Raises:
        InputError: two conversations have no prompt in common.
    """
    values = row.values
    if source.column != "prompt" or "prompt" in values:
        return row
    if isinstance(messages := values.get("messages"), list):
        says = [i for i, message in enumerate(messages)
                if isinstance(message, dict) and message.get("role") == "assistant"]
        return Row(row.place, values | {"prompt": messages[:says[-1]] if says else messages})
    chosen, rejected = values.get("chosen"), values.get("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return Row(row.place, values | {"prompt": chosen[:shared_text(chosen, rejected)]})
    if isinstance(chosen, list) and isinstance(rejected, list):
        return Row(row.place, values | {"prompt": shared_turns(chosen, rejected, row, source)})
    return row


def shared_turns(one: list[Any], other: list[Any], row: Row, source: Source) -> list[Any]:
    """All turns of two conversations but their last.

    Raises:
        InputError: there are none, or they differ.
    """
    if one[:-1] != other[:-1] or len(one) < 2:
        raise InputError(f"The conversations in {row.place} have no prompt in common: all turns "
                         "but the last must be there and be the same.", where=source.where,
                         fix="give the prompt in a column 'prompt'")
    return one[:-1]


def shared_text(one: str, other: str) -> int:
    """Characters that two texts share in front, cut back to a place where both go on with white
    space, so that no word is in two parts and neither rest is empty."""
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
               min(len(one), len(other)))
    while end and not (one[end:end + 1].isspace() and other[end:end + 1].isspace()):
        end -= 1
    return len(one[:end].rstrip())
