"""The command line. Typer alone is imported here; each command imports what it needs."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ppocli.cli.chat import chat
from ppocli.cli.compare import print_comparison
from ppocli.cli.completion import completion
from ppocli.cli.doctor import doctor, env
from ppocli.cli.estimate import print_estimate
from ppocli.cli.eval import evaluate
from ppocli.cli.export import export_command
from ppocli.cli.generate import generate
from ppocli.cli.options import WORDS, Command, HydraCommand
from ppocli.cli.output import code_of, ending, leave, set_manner, survive_any_terminal
from ppocli.cli.plot import plot_runs
from ppocli.cli.recipes import recipes_app
from ppocli.cli.report import report
from ppocli.cli.runs import runs_app
from ppocli.cli.schema import print_schema
from ppocli.cli.serve import serve_reward
from ppocli.cli.sweep_show import sweep_app
from ppocli.cli.train import resume, train, train_help
from ppocli.cli.validate import validate
from ppocli.cli.watch import watch
from ppocli.version import __version__

_COMPLETING = "_PPOCLI_COMPLETE"

app = typer.Typer(
    name="ppocli", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Fine-tune language models with PPO and any Python reward function.",
    add_completion=False,  # `ppocli completion` has a script for bash that knows KEY=VALUE
    context_settings={"help_option_names": ["-h", "--help"]})


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ppocli {__version__}")
        raise typer.Exit()


def _show_completion(wanted: bool) -> None:
    if wanted:
        ending(lambda: completion(None))


def _install_completion(wanted: bool) -> None:
    if wanted:
        ending(lambda: completion(None, install=True))


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


_HYDRA: dict[str, Any] = {"cls": HydraCommand, "context_settings": WORDS}
# in the order in which --help lists them
app.command(**_HYDRA, help=train_help())(train)
app.command(**_HYDRA)(resume)
app.command(cls=Command)(watch)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command("export", cls=Command)(export_command)
app.command(cls=Command)(report)
app.command("plot", cls=Command)(plot_runs)
app.command("compare", cls=Command)(print_comparison)
app.add_typer(runs_app, name="runs")
app.add_typer(sweep_app, name="sweep")
app.add_typer(recipes_app, name="recipes")
app.command("serve-reward", **_HYDRA)(serve_reward)
app.command(**_HYDRA)(validate)
app.command("schema", cls=Command)(print_schema)
app.command("estimate", **_HYDRA)(print_estimate)
app.command(cls=Command)(env)
app.command(cls=Command)(doctor)
app.command(cls=Command)(completion)


def main() -> None:
    """The console script."""
    survive_any_terminal()
    if _COMPLETING in os.environ:
        from typer.completion import completion_init

        # Typer wraps help at the width of a terminal; a second line would be one more offer
        os.environ.update(COLUMNS="10000", TERMINAL_WIDTH="10000")
        completion_init()  # what answers shells in Typer's way
    leave(code_of(lambda: app(prog_name="ppocli")))
