"""``ppocli recipes``, as the shell sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppocli.cli.completion import complete_recipe
from ppocli.cli.options import WORDS, AsJson, Overrides
from ppocli.cli.output import ending

recipes_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                          help="List, show and copy the recipes that ship.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def recipes_list(as_json: AsJson = False) -> None:
    """List the recipes: ./recipes of the current folder, then those that ship."""
    from ppocli.cli.recipes import print_list

    ending(lambda: print_list(as_json))


@recipes_app.command("show", context_settings=WORDS)
def recipes_show(name: Annotated[str, typer.Argument(autocompletion=complete_recipe)],
                 overrides: Overrides = None,
                 resolved: Annotated[bool, typer.Option(
                     "--resolved", help="Print everything it composes to.")] = False) -> None:
    """Print a recipe as YAML; with words or --resolved, what it composes to."""
    from ppocli.cli.recipes import print_recipe

    ending(lambda: print_recipe(name, overrides or [], resolved))


@recipes_app.command("copy")
def recipes_copy(name: Annotated[str, typer.Argument(autocompletion=complete_recipe)],
                 destination: Annotated[Path | None, typer.Argument(
                     metavar="[DEST]", help="File or folder (default: ./recipes).")] = None,
                 force: Annotated[bool, typer.Option(
                     "--force", help="Overwrite an existing file.")] = False) -> None:
    """Copy a recipe, to change it."""
    from ppocli.cli.recipes import copy_recipe

    ending(lambda: copy_recipe(name, destination, force))
