"""``ppocli train`` and ``ppocli resume``: words to a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ppocli.builtin.names import config_groups, recipe_files
from ppocli.cli.completion import complete_run
from ppocli.cli.options import NoProgress, Overrides
from ppocli.cli.output import (
    display_mode,
    ending,
    ignore_broken_pipes,
    one_process_error,
    say,
    set_manner,
)
from ppocli.errors import ConfigError
from ppocli.parallel.launchers import Launched, find_launch

if TYPE_CHECKING:
    from ppocli.config.words import Words
    from ppocli.launching.adopted_ranks import Meeting

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

Takes settings KEY=VALUE and Hydra's options; a recipe contains the settings of a whole run.

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
Common keys (all of them with their values: ppocli train --cfg job):
{_COMMON_KEYS}

\b
Options passed on to Hydra:
  -m, --multirun          run every combination of KEY=A,B
  --cfg job [--resolve]   print the composed configuration (-p PART: a part of it)
  --cfg deepspeed         print DeepSpeed's configuration (ours, not Hydra's)
  --info [searchpath]     print where configuration comes from
  -cd, --config-dir DIR   a folder with your own recipes or config groups
  -cn, --config-name NAME another primary config
  --hydra-help            Hydra's own help"""


DryRun = Annotated[bool, typer.Option(
    "--dry-run", help="Load and try everything without training; same as ppocli validate --deep.")]


def train(overrides: Overrides = None, no_progress: NoProgress = False, dry_run: DryRun = False
          ) -> None:
    set_manner(plain=no_progress)
    ending(lambda: run_words(overrides or [], dry_run=dry_run))


def resume(run: Annotated[str, typer.Argument(metavar="RUN", autocompletion=complete_run,
                                              help="The run's folder or name.")],
           overrides: Overrides = None, no_progress: NoProgress = False, dry_run: DryRun = False
           ) -> None:
    """Continue a stopped run exactly where it was saved.

    Uses the run's own config.yaml; settings override it, e.g. ppo.total_episodes=4000.

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
    def own_words() -> Sequence[str]:
        return words if resumed is None else resume_words(resumed, words)

    if dry_run:
        from ppocli.cli.validate import validate_words

        validate_words(own_words(), deep=True)
        return
    from ppocli.config.words import read_words

    launched = find_launch(os.environ)
    if launched is not None:
        _take_part(launched, own_words)
    read = read_words(own_words())
    if read.is_sweep:
        from ppocli.cli.sweep import run_sweep

        ignore_broken_pipes()
        run_sweep(read)
    else:
        _train(read)


def resume_words(run: str, words: Sequence[str]) -> list[str]:
    """The words of ``ppocli resume RUN ...`` as those of ``ppocli train``; RUN is a folder, or a
    run's name below ``runs``."""
    from ppocli.runs.target import run_named

    return [f"resume={run if isdir(run) else run_named(run, which=isdir)}", *words]


def _train(words: Words, meeting: Meeting | None = None) -> None:
    """Compose, check, and train, or print what the words ask for.

    Args:
        meeting: where the launcher's other ranks wait, of which this is the first.
    """
    from ppocli.config.compose import check, compose, print_composition

    for_deepspeed = words.flag("--cfg") == "deepspeed"
    if words.only_prints and not for_deepspeed:
        print_composition(words)
        return
    from ppocli.launching.adopted_ranks import PROVIDED, placed

    composed = compose(words.without("--cfg"))
    # what a launcher would provide does not matter to DeepSpeed
    checked = check(composed, PROVIDED if meeting or for_deepspeed else frozenset())
    if meeting is not None:
        checked = placed(checked, meeting.launched, meeting.environ)
    if for_deepspeed:
        from ppocli.config.deepspeed import deepspeed_config
        from ppocli.config.resolved import with_absolute_paths

        config = with_absolute_paths(checked.config, Path.cwd())
        if config.hardware.zero_stage == 0:
            raise ConfigError("DeepSpeed is not used: hardware.zero_stage is 0.",
                              where="hardware.zero_stage", fix="add hardware=zero2")
        print(json.dumps(deepspeed_config(config), indent=2))
        return
    from ppocli.launching.launch import Caller, launch

    ignore_broken_pipes()
    outcome = launch(checked, Caller("own", display_mode(), say, meeting=meeting))
    if outcome.exit_code != 0:  # of several processes, which have said why
        raise SystemExit(outcome.exit_code)
    if outcome.model_dir is not None:
        with suppress(OSError):  # a display that is gone doesn't undo the training
            print(outcome.model_dir, flush=True)


def _take_part(launched: Launched, words_of: Callable[[], Sequence[str]]) -> NoReturn:
    """Train as one of the launcher's ranks, and leave the process.

    Args:
        words_of: the words of ``ppocli train``, asked for by rank 0 alone.
    """
    from ppocli.config.words import read_words
    from ppocli.launching.adopted_ranks import open_meeting
    from ppocli.launching.child_process import outcome_of
    from ppocli.launching.launch import follow
    from ppocli.parallel.stop import leave_at_once

    ignore_broken_pipes()
    meeting = open_meeting(launched)

    def work() -> None:
        if not launched.first:
            follow(meeting)
            return
        words = read_words(words_of())
        if words.is_sweep:
            raise one_process_error("A sweep", launched)
        _train(words, meeting)
        if words.only_prints:
            meeting.tell(None)

    leave_at_once(meeting.conclude(outcome_of(launched.rank, work)))
