"""Records whose fields are columns, one value a row each: some of their rows; several as one."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def rows_of(record: T, index: Any) -> T:
    """The rows of a record, or of a mapping, at ``index`` (a slice, or a list or a tensor of
    places): those of its tensors, lists and mappings, and of the records in it. A column of
    another kind, such as a tuple, describes the whole record and stays as it is."""
    def select(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: select(part) for name, part in value.items()}
        if isinstance(value, list) and not isinstance(index, slice):
            return [value[i] for i in index] if value else []
        if isinstance(value, list | torch.Tensor):
            return value[index]
        return value.rows(index) if hasattr(value, "rows") else value

    return select(record) if isinstance(record, dict) else type(record)(
        *map(select, _columns(record)))


def joined(parts: Sequence[T]) -> T:
    """Records concatenated along their rows, [B, X] tensors padded with zeros on the right to the
    widest. Columns that describe a whole record are the first one's."""
    return type(parts[0])(*(_concat_column(list(values))
                            for values in zip(*map(_columns, parts), strict=True)))


def _concat_column(values: list[Any]) -> Any:
    """One column of several records; records in it join themselves, if they are of rows."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _concat_column([value[name] for value in values]) for name in first}
    if isinstance(first, list):
        return list(chain.from_iterable(values))
    if not isinstance(first, torch.Tensor):
        return first.joined(values) if hasattr(first, "joined") else first
    if first.dim() == 1:
        return torch.cat(values)
    width = max(value.shape[1] for value in values)
    return torch.cat([torch.nn.functional.pad(value, (0, width - value.shape[1]))
                      for value in values])


def _columns(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]
