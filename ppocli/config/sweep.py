"""The jobs of a sweep (``ppocli train -m``): Hydra's sweeper chooses them, and each is composed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ppocli.config.compose import Composed, compose_here
from ppocli.config.hydra_bridge import as_config_errors, config_loader, hydra_for, run_hydra
from ppocli.config.keys import free_mapping_of, key_for
from ppocli.config.layers import Entry, merge_entries, override_entries
from ppocli.config.problems import raise_problems, range_problems
from ppocli.config.resolved import schema_node, typed
from ppocli.config.secrets import refuse_secrets
from ppocli.config.words import COMMAND_LINE, Words, quoted
from ppocli.errors import ConfigError
from ppocli.text import did_you_mean


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep: its number, how many there are (None: unknown), all its words, those
    that differ between jobs, its folder, and what its words compose to (raises ConfigError)."""

    number: int
    total: int | None
    words: tuple[str, ...]
    varied: tuple[str, ...]
    folder: Path
    compose: Callable[[], Composed]


Grid = tuple[tuple[str, ...], ...]
"""the words that differ between jobs, job by job"""


def run_sweep_jobs(words: Words, run_job: Callable[[SweepJob], float | None],
                   begin: Callable[[Grid | None], Path]) -> None:
    """Let Hydra's sweeper run ``run_job`` for each job.

    What is wrong with all jobs alike is told before any of them starts; ``SweepJob.compose``
    tells what is wrong with one. ``run_job`` returns what an optimising sweeper maximises.

    Args:
        begin: gets the jobs that are planned, None where the sweeper chooses them as it goes, and
            returns the sweep's folder.

    Raises:
        ConfigError: wrong words, or words that contradict a sweep.
    """
    if words.value("resume") not in (None, "auto", "never"):
        raise ConfigError("resume=FOLDER goes on with one run and can't be swept",
                          where=COMMAND_LINE,
                          fix="to go on with a sweep: the same words, hydra.sweep.dir=FOLDER "
                              "resume=auto")
    # untyped, so that a job with a wrong value is that job's failure and not the sweep's
    untyped = OmegaConf.create(OmegaConf.to_container(schema_node()))
    with hydra_for(words, cast(DictConfig, untyped)):
        swept = _sweep_words(config_loader(words), words.overrides)
        refuse_secrets((entry.key, entry.value, entry.source) for entry in swept.shared)
        merged = merge_entries(swept.shared, hydra_resolves=True)
        raise_problems([*merged.problems, *(
            problem for problem in range_problems(typed(merged.node), merged.sources)
            if problem.key in merged.sources)])
        folder = quoted(str(begin(swept.grid)))
        run_hydra(words.without("hydra.sweep.dir").adding(f"hydra.sweep.dir={folder}"),
                  lambda config: run_job(_sweep_job(words, swept)))


def _sweep_job(words: Words, swept: _Swept) -> SweepJob:
    """The job that Hydra runs now."""
    settings = HydraConfig.get()
    task = tuple(settings.overrides.task)
    search = [word for word in settings.overrides.hydra if word.startswith("hydra.searchpath")]
    folder = Path(settings.runtime.output_dir)
    own = Words((), words.flags, words.config_dirs).adding(
        *search, *task, f"run_name={quoted(folder.name)}")  # its folder says where it runs

    @cache
    def composed() -> Composed:
        with as_config_errors():
            return compose_here(own)

    varied = tuple(word for word in task if word.lstrip("+~").partition("=")[0] in swept.varied)
    return SweepJob(int(settings.job.num), swept.jobs, task, varied, folder, composed)


@dataclass(frozen=True, slots=True)
class _Swept:
    """What all jobs of a sweep share on the command line, the keys that differ between them, and
    the words that set these, job by job (None: the sweep isn't a grid)."""

    shared: list[Entry]
    varied: frozenset[str]
    grid: Grid | None

    @property
    def jobs(self) -> int | None:
        """How many jobs there are (None: it isn't known)."""
        return None if self.grid is None else len(self.grid)


def _sweep_words(loader: ConfigLoader, overrides: list[str]) -> _Swept:
    """Tell what is swept.

    Config groups and recipes must exist in all the swept spellings; the swept values themselves
    are checked in their jobs.
    """
    entries: list[Entry] = []
    # Hydra's own sweeper: the product of all values, the last key changing fastest
    axes: dict[str, list[str]] = {}
    varied: set[str] = set()
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
            varied.add(name)
            is_grid &= discrete
            key = override.get_key_element()
            axes[key] = [f"{key}={value}" for value in values]
        options = loader.get_group_options(name, results_filter=ObjectType.CONFIG)
        if options:
            for value in values or [] if swept else [override.get_value_element_as_str()]:
                _check_option(name, value.strip("'\""), options)
        elif override.is_delete() and free_mapping_of(name):
            continue  # it may be there in each job
        elif not swept:
            entries += override_entries(override)
        elif key_for(name) is None:
            entries.append(Entry(name, None, COMMAND_LINE))
    grid = tuple(itertools.product(*axes.values())) if is_grid else None
    return _Swept(entries, frozenset(varied), grid)


def _check_option(group: str, value: str, options: list[str]) -> None:
    if value not in (*options, "null") and not value.startswith("["):
        kind = "recipe" if group == "recipe" else f"option of the config group {group}:"
        raise ConfigError(f"unknown {kind} {value}{did_you_mean(value, options)}",
                          where=COMMAND_LINE, fix="choose one of: " + ", ".join(options))
