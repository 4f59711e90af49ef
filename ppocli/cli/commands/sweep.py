"""``ppocli sweep``, as the shell sees it."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
