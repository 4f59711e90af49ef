"""From the words of a sweep to its jobs, which Hydra's launcher plugins may run elsewhere."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from ppocli.config import hydra_bridge, keys, schema
from ppocli.config.command_words import COMMAND_LINE, Words
from ppocli.config.compose import compose
from ppocli.config.config_yaml import mapping_words, quoted, schema_node
from ppocli.config.problems import Problem, raise_problems, range_problems
from ppocli.errors import ConfigError

BASIC = "basic"
"""one job after another, in this terminal"""
SLURM = "submitit_slurm"
_REQUEUES = 3
"""times that a job is queued again which Slurm has preempted, or whose time was up"""
_PLACE = ("resume", "run_name", "output_dir")
"""keys that say where a run lies, which a sweep decides for its jobs"""
Grid = tuple[tuple[str, ...], ...]
"""the words that differ between jobs, job by job"""
Ranges = Mapping[str, Override]
"""the swept words, in Hydra's grammar, by key"""


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep: its number, the words that differ between jobs, its folder, and the words
    of a single run that does the same."""

    number: int
    varied: tuple[str, ...]
    folder: Path
    words: Words


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What the words of a sweep ask for."""

    words: Words
    shared: schema.TrainConfig
    """the configuration of the first job, for what all jobs share"""
    ranges: Ranges
    grid: Grid
    """empty for a search, which chooses values as it goes"""
    launcher: str
    batch: int | None
    """jobs that the launcher is handed at a time; None: all"""
    at_a_time: int | None
    """jobs that run at a time; None: as many as the launcher is handed"""

    def job(self, folder: Path, number: int, varied: tuple[str, ...]) -> SweepJob:
        """A job of the sweep in ``folder``."""
        shared = _single(self.words).without(*self.ranges, *self.words.of_sweep)
        return SweepJob(number, varied, folder / str(number), shared.adding(
            *mapping_words({"sweep": asdict(schema.SweepConfig())}), *varied,
            f"output_dir={quoted(str(folder))}", f"run_name={quoted(str(number))}"))


def _single(words: Words) -> Words:
    """The words of a sweep without those of Hydra and those that say where it lies."""
    return words.without("--multirun", *_PLACE, *(
        each.key for each in words.settings if each.key.startswith(("hydra.", "hydra/"))))


def _of_hydra(words: Words) -> list[str]:
    return [str(each) for each in words.settings if each.key.startswith(("hydra.", "hydra/"))
            and each.key not in ("hydra.sweep.dir", "hydra.mode")]


def read_plan(words: Words) -> SweepPlan:
    """Read what is swept, and where the jobs run.

    Raises:
        ConfigError: wrong words, words that contradict a sweep, or problems that all jobs share;
            those of one job are left to it.
    """
    if words.value("resume") not in (None, "never"):
        raise ConfigError("resume=... continues one run, and this is a sweep.", where=COMMAND_LINE,
                          fix="ppocli sweep resume FOLDER continues a sweep")
    with hydra_bridge.hydra_for(words, schema_node()):
        loader = hydra_bridge.config_loader()
        hydra = loader.load_configuration(hydra_bridge.PRIMARY, _of_hydra(words),
                                          RunMode.MULTIRUN).hydra
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words.overrides)
        ranges = {each.key_or_group: each for each in overrides
                  if each.is_sweep_override() and not each.key_or_group.startswith("hydra.")}
        axes = [[f"{each.get_key_element().removeprefix('++')}={value}"
                 for value in each.sweep_string_iterator()]
                for each in ranges.values() if each.is_discrete_sweep()]
        first = hydra_bridge.first_job(words, loader)
    if hydra.runtime.choices["hydra/sweeper"] != "basic":
        raise ConfigError("Sweepers of Hydra's are not used.", where="hydra/sweeper",
                          fix="sweep.search=optuna or sweep.search=random chooses the jobs")
    composed = compose(_single(first))
    shared, sources = composed.config, composed.sources
    raise_problems([*_problems(shared, sources, ranges), *(
        problem for problem in (*composed.refused, *range_problems(shared, sources))
        if problem.key.startswith("sweep.") or (problem.source == COMMAND_LINE and (
            problem.key not in ranges or keys.key_for(problem.key) is None)))])
    batch, jobs = hydra.sweeper.get("max_batch_size"), hydra.launcher.get("n_jobs")
    if jobs is not None and jobs < 0:
        jobs = len(os.sched_getaffinity(0))
    launcher = str(hydra.runtime.choices["hydra/launcher"])
    at_a_time = 1 if launcher == BASIC else min(filter(None, (batch, jobs)), default=None)
    grid = tuple(itertools.product(*axes)) if shared.sweep.search == "grid" else ()
    if at_a_time is None and not grid:
        raise ConfigError(f"hydra/launcher={launcher}: a search has to know how many jobs run at a "
                          "time", where=COMMAND_LINE,
                          fix="for four of them add hydra.sweeper.max_batch_size=4")
    return SweepPlan(words, shared, ranges, grid, launcher, batch, at_a_time)


def _problems(config: schema.TrainConfig, sources: Mapping[str, str], ranges: Ranges
              ) -> Iterator[Problem]:
    """Settings of a sweep that contradict each other, or would have no effect."""
    for key in _PLACE:
        if key in ranges:
            yield Problem(key, "a sweep has one place, and its jobs have numbers: give one value",
                          COMMAND_LINE)
    if config.sweep.search != "grid":
        if not ranges:
            yield Problem("sweep.search", "there is nothing to search: give a key a range, such as "
                          "'ppo.optimizer.lr=tag(log,interval(1e-5,1e-3))'", COMMAND_LINE)
        return
    for key in ("sweep.trials", "sweep.metric", "sweep.direction", "sweep.seed"):
        if key in sources:
            yield Problem(key, "a grid runs every combination: it has an effect with "
                          "sweep.search=random or sweep.search=optuna", sources[key])
    for key, each in ranges.items():
        if not each.is_discrete_sweep():
            yield Problem(key, f"{each.input_line}: a grid has no end of values between two: add "
                          "sweep.search=optuna or sweep.search=random, or list the values",
                          COMMAND_LINE)
        elif not list(each.sweep_string_iterator()):
            yield Problem(key, f"{each.input_line}: there is nothing in that range", COMMAND_LINE)


@dataclass(frozen=True, slots=True)
class _Task:
    """The function that Hydra calls for each job, perhaps in another process."""

    jobs: Sequence[SweepJob]
    run_job: Callable[[SweepJob], None]

    def __call__(self, config: DictConfig) -> None:
        self.run_job(self.jobs[int(HydraConfig.get().job.num)])


def launch_jobs(plan: SweepPlan, folder: Path, jobs: Sequence[SweepJob],
                run_job: Callable[[SweepJob], None]) -> None:
    """Let the launcher plugin run jobs, and wait for them.

    Args:
        folder: the sweep's.
        run_job: has to pickle, and to raise nothing.

    Raises:
        ConfigError: wrong settings of the launcher.
    """
    words = [*_of_hydra(plan.words), f"hydra.sweep.dir={quoted(str(folder))}",
             "hydra.sweep.subdir=.launcher", "hydra.job.name=ppocli"]
    if plan.launcher == SLURM and plan.words.value("hydra.launcher.max_num_timeout") is None:
        words.append(f"hydra.launcher.max_num_timeout={_REQUEUES}")
    size = plan.batch or len(jobs)
    with hydra_bridge.hydra_for(plan.words, schema_node()):
        loader = hydra_bridge.config_loader()
        config = loader.load_configuration(hydra_bridge.PRIMARY, words, RunMode.MULTIRUN)
        for start in range(0, len(jobs), size):
            batch = jobs[start:start + size]
            launcher = Plugins.instance().instantiate_launcher(
                HydraContext(loader, Callbacks()), _Task(batch, run_job), config)
            launcher.launch([[] for _ in batch], initial_job_idx=0)
