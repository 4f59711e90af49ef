"""How a configuration key is declared: its default, its meaning and the values it may have."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(default: Any, doc: str, *, choices: tuple[str, ...] | None = None, ge: float | None = None,
        gt: float | None = None, le: float | None = None, lt: float | None = None,
        each: type | None = None, import_path: bool = False) -> Any:
    """A dataclass field with its documentation and its allowed values.

    Bounds are inclusive (``ge``, ``le``) or exclusive (``gt``, ``lt``); for a list they hold for
    each element. ``None`` is allowed exactly where the type is ``Optional``.

    Args:
        each: type of a value that may be one or a list of several, which OmegaConf's own types
            can't say: the field's type is then ``Any``, and null is allowed.
        import_path: beside the ``choices``, an import path names something of the user's own.
    """
    metadata = {"doc": doc, "choices": choices, "ge": ge, "gt": gt, "le": le, "lt": lt,
                "each": each, "import_path": import_path}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
