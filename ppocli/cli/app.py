"""The command line. Typer alone is imported here; each command imports what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppocli.cli.completion import complete_recipe, complete_word
from ppocli.cli.output import code_of, ending, leave, survive_any_terminal
from ppocli.config.paths import config_groups, recipe_files
from ppocli.version import __version__

_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}
_COMMON_KEYS = """\
  model.path=FOLDER|HUB-NAME       reward.fn=module:function    ppo.total_episodes=2000
  prompts.path=FILE|HUB-NAME       reward.kwargs.NAME=VALUE     ppo.num_rollouts=128
  prompts.column=prompt            generation.max_new_tokens=32 ppo.mini_batch_size=32
  run_name=NAME  output_dir=runs   generation.temperature=1.0   ppo.optimizer.lr=1e-5
  seed=0  resume=never|auto|RUN    hardware.device=auto         ppo.init_kl_coef=0.05"""


def _train_help() -> str:
    groups = "\n".join(f"  {group}={'|'.join(options)}"
                       for group, options in config_groups().items())
    return f"""Train a language model with PPO.

Words are settings, KEY=VALUE, and Hydra's options; a recipe gives the settings of a whole run.

\b
Examples:
  ppocli train +recipe=quickstart
  ppocli train +recipe=quickstart ppo.init_kl_coef=0.2 seed=1
  ppocli train model.path=./lm prompts.path=./prompts.jsonl \\
      reward.fn=my_rewards:score ppo.total_episodes=2000
  ppocli train -m +recipe=quickstart ppo.init_kl_coef=0.01,0.05 seed=1,2
  ppocli train resume=runs/NAME

\b
Config groups:
  +recipe={'|'.join(recipe_files())}
{groups}

\b
Common keys (all of them, with values: ppocli train --cfg job):
{_COMMON_KEYS}

\b
Options handed on to Hydra:
  -m, --multirun          run every combination of KEY=A,B
  --cfg job [--resolve]   print the composed configuration (-p PART: a part of it)
  --info [searchpath]     print where configuration comes from
  -cd, --config-dir DIR   a folder with recipes or config groups of your own
  -cn, --config-name NAME another primary config
  --hydra-help            Hydra's own help"""


app = typer.Typer(
    name="ppocli", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Fine-tune language models with PPO and any Python reward function.",
    context_settings={"help_option_names": ["-h", "--help"]})
recipes_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                          help="List, show and copy the recipes that ship.")
app.add_typer(recipes_app, name="recipes")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ppocli {__version__}")
        raise typer.Exit()


@app.callback()
def _options(version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False
        ) -> None:
    """Options before the command."""


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    return complete_word(list(ctx.params.get("overrides") or []), incomplete)


Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="[WORDS]...", autocompletion=_complete, show_default=False,
    help="Settings KEY=VALUE, +recipe=NAME, and Hydra's options.")]


@app.command(context_settings=_WORDS, help=_train_help())
def train(overrides: Overrides = None) -> None:
    from ppocli.cli.train import run_words

    ending(lambda: run_words(overrides or []))


@app.command(context_settings=_WORDS)
def resume(run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder.")],
           overrides: Overrides = None) -> None:
    """Go on with a stopped run, exactly where it was saved.

    The run's own config.yaml is the base; words override it, e.g. ppo.total_episodes=4000.
    """
    from ppocli.cli.train import resume_words, run_words

    ending(lambda: run_words(resume_words(run, overrides or [])))


@recipes_app.command("list")
def recipes_list(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
                 ) -> None:
    """List the recipes: ./recipes of the current folder, then those that ship."""
    from ppocli.cli.recipes import print_list

    ending(lambda: print_list(as_json))


@recipes_app.command("show", context_settings=_WORDS)
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


def main() -> None:
    """The console script."""
    survive_any_terminal()
    leave(code_of(lambda: app(prog_name="ppocli")))
