"""The command line. Typer alone is imported here; each command imports what it needs.

``commands/`` holds what the shell sees of each command: its arguments, options and help.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.commands import (
    doctor,
    evaluate,
    export,
    generate,
    plot,
    recipes,
    report,
    runs,
    sweep,
    train,
    validate,
    watch,
)
from ppocli.cli.output import code_of, leave, survive_any_terminal
from ppocli.version import __version__

app = typer.Typer(
    name="ppocli", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Fine-tune language models with PPO and any Python reward function.",
    context_settings={"help_option_names": ["-h", "--help"]})


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ppocli {__version__}")
        raise typer.Exit()


@app.callback()
def _options(version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False
        ) -> None:
    """Options before the command."""


# in the order in which --help lists them
for _module in (train, watch, evaluate, generate, export, report, plot, runs, sweep, recipes,
                validate, doctor):
    _module.register(app)


def main() -> None:
    """The console script."""
    survive_any_terminal()
    leave(code_of(lambda: app(prog_name="ppocli")))
