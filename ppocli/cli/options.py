"""Arguments and options that several commands share. Only Typer is imported here."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.completion import complete_run, complete_word

WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""context settings of commands that take words with leading dashes for Hydra"""


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    return complete_word(list(ctx.params.get("overrides") or []), incomplete)


Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="[WORDS]...", autocompletion=_complete, show_default=False,
    help="Settings KEY=VALUE, +recipe=NAME, and Hydra's options.")]

Run = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=complete_run, show_default=False,
    help="A run's folder or name, a checkpoint, a model folder, or a Hub name "
         "(default: the newest run below runs/).")]

RunFolder = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=complete_run, show_default=False,
    help="A run's folder or name (default: the newest run below runs/).")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
