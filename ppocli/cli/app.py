"""The command line. Typer alone is imported here; each command imports what it needs."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ppocli.cli import doctor, estimate, export, output, plot, runs, serve, settings
from ppocli.cli.eval import evaluate
from ppocli.cli.generate import chat, generate
from ppocli.cli.options import WORDS, Command, HydraCommand, flag, option
from ppocli.cli.sweep_show import sweep_app
from ppocli.cli.train import resume, resume_sweep, reward_model, sft, train, train_help
from ppocli.config.text import did_you_mean
from ppocli.distributed.standard_output import put
from ppocli.distributed.torch_settings import wait_passively
from ppocli.errors import ConfigError, DiskError
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


def completion(
        shell: Annotated[str | None, typer.Argument(
            metavar="[SHELL]", autocompletion=lambda: SHELLS,
            help="bash, zsh or fish (default: the current shell).")] = None,
        install: bool = flag("Install it where the shell finds it.", "--install")) -> None:
    """Print the script that completes ppocli's commands, keys and runs after TAB.

    \b
    Examples:
      ppocli completion --install
      source <(ppocli completion bash)
      ppocli completion zsh > ~/.zfunc/_ppocli
    """
    from typer.completion import get_completion_script
    from typer.completion import install as install_script

    name = find_shell(shell)
    typers = {"prog_name": "ppocli", "complete_var": _COMPLETING, "shell": name}
    script = get_completion_script(**typers)
    if name == "bash":
        script = script.replace("    return 0\n", _BASH_HOOK).replace(
            "complete -o default", "complete -o default -o nosort")
    if not install:
        put(script)
        return
    try:
        path = install_script(**typers)[1]
        path.write_text(script + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"the completion can't be installed: {error}", where=str(Path.home()),
                        fix=f"ppocli completion {name} > FILE, and have the shell read it"
                        ) from error
    output.say(f"completion for {name} takes effect in new shells; the script:")
    put(path)


def find_shell(name: str | None = None) -> str:
    """The shell that is named, else the one that ppocli runs in, else that of ``$SHELL``.

    Raises:
        ConfigError: it isn't one that we know.
    """
    import shellingham

    shell = name
    if shell is None:
        with suppress(shellingham.ShellDetectionFailure, OSError):
            shell = str(shellingham.detect_shell()[0])
        if shell not in SHELLS:  # there is none, or a plain sh, as of a script
            shell = Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        what = f"there is no completion for {shell!r}{did_you_mean(shell, SHELLS)}" if shell \
            else "the shell could not be determined"
        raise ConfigError(what, where="SHELL",
                          fix="name one of bash, zsh, fish: ppocli completion bash")
    return shell


def print_help(words: Annotated[list[str] | None, typer.Argument(
        metavar="[COMMAND]...")] = None) -> None:
    """Print the help of ppocli or of a command."""
    app([*(words or ()), "--help"], prog_name="ppocli")


_HYDRA: dict[str, Any] = {"cls": HydraCommand, "context_settings": WORDS}
# in the order in which --help lists them
app.command(**_HYDRA, help=train_help())(train)
app.command(**_HYDRA)(sft)
app.command("reward-model", **_HYDRA)(reward_model)
app.command(**_HYDRA)(resume)
app.command(cls=Command)(runs.watch)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command("export", cls=Command)(export.export_command)
app.command(cls=Command)(runs.report)
app.command("plot", cls=Command)(plot.plot_runs)
app.command(cls=Command)(plot.compare)
app.add_typer(runs.runs_app, name="runs")
sweep_app.command("resume", cls=Command, context_settings=WORDS)(resume_sweep)
app.add_typer(sweep_app, name="sweep")
app.add_typer(settings.recipes_app, name="recipes")
app.command("serve-reward", **_HYDRA)(serve.serve_reward)
app.command("vllm-command", **_HYDRA)(serve.print_vllm_command)
app.command(**_HYDRA)(settings.validate)
app.command("schema", cls=Command)(settings.print_schema)
app.command("estimate", **_HYDRA)(estimate.print_estimate)
app.command(cls=Command)(doctor.env)
app.command(cls=Command)(doctor.doctor)
app.command(cls=Command)(completion)
app.command("help", hidden=True)(print_help)
app.command("list", hidden=True, cls=Command)(runs.print_runs)


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
