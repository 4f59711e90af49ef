"""Rows out of a JSON document that is one object: a row, columns, or rows under a key."""

from typing import Any

ROW_COLUMNS = frozenset({"prompt", "completion", "text", "messages", "conversations", "chosen",
                         "rejected", "instruction", "input", "output", "question", "answer"})
"""names of columns by which an object counts as one row, besides the column that is read"""


def object_rows(content: dict[str, Any], column: str) -> list[Any] | None:
    """The rows that a JSON object holds; None where it is a row itself.

    Read are what pandas' ``to_json`` writes (by columns, ``orient="index"``, ``"list"``,
    ``"split"`` and ``"table"``) and a list of objects under any key, such as ``{"data": [...]}``.

    Args:
        column: the column that a row must have.

    Raises:
        ValueError: lists of objects under several keys; the message names them.
    """
    names = ROW_COLUMNS | {column}
    values = list(content.values())
    if {"columns", "data"} <= content.keys() <= {"columns", "index", "data"}:
        return _split_rows(content["columns"], content["data"])
    if values and all(isinstance(value, dict) for value in values):
        return _nested_rows(content, names)
    if len(content) == 1 or names.isdisjoint(content):
        lists = [key for key, value in content.items() if _is_record_list(value)]
        if len(lists) > 1:
            raise ValueError(", ".join(lists))
        if lists:
            return list(content[lists[0]])
    if values and all(isinstance(value, list) and len(value) == len(values[0])
                      and not is_conversation(value) for value in values):
        return [dict(zip(content, cells, strict=True)) for cells in zip(*values, strict=True)]
    return None


def _split_rows(columns: Any, data: Any) -> list[Any] | None:
    fits = isinstance(columns, list) and isinstance(data, list) and all(
        isinstance(name, str) for name in columns) and all(
        isinstance(row, list) and len(row) == len(columns) for row in data)
    return [dict(zip(columns, row, strict=True)) for row in data] if fits else None


def _nested_rows(content: dict[str, dict[str, Any]], names: frozenset[str]) -> list[Any] | None:
    """Objects in an object: columns with a cell for each label, or rows by label."""
    labels = next(iter(content.values())).keys()
    aligned = all(column.keys() == labels for column in content.values())
    if aligned and labels and (all(label.isdecimal() for label in labels)
                               or not names.isdisjoint(content)):
        return [{name: column[label] for name, column in content.items()} for label in labels]
    if names.isdisjoint(content) and (all(label.isdecimal() for label in content)
                                      or any(names & row.keys() for row in content.values())):
        return list(content.values())
    return None


def _is_record_list(value: Any) -> bool:
    return (isinstance(value, list) and bool(value) and not is_conversation(value)
            and all(isinstance(item, dict) for item in value))


def is_conversation(value: Any) -> bool:
    """Whether a cell is a list of messages with a role each (``from`` in ShareGPT's form)."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(item, dict) and isinstance(item.get("role", item.get("from")), str)
        for item in value)
