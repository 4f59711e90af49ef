"""Arguments, options and classes that several commands share, and what the shell offers after TAB.
No Hydra, no torch.

Typer has the scripts and speaks with the shells. bash breaks words at ``=`` and ``:``, and Typer
hands on the last piece alone: :func:`complete_word` puts the words together again.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from ppocli.builtin.names import (
    BUILTIN_PREFIX,
    BUILTIN_REWARDS,
    config_groups,
    list_builtins,
    recipe_files,
)
from ppocli.cli.output import begin_command, choice_of, code_of, leave
from ppocli.errors import AmbiguousError

WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""context settings of commands that take words with leading dashes for Hydra"""
HYDRA_FLAGS = {
    "-m": "run every combination of KEY=A,B", "--multirun": "run every combination of KEY=A,B",
    "--cfg": "print the composed configuration", "--package": "with --cfg: a part of it",
    "--config-dir": "a folder with your own recipes or config groups",
    "--trust": "with resume=RUN: run code that its configuration names"}

Record = TypeVar("Record")


class Command(TyperCommand):
    """A command whose function ends the process: with a message and an exit code of its own."""

    def invoke(self, ctx: Any) -> Any:
        """Run the function; see :func:`ppocli.cli.output.code_of`. A word that names two things is
        asked about, and the function run with the answer."""
        invoke = super().invoke

        def run() -> None:
            try:
                invoke(ctx)
            except AmbiguousError as error:
                meant = {error.name: choice_of(error)}
                for name, value in ctx.params.items():
                    several = isinstance(value, list | tuple)
                    ctx.params[name] = [meant.get(each, each) for each in value] if several else \
                        meant.get(value, value)
                invoke(ctx)

        begin_command()
        leave(code_of(run))


class HydraCommand(Command):
    """A command that hands options on to Hydra, and offers those after TAB as well."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Our own options, then Hydra's."""
        return [*super().shell_complete(ctx, incomplete),
                *(SimpleNamespace(value=name, help=text, type="plain")
                  for name, text in HYDRA_FLAGS.items()
                  if incomplete.startswith("-") and name.startswith(incomplete))]


def request_of(record: Callable[..., Record], ctx: typer.Context, **others: Any) -> Record:
    """What a command was asked for, as a dataclass: each field is the option of the same name,
    unless it is among the ``others``."""
    options = {name: ctx.params[name] for name in signature(record).parameters
               if name in ctx.params}
    return record(**{**options, **others})


def group(text: str) -> typer.Typer:
    """Commands that stand behind a word, as those of ``ppocli runs``."""
    return typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=text)


def option(metavar: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """An option with a value, ``--like-its-parameter`` unless there are other ``names``."""
    return typer.Option(default, *names, metavar=metavar, help=text, **more)


def flag(text: str, *names: str, **more: Any) -> Any:
    """An option without a value, off unless it is given."""
    return typer.Option(False, *names, help=text, **more)


# What is offered ----------------------------------------------------------------------------------

def complete_setting(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Settings KEY=VALUE and recipes, with what keys mean for shells that show it."""
    from ppocli.config.keys import schema_keys

    before = [ctx.params.get("run"), *(ctx.params.get("overrides") or ())]
    keys = schema_keys()
    offers = complete_word([word for word in before if word], incomplete)
    if not isinstance(ctx.command, HydraCommand):
        offers = [offer for offer in offers if not offer.startswith(("+", "recipe="))]
    return [(offer, key.doc if offer.endswith("=") and (key := keys.get(offer[:-1]))
             else "") for offer in offers]


def complete_target(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Runs; and settings, where RUN may be left out before them."""
    runs = [(run, "") for run in complete_run(incomplete)]
    takes_settings = any(param.name == "overrides" for param in ctx.command.params)
    return complete_setting(ctx, incomplete) if not runs and incomplete and takes_settings \
        else runs


def complete_word(words: Sequence[str], incomplete: str) -> list[str]:
    """Completions of the last word of ``ppocli train``.

    Args:
        words: those before it; bash may have broken them at ``=`` and ``:``.
        incomplete: its beginning; where bash has broken it, only what follows the break.
    """
    from ppocli.config.command_words import CHOICES, SHORT
    from ppocli.config.keys import schema_keys

    whole, kept = _joined(words, incomplete)
    previous = whole[-1] if whole else ""
    if not kept and (flag := SHORT.get(previous, previous)) in CHOICES:
        return [value for value in CHOICES[flag] if value.startswith(incomplete)]
    # bash may stand right behind KEY=, and Typer has dropped the =
    if not kept and not incomplete and "=" not in previous and (offers := _values(previous, "")):
        return offers
    word = kept + incomplete
    key, equals, value = word.partition("=")
    if equals:
        offers = [f"{key}={option}" for option in _values(key, value)]
    else:
        names = ("+recipe", "recipe", *config_groups(), *schema_keys())
        offers = sorted(f"{name}=" for name in names if f"{name}=".startswith(word))
    return [offer[len(kept):] for offer in offers]


def complete_run(incomplete: str) -> list[str]:
    """Run folders below ``runs`` that begin so, or their names, the newest first."""
    from ppocli.runs.target import list_runs, written

    folders = sorted(list_runs(Path("runs")), key=written, reverse=True)
    paths = [str(folder) for folder in folders if str(folder).startswith(incomplete)]
    return paths or [folder.name for folder in folders if folder.name.startswith(incomplete)]


def _joined(words: Sequence[str], incomplete: str) -> tuple[list[str], str]:
    """Words as they were typed, and the beginning of the last one that bash has broken off."""
    whole: list[str] = []
    for word in (*words, incomplete):
        is_break = word != "" and not word.strip("=:")
        if whole and (is_break or whole[-1].endswith(("=", ":"))):
            whole[-1] += word
        else:
            whole.append(word)
    return whole[:-1], whole[-1].removesuffix(incomplete)


def _values(key: str, value: str) -> list[str]:
    from ppocli.config.keys import schema_keys

    done, comma, last = value.rpartition(",")  # a sweep: a,b,...
    name = key.lstrip("+")
    schema_key = schema_keys().get(name)
    options: list[str] = []
    if name == "recipe":
        options = list(recipe_files())
    elif name in config_groups():
        options = config_groups()[name]
    elif name == "resume":
        options = ["never", "auto", *complete_run("")]
    elif name in ("model.path", "data.path", "data.val", "ppo.ptx.data.path", "prompts.path",
                  "prompts.eval.path"):
        section = name.removeprefix("ppo.ptx.").partition(".")[0]
        options = [BUILTIN_PREFIX + builtin for builtin in list_builtins(section)]
    elif name == "reward.fn":
        options = list(BUILTIN_REWARDS)
    elif schema_key is not None:
        options = list(schema_key.metadata["choices"] or (
            ("true", "false") if schema_key.item is bool else ()))
        if schema_key.kind == "list":
            options = [f"[{option}]" for option in options]
    return [f"{done}{comma}{option}" for option in options if option.startswith(last)]


# Arguments and options ----------------------------------------------------------------------------

Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="[WORDS]...", autocompletion=complete_setting,
    help="Settings KEY=VALUE, +recipe=NAME, and Hydra's options.")]
Run = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=complete_target, help="A run's folder or name, a checkpoint, a "
    "model folder, or a Hub name (default: the newest run below runs/).")]
RunFolder = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=complete_run,
    help="A run's folder or name (default: the newest run below runs/).")]
OneRun = Annotated[str, typer.Argument(
    metavar="RUN", autocompletion=complete_run, help="The run's folder or name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Trust = Annotated[bool, typer.Option(
    "--trust", help="Run what the run's configuration names (rewards, a model's own code), though "
    "somebody else has made it.")]
NoProgress = Annotated[bool, typer.Option(
    "--no-progress", help="Print plain lines without the live view, also on a terminal.")]

# of commands that take a policy
Step = Annotated[int | None, typer.Option(metavar="N", min=0, help="The checkpoint of this step of "
                                          "the run (default: the final model, else the newest).")]
Best = Annotated[bool, typer.Option("--best", help="The run's best checkpoint by evaluation.")]
Reward = Annotated[str | None, typer.Option(
    metavar="IMPORT", help="Score with another reward: module:function, file.py:function or a "
    "built-in; its arguments follow as words, reward.kwargs.NAME=VALUE.")]
Score = Annotated[bool, typer.Option("--score", help="Score each response with the run's reward.")]
