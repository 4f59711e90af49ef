"""Arguments and options that several commands share. Only Typer is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ppocli.cli.completion import (
    HYDRA_FLAGS,
    complete_run,
    complete_word,
    described,
    typed_words,
)

WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""context settings of commands that take words with leading dashes for Hydra"""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What Typer wants to know of a completion."""

    value: str
    help: str | None
    type: str = "plain"


class HydraCommand(TyperCommand):
    """A command that hands options on to Hydra, and offers those after TAB as well."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Our own options, then Hydra's."""
        return [*super().shell_complete(ctx, incomplete),
                *(_Offer(name, text) for name, text in HYDRA_FLAGS.items()
                  if incomplete.startswith("-") and name.startswith(incomplete))]


def complete_setting(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Settings KEY=VALUE; where Hydra reads the words, its flags and recipes too."""
    offers = complete_word(typed_words()[2:], incomplete)
    if not isinstance(ctx.command, HydraCommand):
        offers = [offer for offer in offers if not offer.startswith(("-", "+", "recipe="))]
    return described(offers)


def _complete_target(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Runs; and settings, where RUN may be left out before them."""
    found = [(run, "") for run in complete_run(incomplete)]
    takes_settings = any(p.name in ("overrides", "words") for p in ctx.command.params)
    if not found and incomplete and takes_settings:
        return complete_setting(ctx, incomplete)
    return found


Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="[WORDS]...", autocompletion=complete_setting, show_default=False,
    help="Settings KEY=VALUE, +recipe=NAME, and Hydra's options.")]

Run = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=_complete_target, show_default=False,
    help="A run's folder or name, a checkpoint, a model folder, or a Hub name "
         "(default: the newest run below runs/).")]

RunFolder = Annotated[str | None, typer.Argument(
    metavar="[RUN]", autocompletion=complete_run, show_default=False,
    help="A run's folder or name (default: the newest run below runs/).")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

NoProgress = Annotated[bool, typer.Option(
    "--no-progress", help="Plain lines, also on a terminal: no live view.")]
