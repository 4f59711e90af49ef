"""From words on the command line to a checked configuration: the only caller of ``hydra.main``.

Hydra composes; before it does, the same words and files are checked entry by entry
(:mod:`ppocli.config.layers`), so that everything wrong is told at once and with its source, and
so that no secret is ever printed or written.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import cast

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ppocli.config.hydra_errors import as_config_errors
from ppocli.config.keys import schema_keys, schema_sections
from ppocli.config.layers import (
    COMMAND_LINE,
    SCHEMA,
    Checked,
    SweepWords,
    check_entries,
    layered_entries,
    sweep_words,
)
from ppocli.config.paths import config_groups, shipped
from ppocli.config.problems import Problem, find_problems, raise_problems, range_problems
from ppocli.config.quoting import quoted, unquoted
from ppocli.config.recipe_source import looking_in, register_plugins
from ppocli.config.resolved import CONFIG_FILE, read_config, schema_node, typed
from ppocli.config.schema import TrainConfig
from ppocli.config.secrets import refuse_secrets
from ppocli.config.words import Words, read_words, split_override
from ppocli.errors import CheckpointError, ConfigError, DiskError
from ppocli.text import did_you_mean

_START_HINT = "start from a recipe, e.g. ppocli train +recipe=quickstart (ppocli recipes list)"


@dataclass(frozen=True, slots=True)
class Composition:
    """A checked configuration, and what the words said beside it.

    ``recipe`` names the recipe, if one was chosen; ``resume_from`` is the run folder of
    ``resume=FOLDER``; ``sources`` says where each given key came from.
    """

    config: TrainConfig
    recipe: str | None
    resume_from: Path | None
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Draft:
    """What the words of one run come to, right or not. ``config`` has the default in place of a
    value that was refused, and ``???`` where a mandatory one is missing."""

    config: TrainConfig
    problems: tuple[Problem, ...]
    fix: str | None
    resume_from: Path | None


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep: its number, how many there are (None: unknown), all its words, those
    that differ between jobs, its folder, and the composition of its words (raises ConfigError)."""

    number: int
    total: int | None
    words: tuple[str, ...]
    varied: tuple[str, ...]
    folder: Path
    compose: Callable[[], Composition]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep about to start: its folder, whether that is new, and the words that differ between
    jobs, job by job (None: its sweeper chooses them as it goes)."""

    folder: Path
    new: bool
    grid: tuple[tuple[str, ...], ...] | None


def compose(words: Sequence[str], *, handed_in: frozenset[str] = frozenset()) -> Composition | None:
    """Compose and check the configuration of one run.

    Args:
        words: the command line after ``train``: overrides and Hydra's flags in any order.
        handed_in: keys whose value is a Python object (see :func:`find_problems`).

    Returns:
        None when the words asked Hydra to print something (``--cfg job``, ``--info``, ...).

    Raises:
        ConfigError: everything that is wrong with the words, the recipe and the config files.
        CheckpointError: ``resume=FOLDER`` names no run folder.
    """
    read = _read(words)
    if read.is_sweep:
        raise ConfigError("a sweep can't be composed as one run", where=COMMAND_LINE,
                          fix="leave out -m")
    read, run = _take_resume(read)
    with looking_in(read.config_dirs, run), as_config_errors():
        register_plugins()
        _store_schema(schema_node())
        checked = _check(read)
        _check_package(read)
        if read.only_prints:
            raise_problems(list(checked.problems))
            _call_hydra(lambda config: None, read)
            return None
        raise_problems(_all_problems(checked, handed_in), _fix(checked))
        return _composition(_compose_run(read), read, checked, run)


def draft(words: Sequence[str]) -> Draft:
    """The configuration of one run with everything that is wrong with it, for whoever has more to
    check before he tells.

    Raises:
        ConfigError: words that can't be read, secrets, unknown recipes and options of groups,
            files that are no YAML: there is nothing to check beside.
        CheckpointError: ``resume=FOLDER`` names no run folder.
    """
    read, run = _take_resume(_read(words))
    with looking_in(read.config_dirs, run), as_config_errors():
        register_plugins()
        _store_schema(schema_node())
        checked = _check(read)
        return Draft(typed(checked.node), tuple(_all_problems(checked, frozenset())),
                     _fix(checked), run)


def compose_values(words: Sequence[str]) -> TrainConfig:
    """The values that words compose to, without checking that they make a whole run.

    Raises:
        ConfigError: unknown names, keys that don't exist, values of a wrong type.
    """
    read = _read(words)
    with looking_in(read.config_dirs, None), as_config_errors():
        register_plugins()
        _store_schema(schema_node())
        checked = _check(read)
        raise_problems(list(checked.problems))
        return typed(checked.node)


def compose_sweep(words: Sequence[str], run_job: Callable[[SweepJob], float | None],
                  begin: Callable[[SweepPlan], None] = lambda plan: None) -> Path:
    """Let Hydra's sweeper run ``run_job`` for each job, after ``begin``; return the sweep's folder.

    The folder is ``hydra.sweep.dir``, by default a new ``sweep-DATE-TIME`` in ``output_dir``.
    What is wrong with all jobs alike is told before any of them starts; ``SweepJob.compose``
    raises what is wrong with one. ``run_job`` returns what an optimising sweeper maximises.

    Raises:
        ConfigError: wrong words, or words that contradict a sweep.
        DiskError: the sweep's folder can't be made.
    """
    read = _read(words)
    if any(split_override(word)[1] == "resume" and split_override(word)[2] not in ("auto", "never")
           for word in read.overrides):
        raise ConfigError("resume=FOLDER goes on with one run and can't be swept",
                          where=COMMAND_LINE,
                          fix="to go on with a sweep: the same words, hydra.sweep.dir=FOLDER "
                              "resume=auto")
    with looking_in(read.config_dirs, None), as_config_errors():
        register_plugins()
        # untyped, so that a job with a wrong value is that job's failure and not the sweep's
        _store_schema(cast(DictConfig, OmegaConf.create(OmegaConf.to_container(schema_node()))))
        with _loader(read) as loader:
            swept = sweep_words(loader, list(read.overrides))
        refuse_secrets((entry.key, entry.value, entry.source) for entry in swept.shared)
        checked = check_entries(swept.shared)
        raise_problems([*checked.problems, *(
            problem for problem in range_problems(typed(checked.node), checked.sources)
            if problem.key in checked.sources)])
        folder, made = _sweep_folder(read)
        read = replace(read, overrides=(*(w for w in read.overrides if not _sets_sweep_dir(w)),
                                        f"hydra.sweep.dir={quoted(str(folder))}"))
        try:
            begin(SweepPlan(folder, made, swept.grid))
            _call_hydra(lambda config: run_job(_sweep_job(config, read, swept)), read)
        finally:
            if made and not any(folder.iterdir()):
                folder.rmdir()
    return folder


def is_sweep(words: Sequence[str]) -> bool:
    """Whether the words ask for several jobs (``-m``)."""
    return read_words(words).is_sweep


def _read(words: Sequence[str]) -> Words:
    read = read_words(words, os.environ.get("PPOCLI_CONFIG_DIR", ""))
    parts = [split_override(word) for word in read.overrides]
    refuse_secrets((key, value, COMMAND_LINE) for _, key, value in parts)
    return read


def _take_resume(read: Words) -> tuple[Words, Path | None]:
    """``resume=FOLDER`` as the config source that it is; other values stay words."""
    folders = [value for _, key, value in map(split_override, read.overrides)
               if key == "resume" and value and unquoted(value) not in ("auto", "never")]
    if not folders:
        return read, None
    run = Path(unquoted(folders[-1])).expanduser().absolute()
    if not run.is_dir():
        raise CheckpointError(f"resume={folders[-1]}: there is no such folder", where=str(run),
                              fix="give a run folder, e.g. resume=runs/NAME; to start afresh leave "
                                  "resume out")
    read_config(run / CONFIG_FILE)
    kept = [word for word in read.overrides if split_override(word)[1] != "resume"]
    groups = [split_override(word)[1] for word in kept
              if split_override(word)[1] in (*config_groups(), "recipe")]
    if groups:
        raise ConfigError(f"{', '.join(groups)} can't be chosen when a run is resumed: its own "
                          "config.yaml is the base", where=COMMAND_LINE,
                          fix="override single keys instead, e.g. ppo.total_episodes=4000")
    return replace(read, overrides=("+run=config", *kept)), run


def _store_schema(node: DictConfig) -> None:
    ConfigStore.instance().store(name=SCHEMA, node=node, provider="ppocli")


def _config_path(read: Words) -> str:
    given = read.flag("--config-path")
    folder = Path(given).expanduser().absolute() if given else shipped("conf")
    if not folder.is_dir():
        raise ConfigError(f"config folder {given} does not exist", where="--config-path",
                          fix="to add a folder to the shipped ones use --config-dir")
    return str(folder)


@contextmanager
def _loader(read: Words) -> Iterator[ConfigLoader]:
    # a job of a sweep runs inside Hydra, which allows one instance at a time
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(_config_path(read), version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


def _check(read: Words) -> Checked:
    if read.flag("--hydra-help") is not None or read.flag("--shell-completion") is not None:
        return Checked(schema_node())
    with _loader(read) as loader:
        entries = layered_entries(loader, _config_name(read), list(read.overrides))
    refuse_secrets((entry.key, entry.value, entry.source) for entry in entries)
    return check_entries(entries)


def _check_package(read: Words) -> None:
    package = read.flag("--package")
    names = [*schema_keys(), *schema_sections()]
    if package and package not in (*names, "_global_", "hydra") \
            and not package.startswith("hydra."):
        raise ConfigError(f"--package {package}: there is no such part of the configuration"
                          + did_you_mean(package, names), where=COMMAND_LINE)


def _all_problems(checked: Checked, handed_in: frozenset[str]) -> list[Problem]:
    # a key whose value was refused still holds its default: don't report that as missing too
    refused = {problem.key for problem in checked.problems}
    found = find_problems(typed(checked.node), checked.sources, handed_in)
    return [*checked.problems,
            *(p for p in found if not refused.intersection(p.key.split(", ")))]


def _fix(checked: Checked) -> str | None:
    return None if checked.sources else _START_HINT


def _composition(node: DictConfig, read: Words, checked: Checked, run: Path | None) -> Composition:
    config = typed(cast(DictConfig, OmegaConf.merge(schema_node(), node)))
    if config.resume not in ("never", "auto"):
        raise ConfigError(f"resume: {config.resume}: a run folder goes on the command line only",
                          where=checked.sources.get("resume"), fix=f"resume={config.resume}")
    recipe = next((value for _, key, value in map(split_override, read.overrides)
                   if key == "recipe"), None)
    return Composition(config, recipe, run, checked.sources)


def _sweep_job(config: DictConfig, read: Words, swept: SweepWords) -> SweepJob:
    settings = HydraConfig.get()
    task = tuple(settings.overrides.task)
    search = tuple(word for word in settings.overrides.hydra
                   if word.startswith("hydra.searchpath"))
    folder = Path(settings.runtime.output_dir)
    # the job's folder, not a name, says where it runs
    job = replace(read, overrides=(*search, *task, f"run_name={quoted(folder.name)}"))

    def composition() -> Composition:
        with as_config_errors():
            checked = _check(job)
            raise_problems(_all_problems(checked, frozenset()))
            return _composition(config, job, checked, None)

    varied = tuple(word for word in task if split_override(word)[1] in swept.varied)
    return SweepJob(int(settings.job.num), swept.jobs, task, varied, folder, composition)


def _sets_sweep_dir(word: str) -> bool:
    return split_override(word)[1] == "hydra.sweep.dir"


def _sweep_folder(read: Words) -> tuple[Path, bool]:
    """The sweep's folder, made, and whether it is new."""
    given = {key: value for _, key, value in map(split_override, read.overrides) if value}
    try:
        if "hydra.sweep.dir" in given:
            folder = Path(unquoted(given["hydra.sweep.dir"])).expanduser().absolute()
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            return folder, new
        base = given.get("output_dir", "")
        base = "runs" if not base or "," in base or "(" in base else unquoted(base)
        name = f"sweep-{datetime.now():%Y%m%d-%H%M%S}"
        return new_folder(Path(base).expanduser().absolute(), name), True
    except OSError as error:
        raise DiskError(f"the sweep's folder can't be made: {error.strerror}",
                        where=str(error.filename),
                        fix="choose another with hydra.sweep.dir=FOLDER") from error


def new_folder(base: Path, name: str) -> Path:
    """Make ``base/name``, or ``base/name-2``, ... if taken; two callers never share one.

    Raises:
        OSError: ``base`` can't be written.
    """
    base.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = base / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _compose_run(read: Words) -> DictConfig:
    # hydra.main would compose it twice: the first time to see whether it's a sweep after all
    with _loader(read):
        return hydra.compose(_config_name(read), list(read.overrides))


def _config_name(read: Words) -> str:
    return read.flag("--config-name") or "train"


def _call_hydra(job: Callable[[DictConfig], object], read: Words) -> None:
    def task(config: DictConfig) -> object:
        return job(config)

    with _process_state(["ppocli train", *read.argv()]):
        try:
            hydra.main(version_base="1.3", config_path=_config_path(read),
                       config_name=_config_name(read))(task)()
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                raise ConfigError("Hydra refused the command line (see above)",
                                  where=COMMAND_LINE) from leaving


@contextmanager
def _process_state(argv: list[str]) -> Iterator[None]:
    """Hydra reads ``sys.argv``, hands on exceptions only under ``HYDRA_FULL_ERROR``, and under
    ``--info`` logs to the terminal from then on."""
    old_argv, old_full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    root = logging.getLogger()
    old_handlers = list(root.handlers)
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = old_argv
        root.handlers[:] = old_handlers
        if old_full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = old_full
