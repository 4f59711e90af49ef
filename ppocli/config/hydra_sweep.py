"""From the words of a sweep to its jobs. Hydra's multirun runs them: its sweeper, or ours for a
search, chooses the values; its launcher, which may be a plugin, decides where jobs run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.launcher import Launcher as HydraLauncher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppocli.config import hydra_bridge, keys, schema
from ppocli.config.command_words import COMMAND_LINE, Setting, Words, read_setting
from ppocli.config.compose import Composed, compose_here
from ppocli.config.config_yaml import mapping_words, quoted, schema_node
from ppocli.config.problems import Problem, raise_problems, range_problems, unknown_key
from ppocli.errors import ConfigError


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep: its number, the number of jobs (None: unknown), all its settings, those
    that differ between jobs, its folder, and the words of a single run that does the same."""

    number: int
    total: int | None
    words: tuple[str, ...]
    varied: tuple[str, ...]
    folder: Path
    typed: Words

    @cached_property
    def composed(self) -> Composed:
        """The configuration of that run. It may be composed in another process than the sweep's.

        Raises:
            ConfigError: as :func:`ppocli.config.compose.compose`.
        """
        with hydra_bridge.hydra_for(self.typed, schema_node()):
            return compose_here(self.typed)


Grid = tuple[tuple[str, ...], ...]
"""the words that differ between jobs, job by job"""


Ranges = Mapping[str, Override]
"""the swept words, in Hydra's grammar, by key"""
MakeJob = Callable[[int, tuple[str, ...]], SweepJob]
"""a job by its number and its swept words"""
RunJob = Callable[[SweepJob], float | None]
"""runs one job and returns ``checkpoint.metric``, for sweepers that optimise it; it has to pickle
where a launcher plugin is chosen"""
Search = Callable[[schema.SweepConfig, Ranges, Path, int, MakeJob,
                   Callable[[Sequence[SweepJob]], None]], None]
"""runs the jobs of ``sweep.search``; see :func:`ppocli.runs.search.run_search`"""
BASIC = "basic"
"""Hydra's own launcher: one job after another, in this process"""
SLURM = "submitit_slurm"
_SWEEPER = "hydra_plugins.ppocli.SearchSweeper"
"""Hydra builds no plugin whose name says another package; there is no such module"""
_REQUEUES = 3
"""times that a job is queued again which Slurm has preempted, or whose time was up"""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launcher that was chosen, and the number of jobs that it runs at a time (None: as many
    as it is handed)."""

    name: str
    at_a_time: int | None = 1


@dataclass(frozen=True, slots=True)
class Begin:
    """The facts about a sweep before its first job."""

    shared: schema.TrainConfig
    """the configuration of the first job, for what all jobs share"""
    grid: Grid | None
    """None where a sweeper chooses the values as it goes"""
    launcher: Launcher
    make_job: Callable[[Path, int, tuple[str, ...]], SweepJob]
    """a job by the sweep's folder, its number and its swept words"""


@dataclass(frozen=True, slots=True)
class _Task:
    """The function that Hydra calls for each job, in this process or, unpickled, in another."""

    words: Words
    swept: tuple[str, ...]
    total: int | None
    run_job: RunJob

    def __call__(self, config: DictConfig) -> float | None:
        settings = HydraConfig.get()
        task = tuple(word.removeprefix("++") for word in settings.overrides.task)
        varied = tuple(word for word in task if word.lstrip("+~").partition("=")[0] in self.swept)
        return self.run_job(_job(self.words, int(settings.job.num), self.total, task, varied,
                                 Path(settings.runtime.output_dir)))


class SearchSweeper(Sweeper):
    """``hydra/sweeper=ppocli``: hands the launcher the batches that the search asks for."""

    def __init__(self, max_batch_size: int | None = None) -> None:
        """``max_batch_size`` is read from the configuration by :func:`_launcher`."""

    launcher: HydraLauncher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
              ) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> None:
        if (search := _search.get()) is not None:
            search(self._launch)

    def _launch(self, jobs: Sequence[SweepJob]) -> None:
        self.launcher.launch([[str(_for_hydra(read_setting(word))) for word in job.words]
                              for job in jobs], initial_job_idx=jobs[0].number)


# Hydra builds its plugins from their configuration alone; this carries the search to its sweeper
_search: ContextVar[Callable[[Callable[[Sequence[SweepJob]], None]], None] | None] = ContextVar(
    "ppocli_search", default=None)


def run_sweep_jobs(words: Words, begin: Callable[[Begin], tuple[Path, RunJob]], search: Search
                   ) -> None:
    """Let Hydra run the jobs.

    Problems that all jobs share are raised before any of them starts; those of one job are raised
    by ``SweepJob.composed``.

    Args:
        begin: returns the sweep's folder and the function that runs one job.

    Raises:
        ConfigError: wrong words, or words that contradict a sweep.
    """
    if words.value("resume") not in (None, "auto", "never"):
        raise ConfigError("resume=FOLDER goes on with one run and can't be swept",
                          where=COMMAND_LINE, fix="to go on with a sweep: the same words, "
                          "hydra.sweep.dir=FOLDER resume=auto")
    with hydra_bridge.hydra_for(words, _untyped()):
        loader = hydra_bridge.config_loader()
        swept = _sweep_words(loader, words.overrides)
        launcher = _launcher(words, loader)
        shared, job_words = _shared(words, loader, swept)
        plan, searches = shared.sweep, shared.sweep.search != "grid"
        _check_ranges(swept, searches)
        if searches and launcher.at_a_time is None:
            raise ConfigError(f"hydra/launcher={launcher.name}: a search has to know how many jobs "
                              "run at a time", where=COMMAND_LINE,
                              fix="for four of them add hydra.sweeper.max_batch_size=4")
        total = plan.trials if searches else None if swept.grid is None else len(swept.grid)
        shared_words = [str(setting) for setting in job_words.without(*swept.ranges).settings
                        if not setting.key.startswith(("hydra.", "hydra/"))]

        def make_job(folder: Path, number: int, varied: tuple[str, ...]) -> SweepJob:
            return _job(words, number, total, (*shared_words, *varied), varied,
                        folder / str(number))

        folder, run_job = begin(Begin(shared, None if searches else swept.grid, launcher, make_job))
        of_hydra = [f"hydra.sweep.dir={quoted(str(folder))}"]
        if launcher.name == SLURM and words.value("hydra.launcher.max_num_timeout") is None:
            of_hydra.append(f"hydra.launcher.max_num_timeout={_REQUEUES}")
        if searches:
            Plugins.instance().class_name_to_class[_SWEEPER] = SearchSweeper
            ConfigStore.instance().store(
                group="hydra/sweeper", name="ppocli", provider="ppocli",
                node={"_target_": _SWEEPER, "max_batch_size": None})
            of_hydra.append("hydra/sweeper=ppocli")
        token = _search.set(lambda run_batch: search(
            plan, swept.ranges, folder, launcher.at_a_time or 1,
            partial(make_job, folder), run_batch))
        hydra_words = job_words.without("hydra.sweep.dir").adding(*of_hydra)
        try:
            hydra_bridge.run_hydra(
                replace(hydra_words, settings=tuple(map(_for_hydra, hydra_words.settings))),
                _Task(Words((), words.flags, words.config_dirs), tuple(swept.ranges), total,
                      run_job))
        finally:
            _search.reset(token)


def _untyped() -> DictConfig:
    """The schema without types: a job with a wrong value fails alone, not the whole sweep."""
    return cast(DictConfig, OmegaConf.create(OmegaConf.to_container(schema_node())))


def _for_hydra(setting: Setting) -> Setting:
    """Hydra wants a + before what a free mapping doesn't hold yet."""
    return replace(setting, prefix="++") if not setting.prefix and keys.free_mapping_of(
        setting.key) else setting


def _check_ranges(swept: _Swept, searches: bool) -> None:
    if searches and not swept.ranges:
        raise ConfigError("there is nothing to search: no key has several values",
                          where=COMMAND_LINE, fix="give one a range, such as "
                          "'ppo.optimizer.lr=tag(log,interval(1e-5,1e-3))'")
    if not searches and swept.grid is None and (ranged := [
            each.input_line for each in swept.ranges.values() if not each.is_discrete_sweep()]):
        raise ConfigError(f"{ranged[0]}: a grid has no end of values between two",
                          where=COMMAND_LINE, fix="add sweep.search=optuna or sweep.search="
                          "random, or list the values")


def _launcher(words: Words, loader: hydra_bridge.Loader) -> Launcher:
    """The launcher of the words and files.

    Raises:
        ConfigError: one of its settings is wrong.
    """
    of_hydra = [str(each) for each in words.settings if each.key.startswith(("hydra.", "hydra/"))]
    hydra = loader.load_configuration(hydra_bridge.PRIMARY, of_hydra,
                                      RunMode.MULTIRUN).hydra
    name = str(hydra.runtime.choices.get("hydra/launcher") or BASIC)
    if name == BASIC:
        return Launcher(name)
    batch, jobs = hydra.sweeper.get("max_batch_size"), hydra.launcher.get("n_jobs")
    if jobs is not None and jobs < 0:
        jobs = len(os.sched_getaffinity(0))
    return Launcher(name, min((int(each) for each in (batch, jobs) if each), default=None))


def _shared(words: Words, loader: hydra_bridge.Loader, swept: _Swept
            ) -> tuple[schema.TrainConfig, Words]:
    """The configuration of the first job, for what all jobs share, and the words of all jobs
    without the settings of the sweep itself.

    Raises:
        ConfigError: problems that all jobs share.
    """
    def composed_of(*left_out: str) -> Composed:
        kept = first.without(*left_out)
        with hydra_bridge.hydra_for(kept, schema_node()):
            return compose_here(kept)

    first = hydra_bridge.first_job(words, loader)
    first = first.without(*(each.key for each in words.settings
                            if each.key.startswith(("hydra.", "hydra/"))))
    try:
        composed = composed_of()
    except ConfigError:
        if not swept.groups:
            raise
        composed = composed_of(*swept.groups)  # the first job alone fails
    problems = [*composed.refused, *range_problems(composed.config, composed.sources)]
    raise_problems([*swept.unknown, *_plan_problems(composed.config, composed.sources), *(
        problem for problem in problems if problem.key.startswith("sweep.") or (
            problem.source == COMMAND_LINE and problem.key not in swept.ranges))])
    of_sweep = words.of_sweep
    in_files = composed_of(*of_sweep).sources if of_sweep else composed.sources
    return composed.config, words.without(*of_sweep).adding(*(
        word for word in mapping_words({"sweep": asdict(schema.SweepConfig())})
        if word.partition("=")[0] in in_files))


def sweep_dir(words: Words) -> str | None:
    """``hydra.sweep.dir``, with ``${now:...}`` resolved.

    Raises:
        ConfigError: another interpolation in it would differ between jobs.
    """
    if (folder := words.value("hydra.sweep.dir")) is None or "${" not in folder:
        return folder
    setup_globals()
    try:
        return str(OmegaConf.create({"dir": folder}).dir)
    except OmegaConfBaseException as error:
        raise ConfigError(f"hydra.sweep.dir={folder}: all jobs of a sweep lie in one folder",
                          where="hydra.sweep.dir", fix="of ${...} it may hold ${now:...} alone"
                          ) from error


def _plan_problems(config: schema.TrainConfig, sources: Mapping[str, str]
                   ) -> Iterator[Problem]:
    """Settings of a sweep that contradict each other, or would have no effect."""
    plan = config.sweep
    for key in ("sweep.trials", "sweep.metric", "sweep.direction", "sweep.seed"):
        if plan.search == "grid" and key in sources:
            yield Problem(key, "a grid runs every combination: it has an effect with "
                          "sweep.search=random or sweep.search=optuna", sources[key])


@dataclass(frozen=True, slots=True)
class _Swept:
    """What is swept."""

    grid: Grid | None
    """the swept words of each job; None: the sweep isn't a grid"""
    ranges: Ranges
    groups: list[str]
    """config groups among the swept words"""
    unknown: list[Problem]
    """swept keys that don't exist"""


def _job(words: Words, number: int, total: int | None, task: tuple[str, ...],
         varied: tuple[str, ...], folder: Path) -> SweepJob:
    single = Words((), words.flags, words.config_dirs).adding(
        *task, f"run_name={quoted(folder.name)}")  # its folder says where it runs
    return SweepJob(number, total, task, varied, folder, single)


def _sweep_words(loader: hydra_bridge.Loader, overrides: list[str]) -> _Swept:
    """Read what is swept. Config groups and recipes must exist; other swept values are checked in
    their jobs.

    Raises:
        ConfigError: an unknown option of a group, or an empty range.
    """
    # Hydra's own sweeper: the product of all values, the last key changing fastest
    axes: dict[str, list[str]] = {}
    ranges: dict[str, Override] = {}
    groups: list[str] = []
    unknown: list[Problem] = []
    is_grid = True
    for override in OverridesParser.create(config_loader=loader).parse_overrides(overrides):
        name = override.key_or_group
        is_grid &= name != "hydra/sweeper" and (not name.startswith("hydra.sweeper")
                                                or name == "hydra.sweeper.max_batch_size")
        if name.startswith("hydra."):
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
            groups += [name] * swept
            for value in values if swept else [override.get_value_element_as_str()]:
                option = value.strip("'\"")
                # one in a folder below is looked up by each job
                if option not in (*options, "null") and option[:1] != "[" and "/" not in option:
                    raise hydra_bridge.unknown_option(name, option, options)
        elif swept and keys.key_for(name) is None:
            unknown.append(unknown_key(name, COMMAND_LINE))
    return _Swept(tuple(itertools.product(*axes.values())) if is_grid else None, ranges, groups,
                  unknown)
