"""``ppocli train`` and ``ppocli resume``, as the shell sees them."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.completion import complete_run
from ppocli.cli.options import WORDS, HydraCommand, NoProgress, Overrides
from ppocli.cli.output import ending, set_manner
from ppocli.config.paths import config_groups, recipe_files

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
  --cfg deepspeed         print what DeepSpeed would be given (ours, not Hydra's)
  --info [searchpath]     print where configuration comes from
  -cd, --config-dir DIR   a folder with recipes or config groups of your own
  -cn, --config-name NAME another primary config
  --hydra-help            Hydra's own help"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=HydraCommand, context_settings=WORDS, help=_train_help())(train)
    app.command(cls=HydraCommand, context_settings=WORDS)(resume)


DryRun = Annotated[bool, typer.Option(
    "--dry-run", help="Load and try everything, train nothing: ppocli validate --deep.")]


def train(overrides: Overrides = None, no_progress: NoProgress = False, dry_run: DryRun = False
          ) -> None:
    from ppocli.cli.train import run_words

    set_manner(plain=no_progress)
    ending(lambda: run_words(overrides or [], dry_run=dry_run))


def resume(run: Annotated[str, typer.Argument(metavar="RUN", autocompletion=complete_run,
                                              help="The run's folder or name.")],
           overrides: Overrides = None, no_progress: NoProgress = False, dry_run: DryRun = False
           ) -> None:
    """Go on with a stopped run, exactly where it was saved.

    The run's own config.yaml is the base; words override it, e.g. ppo.total_episodes=4000.

    \b
    Examples:
      ppocli resume runs/NAME
      ppocli resume runs/NAME ppo.total_episodes=4000
    """
    from ppocli.cli.train import run_words

    set_manner(plain=no_progress)
    ending(lambda: run_words(overrides or [], dry_run=dry_run, resumed=run))
