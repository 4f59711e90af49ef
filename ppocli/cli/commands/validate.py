"""``ppocli validate`` and ``ppocli schema``, as the shell sees them."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.completion import complete_key
from ppocli.cli.options import WORDS, AsJson, HydraCommand, Overrides
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=HydraCommand, context_settings=WORDS)(validate)
    app.command()(schema)


def validate(overrides: Overrides = None,
             deep: Annotated[bool, typer.Option(
                 "--deep", help="Also load everything and rehearse a step with two samples.")
                 ] = False,
             as_json: AsJson = False) -> None:
    """Tell everything that is wrong with a run, or with all jobs of a sweep, before it starts.

    Settings, models, prompts, rewards and the output folder are checked and every problem is told,
    with where it comes from and how to mend it. Nothing is written. Exit code 0: valid; 2 settings,
    3 model or data, 7 reward, 6 disk, 5 run folder (of several kinds, the first in this order).

    \b
    Examples:
      ppocli validate +recipe=quickstart
      ppocli validate model.path=./lm prompts.path=prompts.jsonl reward.fn=my_rewards:score \\
          ppo.total_episodes=2000
      ppocli validate --deep +recipe=quickstart
      ppocli validate -m +recipe=quickstart seed=1,2
    """
    from ppocli.cli.validate import validate_words

    ending(lambda: validate_words(overrides or [], deep=deep, as_json=as_json))


def schema(name: Annotated[str | None, typer.Argument(
               metavar="[KEY]", autocompletion=complete_key, show_default=False,
               help="A key or a section: ppo.vf_coef, ppo (default: all).")] = None,
           as_json: Annotated[bool, typer.Option(
               "--json", help="Print a JSON Schema, for editors and other programs.")] = False
           ) -> None:
    """Print every setting with its type, default, allowed values and meaning.

    \b
    Examples:
      ppocli schema ppo
      ppocli schema generation.top_p
      ppocli schema --json > ppocli.schema.json
    """
    from ppocli.cli.schema import print_schema

    ending(lambda: print_schema(name, as_json))
