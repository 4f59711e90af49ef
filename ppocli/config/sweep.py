"""The jobs of a sweep: which they are, and what all of them share. Hydra's sweeper, or a search,
runs them one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ppocli.config import hydra_bridge, keys, layers, schema, secrets
from ppocli.config.compose import Composed, compose_here, of_sweep
from ppocli.config.problems import Problem, raise_problems, range_problems
from ppocli.config.resolved import quoted, schema_node, typed
from ppocli.config.words import COMMAND_LINE, Words
from ppocli.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep: its number, how many there are (None: unknown), all its settings, those
    that differ between jobs, its folder, the words of a single run that does the same, and what
    they compose to (raises ConfigError)."""

    number: int
    total: int | None
    words: tuple[str, ...]
    varied: tuple[str, ...]
    folder: Path
    typed: Words
    compose: Callable[[], Composed]


Grid = tuple[tuple[str, ...], ...]
"""the words that differ between jobs, job by job"""


Ranges = Mapping[str, Override]
"""what is swept, in Hydra's grammar, by key"""
Search = Callable[[schema.SweepConfig, Ranges, Path, Callable[[int, tuple[str, ...]], SweepJob]],
                  None]
"""runs the jobs of ``sweep.search``: gets the settings of the sweep, its ranges, its folder, and
what makes a job of its number and its values"""


def run_sweep_jobs(words: Words, run_job: Callable[[SweepJob], float | None],
                   begin: Callable[[schema.TrainConfig, Grid | None], Path], search: Search
                   ) -> None:
    """Let Hydra's sweeper, or ``search``, run ``run_job`` for each job.

    What is wrong with all jobs alike is told before any of them starts; ``SweepJob.compose``
    tells what is wrong with one. ``run_job`` returns what an optimising sweeper maximises.

    Args:
        begin: gets what all jobs share, and the jobs that are planned (None where the sweeper
            chooses them as it goes), and returns the sweep's folder.

    Raises:
        ConfigError: wrong words, or words that contradict a sweep.
    """
    if words.value("resume") not in (None, "auto", "never"):
        raise ConfigError("resume=FOLDER goes on with one run and can't be swept",
                          where=COMMAND_LINE, fix="to go on with a sweep: the same words, "
                          "hydra.sweep.dir=FOLDER resume=auto")
    # untyped, so that a job with a wrong value is that job's failure and not the sweep's
    untyped = OmegaConf.create(OmegaConf.to_container(schema_node()))
    with hydra_bridge.hydra_for(words, cast(DictConfig, untyped)):
        swept = _sweep_words(hydra_bridge.config_loader(words), words.overrides)
        secrets.refuse_secrets((entry.key, entry.value, entry.source) for entry in swept.shared)
        merged = layers.merge_entries(swept.shared, hydra_resolves=True)
        shared = typed(merged.node)
        raise_problems([*merged.problems, *(
            problem for problem in range_problems(shared, merged.sources)
            if problem.key in merged.sources), *_plan_problems(shared, swept, merged.sources)])
        plan, own_keys = shared.sweep, of_sweep(words)
        if plan.search != "grid":
            if not swept.ranges:
                raise ConfigError("there is nothing to search: no key has several values",
                                  where=COMMAND_LINE, fix="give one a range, such as "
                                  "'ppo.optimizer.lr=tag(log,interval(1e-5,1e-3))'")
            folder = begin(shared, None)
            own = [str(setting) for setting in words.without(*own_keys, *swept.ranges).settings
                   if not setting.key.startswith("hydra.")]
            search(plan, swept.ranges, folder,
                   lambda number, varied: _job(words, number, plan.trials, (*own, *varied), varied,
                                               folder / str(number)))
            return
        if ranged := [each.input_line for each in swept.ranges.values()
                      if not each.is_discrete_sweep()]:
            raise ConfigError(f"{ranged[0]}: a grid has no end of values between two",
                              where=COMMAND_LINE, fix="add sweep.search=optuna or sweep.search="
                              "random, or list the values")
        place = quoted(str(begin(shared, swept.grid)))
        own_words = words.without("hydra.sweep.dir", *own_keys).adding(f"hydra.sweep.dir={place}")
        # Hydra would have a + before what a free mapping doesn't hold yet
        hydra_bridge.run_hydra(replace(own_words, settings=tuple(
            replace(each, prefix="++") if not each.prefix and keys.free_mapping_of(each.key)
            else each for each in own_words.settings)), lambda config: run_job(
                _sweep_job(words, swept)))


def _plan_problems(config: schema.TrainConfig, swept: _Swept, sources: Mapping[str, str]
                   ) -> Iterator[Problem]:
    """Settings of a sweep that contradict each other, or would have no effect."""
    plan = config.sweep
    for key in ("sweep.trials", "sweep.metric", "sweep.direction", "sweep.prune", "sweep.seed"):
        if plan.search == "grid" and key in sources:
            yield Problem(key, "a grid runs every combination: it has an effect with "
                          "sweep.search=random or sweep.search=optuna", sources[key])
    others = plan.search == "grid" and swept.grid is None and all(
        each.is_discrete_sweep() for each in swept.ranges.values())
    if others and (plan.jobs > 1 or plan.launcher != "local"):
        yield Problem("sweep", "Hydra's other sweepers run their jobs one after another, here",
                      COMMAND_LINE)
    if plan.launcher == "slurm" and "timeout_min" not in plan.slurm:
        yield Problem("sweep.slurm.timeout_min", "Slurm has to be told how long a job may take, in "
                      "minutes: sweep.slurm.timeout_min=240", COMMAND_LINE)
    if plan.slurm and plan.launcher != "slurm":
        yield Problem("sweep.slurm", "has an effect with sweep.launcher=slurm",
                      sources["sweep.slurm"])
    if plan.jobs > 1 and plan.launcher == "local" and config.hardware.num_nodes > 1:
        yield Problem("sweep.jobs, hardware.num_nodes", "jobs of several nodes don't run beside "
                      "one another", COMMAND_LINE)


@dataclass(frozen=True, slots=True)
class _Swept:
    """What all jobs of a sweep share on the command line, the words that differ between them, job
    by job (None: the sweep isn't a grid), and what is swept."""

    shared: list[layers.Entry]
    grid: Grid | None
    ranges: Ranges


def _sweep_job(words: Words, swept: _Swept) -> SweepJob:
    """The job that Hydra runs now."""
    settings = HydraConfig.get()
    task = tuple(word.removeprefix("++") for word in settings.overrides.task)
    search = [word for word in settings.overrides.hydra if word.startswith("hydra.searchpath")]
    varied = tuple(word for word in task if word.lstrip("+~").partition("=")[0] in swept.ranges)
    total = None if swept.grid is None else len(swept.grid)
    return _job(words, int(settings.job.num), total, task, varied,
                Path(settings.runtime.output_dir), search)


def _job(words: Words, number: int, total: int | None, task: tuple[str, ...],
         varied: tuple[str, ...], folder: Path, search_path: Sequence[str] = ()) -> SweepJob:
    own = Words((), words.flags, words.config_dirs).adding(
        *search_path, *task, f"run_name={quoted(folder.name)}")  # its folder says where it runs

    @cache
    def composed() -> Composed:
        with hydra_bridge.as_config_errors():
            return compose_here(own)

    return SweepJob(number, total, task, varied, folder, own, composed)


def _sweep_words(loader: ConfigLoader, overrides: list[str]) -> _Swept:
    """Tell what is swept.

    Config groups and recipes must exist in all the swept spellings; the swept values themselves
    are checked in their jobs.
    """
    entries: list[layers.Entry] = []
    # Hydra's own sweeper: the product of all values, the last key changing fastest
    axes: dict[str, list[str]] = {}
    ranges: dict[str, Override] = {}
    is_grid = True
    for override in OverridesParser.create(config_loader=loader).parse_overrides(overrides):
        name = override.key_or_group
        is_grid &= name != "hydra/sweeper" and not name.startswith("hydra.sweeper")
        if name == "hydra" or name.startswith("hydra."):
            continue
        swept = override.is_sweep_override()
        discrete = swept and override.is_discrete_sweep()
        values = list(override.sweep_string_iterator()) if discrete else []
        if swept:
            ranges[name] = override
            is_grid &= discrete
            key = override.get_key_element().removeprefix("++")
            axes[key] = [f"{key}={value}" for value in values]
        if options := loader.get_group_options(name, results_filter=ObjectType.CONFIG):
            for value in values if swept else [override.get_value_element_as_str()]:
                option = value.strip("'\"")
                if option not in (*options, "null") and not option.startswith("["):
                    raise hydra_bridge.unknown_option(name, option, options)
        elif override.is_delete() and keys.free_mapping_of(name):
            continue  # it may be there in each job
        elif not swept:
            entries += layers.override_entries(override)
        elif keys.key_for(name) is None:
            entries.append(layers.Entry(name, None, COMMAND_LINE))
    grid = tuple(itertools.product(*axes.values())) if is_grid else None
    return _Swept(entries, grid, ranges)
