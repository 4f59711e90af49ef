"""The jobs of a sweep: which they are, and what all of them share. Hydra's sweeper, or a search,
runs them one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppocli.config import hydra_bridge, keys, layers, schema, secrets
from ppocli.config.compose import Composed, compose_here, first_job, of_sweep
from ppocli.config.problems import Problem, raise_problems, range_problems
from ppocli.config.resolved import mapping_words, quoted, schema_node, typed
from ppocli.config.words import COMMAND_LINE, Words
from ppocli.errors import ConfigError


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep: its number, how many there are (None: unknown), all its settings, those
    that differ between jobs, its folder, and the words of a single run that does the same."""

    number: int
    total: int | None
    words: tuple[str, ...]
    varied: tuple[str, ...]
    folder: Path
    typed: Words

    @cached_property
    def composed(self) -> Composed:
        """What the words of that run come to.

        Raises:
            ConfigError: as :func:`ppocli.config.compose.compose`.
        """
        with hydra_bridge.as_config_errors():
            return compose_here(self.typed)


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

    What is wrong with all jobs alike is told before any of them starts; ``SweepJob.composed``
    tells what is wrong with one. ``run_job`` returns what an optimising sweeper maximises.

    Args:
        begin: gets what all jobs share, as the first has it, and the jobs that are planned (None
            where the sweeper chooses them as it goes), and returns the sweep's folder.

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
        loader = hydra_bridge.config_loader(words)
        _refuse_launchers(words, loader)
        swept = _sweep_words(loader, words.overrides)
        shared, job_words = _shared(words, loader, swept)
        plan = shared.sweep
        if plan.search != "grid":
            if not swept.ranges:
                raise ConfigError("there is nothing to search: no key has several values",
                                  where=COMMAND_LINE, fix="give one a range, such as "
                                  "'ppo.optimizer.lr=tag(log,interval(1e-5,1e-3))'")
            folder = begin(shared, None)
            own = [str(setting) for setting in job_words.without(*swept.ranges).settings
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
        own_words = job_words.without("hydra.sweep.dir").adding(f"hydra.sweep.dir={place}")
        # Hydra would have a + before what a free mapping doesn't hold yet
        hydra_bridge.run_hydra(replace(own_words, settings=tuple(
            replace(each, prefix="++") if not each.prefix and keys.free_mapping_of(each.key)
            else each for each in own_words.settings)), lambda config: run_job(
                _sweep_job(words, swept)))


def _shared(words: Words, loader: ConfigLoader, swept: _Swept) -> tuple[schema.TrainConfig, Words]:
    """What all jobs share, as the first has it from words, groups and recipes, and the words of
    them all, without what is said of the sweep itself.

    Raises:
        ConfigError: what is wrong with all jobs alike.
    """
    secrets.refuse_secrets((entry.key, entry.value, entry.source) for entry in swept.shared)
    given = layers.merge_entries(swept.shared, hydra_resolves=True)
    first = first_job(words, loader).without(*(
        each.key for each in words.settings
        if each.key.startswith(("hydra.", "hydra/")) and each.key != "hydra.searchpath"))
    composed, of_sweeps = compose_here(first), of_sweep(words)
    raise_problems([*given.problems, *(
        problem for problem in range_problems(typed(given.node), given.sources)
        if problem.key in given.sources), *_plan_problems(composed.config, swept, composed.sources),
        *(problem for problem in (*composed.refused, *range_problems(
            composed.config, composed.sources)) if problem.key.startswith("sweep."))])
    of_files = compose_here(first.without(*of_sweeps)).sources
    return composed.config, words.without(*of_sweeps).adding(*(
        word for word in mapping_words({"sweep": asdict(schema.SweepConfig())})
        if word.partition("=")[0] in of_files))


def _refuse_launchers(words: Words, loader: ConfigLoader) -> None:
    """Refuse Hydra's launchers but the one that calls back in this process: a plugin would hand
    pickled jobs to processes that know nothing of the sweep's folder, signals and devices.

    Raises:
        ConfigError: the words or a file choose one, installed or not.
    """
    basic = f"{BasicLauncher.__module__}.{BasicLauncher.__qualname__}"
    name, where = words.value("hydra/launcher") or "basic", COMMAND_LINE
    if name == "basic":
        of_hydra = [str(each) for each in words.settings if each.key[:6] in ("hydra.", "hydra/")]
        composed = loader.load_configuration(hydra_bridge.config_name(words), of_hydra,
                                             RunMode.MULTIRUN)
        if (target := composed.hydra.launcher.get("_target_")) == basic:
            return
        name, where = str(composed.hydra.runtime.choices.get("hydra/launcher")), "hydra/launcher"
        name = str(target) if name == "basic" else name
    raise ConfigError(f"hydra/launcher={name}: ppocli starts the jobs of a sweep itself, without "
                      "Hydra's launcher plugins.", where=where, fix="leave it out; sweep.jobs=4 "
                      "runs four jobs at a time, sweep.launcher=slurm puts them into Slurm's queue")


def sweep_dir(words: Words) -> str | None:
    """``hydra.sweep.dir``, with what ``${now:...}`` in it is at this moment.

    Raises:
        ConfigError: something else in it would differ between jobs.
    """
    if (given := words.value("hydra.sweep.dir")) is None or "${" not in given:
        return given
    setup_globals()
    try:
        return str(OmegaConf.create({"dir": given}).dir)
    except OmegaConfBaseException as error:
        raise ConfigError(f"hydra.sweep.dir={given}: all jobs of a sweep lie in one folder",
                          where="hydra.sweep.dir", fix="of ${...} it may hold ${now:...} alone"
                          ) from error


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
    varied = tuple(word for word in task if word.lstrip("+~").partition("=")[0] in swept.ranges)
    total = None if swept.grid is None else len(swept.grid)
    return _job(words, int(settings.job.num), total, task, varied,
                Path(settings.runtime.output_dir))


def _job(words: Words, number: int, total: int | None, task: tuple[str, ...],
         varied: tuple[str, ...], folder: Path) -> SweepJob:
    own = Words((), words.flags, words.config_dirs).adding(
        *task, f"run_name={quoted(folder.name)}")  # its folder says where it runs
    return SweepJob(number, total, task, varied, folder, own)


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
        if discrete and not values:
            raise ConfigError(f"{override.input_line}: there is nothing in that range", where=name,
                              fix="let it go from its first value to below its END")
        if swept:
            ranges[name] = override
            is_grid &= discrete
            key = override.get_key_element().removeprefix("++")
            axes[key] = [f"{key}={value}" for value in values]
        if options := loader.get_group_options(name, results_filter=ObjectType.CONFIG):
            for value in values if swept else [override.get_value_element_as_str()]:
                option = value.strip("'\"")
                # one in a folder below is found by each job
                if option not in (*options, "null") and option[:1] != "[" and "/" not in option:
                    raise hydra_bridge.unknown_option(name, option, options)
        elif override.is_delete() and keys.free_mapping_of(name):
            continue  # it may be there in each job
        elif not swept:
            entries += layers.override_entries(override)
        elif keys.key_for(name) is None:
            entries.append(layers.Entry(name, None, COMMAND_LINE))
    grid = tuple(itertools.product(*axes.values())) if is_grid else None
    return _Swept(entries, grid, ranges)
