"""Arguments, options and classes that several commands share. Only Typer is imported here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ppocli.cli.completion import HYDRA_FLAGS, complete_run, complete_setting, complete_target
from ppocli.cli.output import ending

WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""context settings of commands that take words with leading dashes for Hydra"""


class Command(TyperCommand):
    """A command whose function ends the process: with a message and an exit code of its own."""

    def invoke(self, ctx: Any) -> Any:
        """Run the function; see :func:`ppocli.cli.output.ending`."""
        invoke = super().invoke
        ending(lambda: invoke(ctx))


class HydraCommand(Command):
    """A command that hands options on to Hydra, and offers those after TAB as well."""

    takes_recipes = True

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Our own options, then Hydra's."""
        return [*super().shell_complete(ctx, incomplete),
                *(SimpleNamespace(value=name, help=text, type="plain")
                  for name, text in HYDRA_FLAGS.items()
                  if incomplete.startswith("-") and name.startswith(incomplete))]


Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="[WORDS]...", autocompletion=complete_setting, show_default=False,
    help="Settings KEY=VALUE, +recipe=NAME, and Hydra's options.")]

Run = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=complete_target, show_default=False,
    help="A run's folder or name, a checkpoint, a model folder, or a Hub name "
         "(default: the newest run below runs/).")]

RunFolder = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=complete_run, show_default=False,
    help="A run's folder or name (default: the newest run below runs/).")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

NoProgress = Annotated[bool, typer.Option(
    "--no-progress", help="Print plain lines without the live view, also on a terminal.")]


# Of generate and chat -----------------------------------------------------------------------------

Step = Annotated[int | None, typer.Option("--step", metavar="N", show_default=False,
                                          help="The checkpoint of this step of the run.")]
Best = Annotated[bool, typer.Option("--best", help="The run's best checkpoint by evaluation.")]
Score = Annotated[bool, typer.Option("--score", help="Score each response with the run's reward.")]
Reward = Annotated[str | None, typer.Option(
    "--reward", metavar="IMPORT", show_default=False,
    help="Score with another reward: module:function, file.py:function or a built-in; its "
         "arguments follow as words, reward.kwargs.NAME=VALUE.")]
Against = Annotated[str | None, typer.Option(
    "--against", metavar="RUN|base", show_default=False,
    help="Give the same prompts to a second model; base is the one that the run started from.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0,
                                   help="Equal seeds give equal responses.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", show_default=False,
                                            help="A system message before each conversation.")]
MaxNew = Annotated[int | None, typer.Option("--max-new-tokens", metavar="N", show_default=False,
                                            help="Maximum length of a response in tokens.")]
MinNew = Annotated[int | None, typer.Option("--min-new-tokens", metavar="N", show_default=False,
                                            help="Minimum length of a response in tokens.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T",
                                                   show_default=False,
                                                   help="Softmax temperature.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", show_default=False,
                                          help="Sample among the K most likely tokens (0: all).")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", show_default=False,
                                            help="Nucleus sampling (1: all).")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", show_default=False,
                                                help="A text that ends a response (repeatable).")]
