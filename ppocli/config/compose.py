"""From words to a checked configuration, ``check(compose(read_words(...)))``, or to those of the
jobs of a sweep (``ppocli train -m``), which Hydra's sweeper chooses.

Hydra says which config files the words choose and in which order; their settings, and those of the
command line, are then merged one by one (:mod:`ppocli.config.layers`), so that everything wrong is
told at once and with its source, and so that no secret is ever printed or written.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ppocli.builtin.names import config_groups
from ppocli.config import hydra_bridge, keys, layers, resolved, schema, secrets
from ppocli.config.kept import keeping_styles, settings_before
from ppocli.config.problems import Problem, find_problems, raise_problems, range_problems
from ppocli.config.resolved import CONFIG_FILE, quoted, schema_node, typed
from ppocli.config.words import ACCEPT_CHANGES, COMMAND_LINE, Words
from ppocli.errors import CheckpointError, ConfigError
from ppocli.own_code import TRUST
from ppocli.text import did_you_mean

_START_HINT = "start from a recipe, e.g. ppocli train +recipe=quickstart (ppocli recipes list)"


@dataclass(frozen=True, slots=True)
class Composed:
    """What the words of one run come to, right or not.

    ``config`` has the default in place of a value that was refused, and ``???`` where a mandatory
    one is missing; ``refused`` says what was. ``sources`` says where each given key came from.
    """

    config: schema.TrainConfig
    refused: tuple[Problem, ...]
    sources: Mapping[str, str]
    recipe: str | None
    resume_from: Path | None
    """the run folder of ``resume=FOLDER``"""
    accept_changes: bool = False
    """what was changed by hand in the config.yaml of a run that goes on counts"""
    typed: frozenset[str] = frozenset()
    """as :attr:`ppocli.config.layers.Merged.typed`"""
    trusts: bool = False
    """``--trust``: what the run's configuration names may run"""
    note: str | None = None
    """what the words ask for and don't get (:func:`ppocli.config.layers.overruled`)"""

    @property
    def hint(self) -> str | None:
        """How to begin, for words that set nothing at all."""
        return None if self.sources else _START_HINT

    def values(self) -> schema.TrainConfig:
        """The values, which need not make a whole run.

        Raises:
            ConfigError: keys that don't exist, values of a wrong type.
        """
        raise_problems(list(self.refused))
        return self.config

    def problems(self, handed_in: frozenset[str] = frozenset()) -> list[Problem]:
        """Everything that keeps the values from being a run's; ``handed_in`` as for
        :func:`find_problems`."""
        # a key whose value was refused still holds its default: don't report that as missing too
        refused = {problem.key for problem in self.refused}
        return [*self.refused, *(p for p in find_problems(self.config, self.sources, handed_in)
                                 if not refused.intersection(p.key.split(", ")))]


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration without problems, and what its words said beside it."""

    config: schema.TrainConfig
    resume_from: Path | None = None
    """the folder of the run to go on with"""
    name: str = "run"
    """what a run without ``run_name`` is called, before its time stamp: its recipe, if it has one
    """
    sources: Mapping[str, str] = field(default_factory=dict)
    accept_changes: bool = False
    """as of :class:`Composed`"""
    typed: frozenset[str] | None = None
    """as in :class:`Composed`; None where no file has had a say"""
    trusts: bool = False


def compose(words: Words) -> Composed:
    """Compose the configuration of one run.

    Raises:
        ConfigError: words that make no run, secrets, unknown recipes and options of groups, files
            that are no YAML: there is nothing to check beside.
        CheckpointError: ``resume=FOLDER`` names something else than a run folder.
    """
    if words.is_sweep:
        raise ConfigError("a sweep can't be composed as one run", where=COMMAND_LINE,
                          fix="leave out -m")
    if words.only_prints:
        raise ConfigError("These words only print a configuration.", fix="leave out --cfg, --info")
    run = _resumed_run(words)
    with hydra_bridge.hydra_for(words, schema_node()):
        return compose_here(words, run)


def check(composed: Composed, handed_in: frozenset[str] = frozenset()) -> Checked:
    """Refuse a configuration with problems.

    Args:
        handed_in: keys that are given elsewhere (see :func:`find_problems`).

    Raises:
        ConfigError: everything that is wrong with the words, the recipe and the config files.
    """
    raise_problems(composed.problems(handed_in), composed.hint)
    return Checked(composed.config, composed.resume_from, composed.recipe or "run",
                   composed.sources, composed.accept_changes, composed.typed, composed.trusts)


def compose_here(words: Words, run: Path | None = None) -> Composed:
    """As :func:`compose`, inside of :func:`hydra_for`, for words that are one run's."""
    entries = _entries(words, run)
    merged = layers.merge_entries(entries)
    config = typed(merged.node)
    if run is not None:
        config = keeping_styles(config, resolved.read_config(run / CONFIG_FILE),
                                {setting.key for setting in words.settings})
    return Composed(config, merged.problems, merged.sources, words.value("recipe"), run,
                    words.flag(ACCEPT_CHANGES) is not None, merged.typed,
                    words.flag(TRUST) is not None, layers.overruled(entries, words))


def print_composition(words: Words) -> None:
    """Print what ``--cfg``, ``--info``, ``--hydra-help`` or ``--shell-completion`` ask for.

    Raises:
        ConfigError: something is wrong with the words or the files.
    """
    words = _first_job(words) if words.is_sweep else words
    run = _resumed_run(words)
    with hydra_bridge.hydra_for(words, schema_node()):
        if words.flag("--hydra-help") is not None or words.flag("--shell-completion") is not None:
            hydra_bridge.run_hydra(words)
            return
        entries = _entries(words, run)
        merged = layers.merge_entries(entries, hydra_resolves=True)
        package = words.flag("--package") or "_global_"
        names = [*keys.schema_keys(), *keys.schema_sections()]
        of_hydra = package == "hydra" or package.startswith("hydra.")
        if package not in (*names, "_global_") and not of_hydra:
            raise ConfigError(f"--package {package}: there is no such part of the configuration"
                              + did_you_mean(package, names), where=COMMAND_LINE)
        raise_problems(list(merged.problems))
        if (note := layers.overruled(entries, words)) is not None:
            sys.stderr.write(f"{note}\n")
        if words.flag("--cfg") != "job" or of_hydra or any(
                "${hydra:" in str(entry.value) for entry in entries):
            hydra_bridge.run_hydra(words)
            return
        if words.flag("--resolve") is not None:
            OmegaConf.resolve(merged.node)
        part = merged.node if package == "_global_" else OmegaConf.select(merged.node, package)
        title = "" if package == "_global_" else f"# @package {package}\n"
        sys.stdout.write(title + OmegaConf.to_yaml(part) if OmegaConf.is_config(part)
                         else f"{part}\n")


def _entries(words: Words, run: Path | None) -> list[layers.Entry]:
    words = words if run is None else words.without("resume")
    loader = hydra_bridge.config_loader(words)
    if any(setting.key.startswith("hydra.") for setting in words.settings):
        # only Hydra can tell whether its own keys are right
        loader.load_configuration(hydra_bridge.config_name(words), words.overrides, RunMode.RUN)
    entries = layers.layered_entries(loader, words, None if run is None else run / CONFIG_FILE)
    secrets.refuse_secrets((entry.key, entry.value, entry.source) for entry in entries)
    return entries


def _resumed_run(words: Words) -> Path | None:
    """The run folder of ``resume=FOLDER``; None for the other values of that key."""
    given = words.value("resume")
    if given in (None, "auto", "never"):
        if words.flag(TRUST) is not None:
            raise ConfigError(f"{TRUST} is about the configuration of a run, and these words name "
                              "none.", where=COMMAND_LINE,
                              fix=f"leave it out, or ppocli resume RUN {TRUST}")
        return None
    run = Path(given).expanduser().absolute()
    if not run.is_dir():
        raise CheckpointError(f"resume={given}: there is no such folder", where=str(run),
                              fix="give a run folder, e.g. resume=runs/NAME; to start afresh leave "
                                  "resume out")
    settings_before(run, accept_changes=words.flag(ACCEPT_CHANGES) is not None)
    groups = [setting.key for setting in words.settings
              if setting.key in (*config_groups(), "recipe")]
    if groups:
        raise ConfigError(f"{', '.join(groups)} can't be chosen when a run is resumed: its own "
                          "config.yaml is the base", where=COMMAND_LINE,
                          fix="override single keys instead, e.g. ppo.total_episodes=4000")
    return run


# The jobs of a sweep ------------------------------------------------------------------------------

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


def _first_job(words: Words) -> Words:
    """The words of a sweep as those of a single run: its first job, or the least values of ranges.

    Raises:
        ConfigError: a word can't be read.
    """
    with hydra_bridge.as_config_errors():
        overrides = OverridesParser.create().parse_overrides(words.overrides)
    settings = tuple(
        replace(setting, value=str(ranged.start) if isinstance(
            ranged := override.value(), IntervalSweep)
            else next(iter(override.sweep_string_iterator())))
        if override.is_sweep_override() else setting
        for setting, override in zip(words.settings, overrides, strict=True))
    return replace(words, settings=settings).without("--multirun", "hydra.mode", *_of_sweep(words))


def _of_sweep(words: Words) -> list[str]:
    """What is said of the sweep itself."""
    return [each.key for each in words.settings if each.key.startswith("sweep.")]


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
                          where=COMMAND_LINE,
                          fix="to go on with a sweep: the same words, hydra.sweep.dir=FOLDER "
                              "resume=auto")
    # untyped, so that a job with a wrong value is that job's failure and not the sweep's
    untyped = OmegaConf.create(OmegaConf.to_container(schema_node()))
    with hydra_bridge.hydra_for(words, cast(DictConfig, untyped)):
        swept = _sweep_words(hydra_bridge.config_loader(words), words.overrides)
        secrets.refuse_secrets((entry.key, entry.value, entry.source) for entry in swept.shared)
        merged = layers.merge_entries(swept.shared, hydra_resolves=True)
        raise_problems([*merged.problems, *(
            problem for problem in range_problems(typed(merged.node), merged.sources)
            if problem.key in merged.sources)])
        shared = typed(merged.node)
        plan, of_sweep = shared.sweep, _of_sweep(words)
        if plan.search != "grid":
            if not swept.varied:
                raise ConfigError("there is nothing to search: no key has several values",
                                  where=COMMAND_LINE, fix="give one a range, such as "
                                  "'ppo.optimizer.lr=tag(log,interval(1e-5,1e-3))'")
            folder = begin(shared, None)
            own = [str(setting) for setting in words.without(*of_sweep, *swept.varied).settings
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
        if swept.grid is None and shared.sweep != schema.SweepConfig():
            raise ConfigError("Hydra's other sweepers run their jobs one after another.",
                              where="hydra/sweeper, sweep", fix="leave one of them out")
        place = quoted(str(begin(shared, swept.grid)))
        own_words = words.without("hydra.sweep.dir", *of_sweep).adding(f"hydra.sweep.dir={place}")
        # Hydra would have a + before what a free mapping doesn't hold yet
        hydra_bridge.run_hydra(replace(own_words, settings=tuple(
            replace(each, prefix="++") if not each.prefix and keys.free_mapping_of(each.key)
            else each for each in own_words.settings)), lambda config: run_job(
                _sweep_job(words, swept)))


@dataclass(frozen=True, slots=True)
class _Swept:
    """What all jobs of a sweep share on the command line, the keys that differ between them, and
    the words that set these, job by job (None: the sweep isn't a grid)."""

    shared: list[layers.Entry]
    varied: frozenset[str]
    grid: Grid | None
    ranges: Ranges


def _sweep_job(words: Words, swept: _Swept) -> SweepJob:
    """The job that Hydra runs now."""
    settings = HydraConfig.get()
    task = tuple(word.removeprefix("++") for word in settings.overrides.task)
    search = [word for word in settings.overrides.hydra if word.startswith("hydra.searchpath")]
    varied = tuple(word for word in task if word.lstrip("+~").partition("=")[0] in swept.varied)
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
        options = loader.get_group_options(name, results_filter=ObjectType.CONFIG)
        if options:
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
    return _Swept(entries, frozenset(ranges), grid, ranges)
