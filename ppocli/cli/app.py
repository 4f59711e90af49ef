"""The command line. Typer alone is imported here; each command imports what it needs."""

import os
from typing import Annotated, Any, Literal

import typer

from ppocli.cli import about, estimate, output, results, runs, serve
from ppocli.cli.chat import chat
from ppocli.cli.eval import evaluate
from ppocli.cli.generate import generate
from ppocli.cli.options import WORDS, Command, flag, option
from ppocli.cli.sweep_show import sweep_app
from ppocli.cli.train import resume, resume_sweep, reward_model, sft, train, train_help, validate
from ppocli.distributed.standard_output import put
from ppocli.distributed.torch_settings import wait_passively
from ppocli.version import __version__

_COMPLETING = "_PPOCLI_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
# bash keeps a colon before the cursor; a value follows KEY= at once
_BASH_HOOK = """\
    [[ ${COMP_WORDS[COMP_CWORD]} == : ]] && COMPREPLY=("${COMPREPLY[@]#:}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
"""

app = typer.Typer(
    name="ppocli", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Fine-tune language models with PPO and any Python reward function.",
    add_completion=False,  # `ppocli completion` has a script for bash that knows KEY=VALUE
    context_settings={"help_option_names": ["-h", "--help"]})


def _version(requested: bool) -> None:
    if requested:
        put(f"ppocli {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
        quiet: bool = flag("Results, warnings and errors only.", "--quiet", "-q"),
        verbose: bool = flag("Errors with their tracebacks.", "--verbose", "-v"),
        no_color: bool = flag("No colours (as with NO_COLOR=1).", "--no-color"),
        version: bool = flag(
            "Print the version and exit.", "--version", callback=_version, is_eager=True),
        local_rank: int | None = option("N", "What DeepSpeed's launcher adds; LOCAL_RANK says the "
            "same.", "--local_rank", "--local-rank", hidden=True)) -> None:
    """Options before the command."""
    output.set_manner(quiet=quiet, verbose=verbose, no_color=no_color)


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(
        metavar="SHELL", autocompletion=lambda: SHELLS, help="bash, zsh or fish.")]) -> None:
    """Print the script that completes ppocli's commands, keys and runs after TAB.

    \b
    Examples:
      echo 'source <(ppocli completion bash)' >> ~/.bashrc
      ppocli completion zsh > ~/.zfunc/_ppocli
      ppocli completion fish > ~/.config/fish/completions/ppocli.fish
    """
    from typer.completion import get_completion_script

    script = get_completion_script(prog_name="ppocli", complete_var=_COMPLETING, shell=shell)
    if shell == "bash":
        script = script.replace("    return 0\n", _BASH_HOOK).replace(
            "complete -o default", "complete -o default -o nosort")
    put(script)


_HYDRA: dict[str, Any] = {"cls": Command, "context_settings": WORDS}
# in the order in which --help lists them
app.command(**_HYDRA, help=train_help())(train)
app.command(**_HYDRA)(sft)
app.command("reward-model", **_HYDRA)(reward_model)
app.command(**_HYDRA)(resume)
app.command(cls=Command)(runs.watch)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command("export", cls=Command)(results.export_command)
app.command(cls=Command)(runs.report)
app.command("plot", cls=Command)(results.plot_runs)
app.command(cls=Command)(results.compare)
app.add_typer(runs.runs_app, name="runs")
sweep_app.command("resume", cls=Command, context_settings=WORDS)(resume_sweep)
app.add_typer(sweep_app, name="sweep")
app.add_typer(about.recipes_app, name="recipes")
app.command("serve-reward", **_HYDRA)(serve.serve_reward)
app.command("vllm-command", **_HYDRA)(serve.print_vllm_command)
app.command(**_HYDRA)(validate)
app.command("schema", cls=Command)(about.print_schema)
app.command("estimate", **_HYDRA)(estimate.print_estimate)
app.command(cls=Command)(about.env)
app.command(cls=Command)(about.doctor)
app.command(cls=Command)(completion)


def main() -> None:
    """The console script."""
    output.survive_any_terminal()
    wait_passively()
    if _COMPLETING in os.environ:
        from typer.completion import completion_init

        # Typer wraps help at the width of a terminal; a second line would be one more offer
        os.environ.update(COLUMNS="10000", TERMINAL_WIDTH="10000")
        completion_init()  # what answers shells in Typer's way
    output.leave(output.code_of(lambda: app(prog_name="ppocli")))
