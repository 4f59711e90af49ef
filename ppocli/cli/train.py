"""``ppocli train``, ``resume`` and ``sweep resume``, also on a data set: words to runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from inspect import getdoc
from os.path import isdir
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ppocli.builtin.names import config_groups, recipe_files
from ppocli.cli import options as opt
from ppocli.cli import output
from ppocli.cli.options import NoProgress, Overrides
from ppocli.config.import_guard import TRUST
from ppocli.config.text import did_you_mean
from ppocli.distributed.launchers import Launched, find_launch
from ppocli.distributed.standard_output import put, result_stream
from ppocli.errors import CheckpointError, ConfigError, PpocliError

if TYPE_CHECKING:
    from ppocli.cli.run_checks import Checked
    from ppocli.config.command_words import Words
DryRun = Annotated[bool, typer.Option(
    "--dry-run", help="Load everything and try one small step; nothing is kept.")]


NOT_LOOKED_AT = ("not looked at: weights, lengths, memory and servers, what the reward returns, "
                 "data on the Hub (--dry-run of the command that trains loads everything and "
                 "tries a step)")


def train(overrides: Overrides = None, no_progress: NoProgress = False, dry_run: DryRun = False
          ) -> None:
    """Train a language model with PPO.

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
      +recipe={recipes}
    {groups}

    \b
    Common keys (all of them with their values: ppocli train --cfg job):
      model.path=FOLDER|HUB-NAME       reward.fn=module:function    ppo.total_episodes=2000
      prompts.path=FILE|HUB-NAME       reward.kwargs.NAME=VALUE     ppo.num_rollouts=128
      prompts.column=prompt            generation.max_new_tokens=32 ppo.mini_batch_size=32
      run_name=NAME  output_dir=runs   generation.temperature=1.0   ppo.optimizer.lr=1e-5
      seed=0  resume=never|auto|RUN    hardware.device=auto         ppo.init_kl_coef=0.05

    \b
    Options passed on to Hydra:
      -m, --multirun          run every combination of KEY=A,B
      --cfg job               print the composed configuration (-p PART: a part of it)
      --cfg deepspeed         print DeepSpeed's configuration (ours, not Hydra's)
      -cd, --config-dir DIR   a folder with your own recipes or config groups
    """
    run_words(overrides or [], plain=no_progress, dry_run=dry_run)


def train_help() -> str:
    """The help of ``ppocli train``: its docstring, with the recipes and config groups there are."""
    groups = "\n".join(f"  {group}={'|'.join(options)}"
                       for group, options in config_groups().items())
    return (getdoc(train) or "").format(recipes="|".join(recipe_files()), groups=groups)


def sft(overrides: Overrides = None, no_progress: NoProgress = False, dry_run: DryRun = False
        ) -> None:
    """Fine-tune a model on texts, conversations, or prompts with completions.

    Takes settings as ppocli train does; a run can be resumed, watched, reported and swept like any.

    \b
    Examples:
      ppocli sft model.path=gpt2 data.path=pairs.jsonl data.val=0.05
      ppocli sft model.path=./lm data.path=chats.jsonl sft.epochs=3 sft.optimizer.lr=1e-4
      ppocli sft -m model.path=gpt2 data.path=texts.csv sft.optimizer.lr=1e-5,1e-4

    \b
    Data is told apart by its columns: text; messages; prompt and completion.
    Keys: ppocli schema data, ppocli schema sft
    """
    run_words(["task=sft", *(overrides or [])], plain=no_progress, dry_run=dry_run)


def reward_model(overrides: Overrides = None, no_progress: NoProgress = False,
                 dry_run: DryRun = False) -> None:
    """Train a reward model on pairs of a chosen and a rejected response.

    It starts from a language model, or from a run of ppocli sft, with a new scalar head.

    \b
    Examples:
      ppocli reward-model model.path=runs/sft data.path=pairs.jsonl data.val=0.1
      ppocli reward-model model.path=gpt2 data.path=pairs.jsonl reward_model.epochs=2
      ppocli train model.path=runs/sft reward.fn=reward_model reward.kwargs.model=runs/rm ...

    \b
    Data is told apart by its columns: prompt, chosen and rejected; chosen and rejected alone.
    Keys: ppocli schema data, ppocli schema reward_model
    """
    run_words(["task=reward_model", *(overrides or [])], plain=no_progress, dry_run=dry_run)


def resume(run: opt.OneRun, overrides: Overrides = None, no_progress: NoProgress = False,
           dry_run: DryRun = False, trust: opt.Trust = False, accept_changes: bool = opt.flag(
               "Go on with a config.yaml changed by hand.", "--accept-changes")) -> None:
    """Continue a stopped run exactly where it was saved.

    Uses the run's own config.yaml; settings override it, e.g. ppo.total_episodes=4000.

    \b
    Examples:
      ppocli resume runs/NAME
      ppocli resume runs/NAME ppo.total_episodes=4000
    """
    more = [*(overrides or []), *["--accept-changes"] * accept_changes, *[TRUST] * trust]
    run_words(resume_words(run, more), plain=no_progress, dry_run=dry_run)


def validate(overrides: Overrides = None, as_json: opt.AsJson = False) -> None:
    """Report everything that is wrong with a run before it starts.

    Checks settings, models, prompts, rewards and the output folder, and reports every problem with
    its origin and its fix. Nothing is written. Exit code 0: valid; 2 settings, 3 model or data,
    7 reward, 6 disk, 5 run folder (for several kinds, the first in this order).

    \b
    Examples:
      ppocli validate +recipe=quickstart
      ppocli validate model.path=./lm prompts.path=prompts.jsonl reward.fn=my_rewards:score \\
          ppo.total_episodes=2000
    """
    from ppocli.cli.run_checks import check_words
    from ppocli.config.secrets import safe_text

    checked = check_words(overrides or [])
    if not as_json:
        _raise_all(checked.problems)
        _print_plan(checked)
        output.say(NOT_LOOKED_AT)
        return
    exit_code = checked.problems[0].exit_code if checked.problems else 0
    output.print_json({
        "valid": not checked.problems, "exit_code": exit_code,
        "problems": [{"exit_code": error.exit_code, "code": error.code,
                      **{part: text and safe_text(text) for part, text in (
                          ("what", error.what), ("where", error.where), ("fix", error.fix))}}
                     for error in checked.problems],
        "run": checked.plan and asdict(checked.plan), "data": checked.facts})
    if exit_code:
        raise SystemExit(exit_code)


def resume_sweep(sweep: Annotated[str, typer.Argument(
                     metavar="SWEEP", help="The sweep's folder or name.")],
                 overrides: Overrides = None, trust: opt.Trust = False) -> None:
    """Run the unfinished jobs of a sweep in the same folders.

    A job continues from its newest checkpoint, or starts if it has none. Finished jobs are kept.
    Settings such as reward.timeout=60 apply to the jobs that run. A search (sweep.search) chooses
    its further jobs as it would have.

    \b
    Examples:
      ppocli sweep resume runs/sweep-20260131-120000
      ppocli sweep resume runs/sweep-20260131-120000 ppo.micro_batch_size=4
    """
    from ppocli.cli.sweep import go_on

    go_on(sweep, overrides or [], trust)


def run_words(words: Sequence[str], *, plain: bool = False, dry_run: bool = False) -> None:
    """Train with the words of the command line, sweep with ``-m``, or let Hydra print.

    The last line on standard output is the path of the trained model's folder.

    Args:
        plain: lines in place of a live view.
        dry_run: load everything and try one small step; nothing is kept.

    Raises:
        PpocliError: whatever keeps the run from its end.
    """
    output.set_manner(plain=plain)
    if dry_run:
        _dry_run(words)
        return
    from ppocli.config.command_words import read_words

    if (launched := find_launch(os.environ)) is not None:
        _take_part(launched, words)
    read = read_words(words)
    if read.is_sweep and not read.only_prints:
        from ppocli.cli.sweep import run_sweep

        run_sweep(read)
    else:
        _train(read)


def _dry_run(words: Sequence[str]) -> None:
    """Check a run as :func:`validate` does, then load everything and make a small first step.
    Nothing is kept.

    Raises:
        PpocliError: whatever would end the run at its first step.
        StoppedError: stopped by a signal.
    """
    from ppocli.cli.run_checks import check_words

    checked = check_words(words)
    _raise_all(checked.problems)
    assert checked.config is not None
    with output.working() as stop:
        from ppocli.launch.preflight import try_first_step

        lines = try_first_step(checked.config, stop)
    _print_plan(checked)
    put("\n".join(lines))


def _raise_all(problems: Sequence[PpocliError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PpocliError("\n".join([f"{len(problems)} problems:", *(
            "  " + str(error).replace("\n", "\n  ") for error in problems)]),
            exit_code=problems[0].exit_code)


def _print_plan(checked: Checked) -> None:
    put(f"valid: {checked.plan}")
    for line in checked.facts:
        put(line)


def resume_words(run: str, words: Sequence[str]) -> list[str]:
    """The words of ``ppocli resume RUN ...`` as those of ``ppocli train``; RUN is a folder, or a
    run's name below ``runs``.

    Raises:
        CheckpointError: there is no such folder.
    """
    from ppocli.runs.target import known_names, run_named

    folder = run_named(run, is_match=isdir)
    if not folder.exists():
        raise CheckpointError(f"There is no run {run}{did_you_mean(run, known_names())}",
                              where=str(folder.absolute()),
                              fix="name a run's folder: ppocli runs list", code="no-such-run")
    return [f"resume={folder}", *words]


def _train(words: Words, launched: Launched | None = None, store: Any = None) -> None:
    """Compose, check, and train, or print what the words ask for.

    Args:
        launched, store: of the launcher that has started this process as rank 0 of several.
    """
    from ppocli.config.compose import check, compose

    for_deepspeed = words.flag("--cfg") == "deepspeed"
    if words.only_prints and not for_deepspeed:
        from ppocli.config.compose import print_composition

        with redirect_stdout(result_stream()):  # Hydra prints, too
            print_composition(words)
        return
    from ppocli.launch.external_launch import placed

    checked = check(compose(words.without("--cfg")))
    if launched is not None:
        checked = placed(checked, launched)
    if for_deepspeed:
        from ppocli.config import config_yaml, deepspeed

        config = config_yaml.with_absolute_paths(checked.config)
        if config.hardware.zero_stage == 0:
            raise ConfigError("DeepSpeed is not used: hardware.zero_stage is 0.",
                              where="hardware.zero_stage", fix="add hardware=zero2")
        put(json.dumps(deepspeed.deepspeed_config(config), indent=2))
        return
    from ppocli.launch.launch import Caller, launch

    outcome = launch(checked, Caller(True, output.display_mode(), output.say, store=store))
    if outcome.model_dir is not None:
        with suppress(OSError):  # a display that is gone doesn't undo the training
            put(outcome.model_dir)


def _take_part(launched: Launched, typed: Sequence[str]) -> NoReturn:
    """Train as one of the launcher's ranks, and leave the process; rank 0 alone reads the words."""
    from ppocli.config.command_words import read_words
    from ppocli.distributed.stop import leave_at_once
    from ppocli.launch import external_launch
    from ppocli.launch.launch import Caller, run_here

    store = external_launch.open_store(launched)

    def work() -> None:
        if launched.first:
            words = read_words(typed)
            if words.is_sweep:
                raise ConfigError(f"A sweep works in one process, and {launched.by} has started "
                                  f"{launched.world}.", where="WORLD_SIZE or srun's tasks",
                                  fix="start it without the launcher")
            _train(words, launched, store)
        elif (start := external_launch.wait_for_start(store)) is not None:
            run_here(start, Caller(True, store=store))

    leave_at_once(external_launch.run_together(store, launched, work))
