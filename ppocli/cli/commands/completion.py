"""``ppocli completion``, as the shell sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(completion)


def _shells() -> list[str]:
    return ["bash", "zsh", "fish"]


def completion(
        shell: Annotated[str | None, typer.Argument(
            metavar="[SHELL]", autocompletion=_shells, show_default=False,
            help="bash, zsh or fish (default: the one that this runs in).")] = None,
        install: Annotated[bool, typer.Option(
            "--install", help="Put it where the shell finds it.")] = False) -> None:
    """Print the script that completes ppocli's commands, keys and runs after TAB.

    \b
    Examples:
      ppocli completion --install
      source <(ppocli completion bash)
      ppocli completion zsh > ~/.zfunc/_ppocli
    """
    from ppocli.cli import shells

    ending(lambda: shells.install(shell) if install else shells.show(shell))
