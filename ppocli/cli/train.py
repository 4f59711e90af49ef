"""``ppocli train`` and ``ppocli resume``: words to a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from os.path import isdir
from typing import TYPE_CHECKING, Annotated

import typer

from ppocli.cli.completion import complete_run
from ppocli.cli.options import NoProgress, Overrides
from ppocli.cli.output import display_mode, ending, ignore_broken_pipes, say, set_manner
from ppocli.config.paths import config_groups, recipe_files
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppocli.config.compose import Composition
    from ppocli.config.schema import TrainConfig

    Settle = Callable[[Composition], TrainConfig]

_COMMON_KEYS = """\
  model.path=FOLDER|HUB-NAME       reward.fn=module:function    ppo.total_episodes=2000
  prompts.path=FILE|HUB-NAME       reward.kwargs.NAME=VALUE     ppo.num_rollouts=128
  prompts.column=prompt            generation.max_new_tokens=32 ppo.mini_batch_size=32
  run_name=NAME  output_dir=runs   generation.temperature=1.0   ppo.optimizer.lr=1e-5
  seed=0  resume=never|auto|RUN    hardware.device=auto         ppo.init_kl_coef=0.05"""


def train_help() -> str:
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


DryRun = Annotated[bool, typer.Option(
    "--dry-run", help="Load and try everything, train nothing: ppocli validate --deep.")]


def train(overrides: Overrides = None, no_progress: NoProgress = False, dry_run: DryRun = False
          ) -> None:
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
    set_manner(plain=no_progress)
    ending(lambda: run_words(overrides or [], dry_run=dry_run, resumed=run))


def run_words(words: Sequence[str], *, dry_run: bool = False, resumed: str | None = None) -> None:
    """Train with the words of the command line, sweep with ``-m``, or let Hydra print.

    With ``resumed``, a run's folder or name, go on with that run.

    The last line on standard output is the path of the trained model's folder. With ``dry_run``
    everything is loaded and tried, but nothing is trained or written.

    Raises:
        PpocliError: whatever keeps the run from its end.
    """
    from ppocli.parallel.launchers import find_launch

    def own_words() -> list[str]:
        return list(words) if resumed is None else resume_words(resumed, words)

    launched = find_launch(os.environ)
    if launched is not None and not dry_run:
        from ppocli.cli.ranked import train_as_rank

        train_as_rank(launched, own_words)
    words = own_words()
    if dry_run:
        from ppocli.cli.validate import validate_words

        validate_words(words, deep=True)
        return
    from ppocli.config.compose import compose, is_sweep

    if is_sweep(words):
        from ppocli.cli.sweep import run_sweep

        ignore_broken_pipes()
        run_sweep(words)
        return
    if asks_for_deepspeed(words):
        show_deepspeed(words)
        return
    composition = compose(words)
    if composition is None:
        return
    from ppocli.launching.launch import launch

    ignore_broken_pipes()
    outcome = launch(composition.config, resume_from=composition.resume_from,
                     name_hint=composition.recipe or "run", say=say,
                     display=display_mode(), own_process=True)
    if outcome.exit_code != 0:  # of several processes, which have said why
        raise SystemExit(outcome.exit_code)
    if outcome.model_dir is not None:
        with suppress(OSError):  # a display that is gone doesn't undo the training
            print(outcome.model_dir, flush=True)


def asks_for_deepspeed(words: Sequence[str]) -> bool:
    """Whether the words hold ``--cfg deepspeed``."""
    from ppocli.config.words import read_words

    return read_words(words).flag("--cfg") == "deepspeed"


def show_deepspeed(words: Sequence[str], settle: Settle = lambda composition: composition.config
                   ) -> None:
    """Print what DeepSpeed would be given, as JSON.

    Raises:
        ConfigError: DeepSpeed is not used, or its file contradicts the settings.
    """
    import json
    from pathlib import Path

    from ppocli.config.compose import compose
    from ppocli.config.deepspeed import deepspeed_config
    from ppocli.config.resolved import with_absolute_paths
    from ppocli.launching.adopted_ranks import PROVIDED

    rest = list(words)
    for i, word in enumerate(words):
        if word in ("--cfg", "-c"):
            rest = [*words[:i], *words[i + 2:]]
        elif word.startswith(("--cfg=", "-c=")):
            rest = [*words[:i], *words[i + 1:]]
    # what a launcher would provide does not matter here
    composition = compose(rest, handed_in=PROVIDED)
    if composition is None:
        return
    config = with_absolute_paths(settle(composition), Path.cwd())
    if config.hardware.zero_stage == 0:
        raise ConfigError("DeepSpeed is not used: hardware.zero_stage is 0.",
                          where="hardware.zero_stage", fix="add hardware=zero2")
    print(json.dumps(deepspeed_config(config), indent=2))


def resume_words(run: str, words: Sequence[str]) -> list[str]:
    """The words of ``ppocli resume RUN ...`` as those of ``ppocli train``; RUN is a folder, or a
    run's name below ``runs``."""
    from ppocli.runs.target import run_named

    return [f"resume={run if isdir(run) else run_named(run, fits=isdir)}", *words]
