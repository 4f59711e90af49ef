"""``ppocli env and ppocli doctor``, as the shell sees it."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
