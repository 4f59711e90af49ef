"""The command line. Typer alone is imported here; each command imports what it needs.

``commands/`` holds what the shell sees of each command: its arguments, options and help.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ppocli.cli.commands import (
    completion,
    doctor,
    estimate,
    evaluate,
    export,
    generate,
    plot,
    recipes,
    report,
    runs,
    serve,
    sweep,
    train,
    validate,
    watch,
)
from ppocli.cli.output import code_of, ending, leave, set_manner, survive_any_terminal
from ppocli.version import __version__

_COMPLETING = "_PPOCLI_COMPLETE"

app = typer.Typer(
    name="ppocli", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Fine-tune language models with PPO and any Python reward function.",
    add_completion=False,  # ours knows how bash breaks words
    context_settings={"help_option_names": ["-h", "--help"]})


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ppocli {__version__}")
        raise typer.Exit()


def _show_completion(wanted: bool) -> None:
    if wanted:
        from ppocli.cli import shells

        ending(lambda: shells.show(None))


def _install_completion(wanted: bool) -> None:
    if wanted:
        from ppocli.cli import shells

        ending(lambda: shells.install(None))


@app.callback()
def _options(
        quiet: Annotated[bool, typer.Option(
            "--quiet", "-q", help="Results, warnings and errors only.")] = False,
        verbose: Annotated[bool, typer.Option(
            "--verbose", "-v", help="Errors with their tracebacks.")] = False,
        no_color: Annotated[bool, typer.Option(
            "--no-color", help="No colours (as with NO_COLOR=1).")] = False,
        version: Annotated[bool, typer.Option(
            "--version", callback=_version, is_eager=True,
            help="Print the version and exit.")] = False,
        install_completion: Annotated[bool, typer.Option(
            "--install-completion", callback=_install_completion, is_eager=True,
            help="Install completion for this shell (see: ppocli completion).")] = False,
        show_completion: Annotated[bool, typer.Option(
            "--show-completion", callback=_show_completion, is_eager=True,
            help="Print the completion script of this shell.")] = False,
        local_rank: Annotated[int | None, typer.Option(
            "--local_rank", "--local-rank", hidden=True,
            help="What DeepSpeed's launcher adds; LOCAL_RANK says the same.")] = None) -> None:
    """Options before the command."""
    set_manner(quiet=quiet, verbose=verbose, no_color=no_color)


# in the order in which --help lists them
for _module in (train, watch, evaluate, generate, export, report, plot, runs, sweep, recipes,
                serve, validate, estimate, doctor, completion):
    _module.register(app)


def main() -> None:
    """The console script."""
    survive_any_terminal()
    if _COMPLETING in os.environ:
        from typer.completion import completion_init

        # Typer wraps help at the width of a terminal; a second line would be one more offer
        os.environ.update(COLUMNS="10000", TERMINAL_WIDTH="10000")
        completion_init()  # what answers shells in Typer's way
    leave(code_of(lambda: app(prog_name="ppocli")))
