"""Some rows of a record whose fields are columns, one value a row each."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch


def rows_of(record: Any, index: Any) -> Iterator[Any]:
    """The fields of a record of samples, of those at ``index`` (a slice, or a list or a tensor of
    places) alone: of its tensors, lists and mappings, and of the records in it. What is of another
    kind, as a tuple is, says something of the whole and stays."""
    def some(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: some(part) for name, part in value.items()}
        if isinstance(value, list) and not isinstance(index, slice):
            return [value[i] for i in index] if value else []
        if isinstance(value, list | torch.Tensor):
            return value[index]
        return value.rows(index) if hasattr(value, "rows") else value

    return (some(getattr(record, f.name)) for f in fields(record))
