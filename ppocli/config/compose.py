"""From words to a checked configuration, ``check(compose(read_words(...)))``, or to those of the
jobs of a sweep (``ppocli train -m``), which Hydra's sweeper chooses.

Hydra says which config files the words choose and in which order; their settings, and those of the
command line, are then merged one by one (:mod:`ppocli.config.layers`), so that everything wrong is
told at once and with its source, and so that no secret is ever printed or written.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NewType

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ppocli.builtin.names import config_groups
from ppocli.config import config_yaml, hydra_bridge, keys, layers, resume_policy, schema, secrets
from ppocli.config.auto_values import open_values
from ppocli.config.command_words import ACCEPT_CHANGES, COMMAND_LINE, Words
from ppocli.config.config_yaml import CONFIG_FILE, schema_node, typed
from ppocli.config.import_guard import TRUST
from ppocli.config.layers import line_numbers
from ppocli.config.problems import Problem, find_problems, listed, raise_problems
from ppocli.config.text import did_you_mean
from ppocli.errors import CheckpointError, ConfigError

FILLED_IN = "  # filled in"
"""behind what is null, and comes to this by the other settings"""
_START_HINT = "start from a recipe, e.g. ppocli train +recipe=quickstart (ppocli recipes list)"


@dataclass(frozen=True, slots=True)
class Composed:
    """What the words of one run come to, right or not.

    ``config`` has the default in place of a value that was refused, and ``???`` where a mandatory
    one is missing; ``refused`` says what was. ``sources`` says where each given key came from.
    """

    config: schema.TrainConfig
    refused: tuple[Problem, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    name: str = "run"
    """what a run without ``run_name`` is called, before its time stamp: its recipe, if it has one
    """
    resume_from: Path | None = None
    """the folder of the run to go on with, of ``resume=FOLDER``"""
    accept_changes: bool = False
    """what was changed by hand in the config.yaml of a run that goes on counts"""
    typed: frozenset[str] = frozenset()
    """as :attr:`ppocli.config.layers.Merged.typed`"""
    trusts: bool = False
    """``--trust``: what the run's configuration names may run"""
    notes: tuple[str, ...] = ()
    """lines for the user about what was typed (:func:`ppocli.config.layers.notes_of`)"""

    @property
    def hint(self) -> str | None:
        """How to begin, for words that set nothing at all."""
        return None if self.sources else _START_HINT

    def values(self) -> schema.TrainConfig:
        """The values, which need not make a whole run.

        Raises:
            ConfigError: keys that don't exist, values of a wrong type.
        """
        raise_problems(self.refused)
        return self.config

    def problems(self, handed_in: frozenset[str] = frozenset()) -> list[Problem]:
        """Everything that keeps the values from being a run's; ``handed_in`` as for
        :func:`find_problems`."""
        # a key whose value was refused still holds its default: don't report that as missing too
        refused = {problem.key for problem in self.refused}
        return [*self.refused, *(p for p in find_problems(self.config, self.sources, handed_in)
                                 if not refused.intersection(p.key.split(", ")))]


Checked = NewType("Checked", Composed)
"""a configuration without problems, and what its words said beside it; of :func:`check`"""


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
    return Checked(composed)


def compose_here(words: Words, run: Path | None = None) -> Composed:
    """As :func:`compose`, inside of :func:`hydra_for`, for words that are one run's."""
    entries = _entries(words, run)
    merged = layers.merge_entries(entries)
    config = typed(merged.node)
    if run is not None:
        config = resume_policy.keeping_settled(config_yaml.in_place(config, run),
                                     config_yaml.read_config(run / CONFIG_FILE),
                                     {setting.key for setting in words.settings})
    name = Path(words.value("recipe") or "run").name
    return Composed(config, merged.problems, merged.sources, name, run,
                    words.flag(ACCEPT_CHANGES) is not None, merged.typed,
                    words.flag(TRUST) is not None, layers.notes_of(entries, words))


def print_composition(words: Words) -> None:
    """Print what ``--cfg``, ``--info``, ``--hydra-help`` or ``--shell-completion`` ask for.

    Raises:
        ConfigError: something is wrong with the words or the files.
    """
    words = first_job(words).without(*of_sweep(words)) if words.is_sweep else words
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
        raise_problems(merged.problems)
        for note in layers.notes_of(entries, words):
            sys.stderr.write(f"{note}\n")
        if words.flag("--cfg") != "job" or of_hydra or any(
                "${hydra:" in str(entry.value) for entry in entries):
            hydra_bridge.run_hydra(words)
            return
        config = typed(merged.node)
        _print_filled(merged.node, open_values(config), package,
                      resolve=words.flag("--resolve") is not None)
        if merged.sources and (problems := find_problems(config, merged.sources)):
            sys.stderr.write(f"ppocli train refuses this: {listed(map(str, problems))}\n")


def _print_filled(node: DictConfig, values: Mapping[str, Any], package: str, *, resolve: bool
                  ) -> None:
    """Print a configuration, or a part of it, as YAML, with ``values`` where it has null: they are
    marked."""
    filled = {name: value for name, value in values.items()
              if value is not None and OmegaConf.select(node, name) is None}
    for name, value in filled.items():
        OmegaConf.update(node, name, value)
    if resolve:
        OmegaConf.resolve(node)
    whole = package == "_global_"
    part = node if whole else OmegaConf.select(node, package)
    if not OmegaConf.is_config(part):
        sys.stdout.write(f"{part}\n")
        return
    lines = OmegaConf.to_yaml(part).splitlines()
    places = dict(line_numbers(yaml.compose("\n".join(lines), Loader=yaml.SafeLoader),
                               "" if whole else f"{package}."))
    for name in filled.keys() & places.keys():
        lines[places[name] - 1] += FILLED_IN
    title = [] if whole else [f"# @package {package}"]
    sys.stdout.write("\n".join([*title, *lines, ""]))


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
    if (folder_text := words.value("resume")) in (None, "auto", "never"):
        if words.flag(TRUST) is not None:
            raise ConfigError(f"{TRUST} applies to the configuration of a run, and these words "
                              "name none.", where=COMMAND_LINE,
                              fix=f"leave it out, or ppocli resume RUN {TRUST}")
        return None
    run = Path(folder_text).expanduser().absolute()
    if not run.is_dir():
        raise CheckpointError(f"resume={folder_text}: there is no such folder", where=str(run),
                              fix="give a run folder, e.g. resume=runs/NAME; to start afresh leave "
                                  "resume out")
    resume_policy.settings_before(run, accept_changes=words.flag(ACCEPT_CHANGES) is not None)
    groups = [setting.key for setting in words.settings
              if setting.key in (*config_groups(), "recipe")]
    if groups:
        raise ConfigError(f"{', '.join(groups)} can't be chosen when a run is resumed: its own "
                          "config.yaml is the base", where=COMMAND_LINE,
                          fix="override single keys instead, e.g. ppo.total_episodes=4000")
    name, folder = words.value("run_name"), words.value("output_dir")
    named = [*["run_name"] * (name not in (None, "null", run.name)), *["output_dir"] * (
        folder is not None and Path(folder).expanduser().resolve() != run.resolve().parent)]
    if named:
        raise ConfigError(f"{', '.join(named)} can't be set when a run is resumed: it goes on in "
                          "its own folder", where=COMMAND_LINE,
                          fix="leave that out; to rename the run, move its folder: mv RUN NAME")
    return run


def first_job(words: Words, loader: ConfigLoader | None = None) -> Words:
    """The words of a sweep as those of a single run: its first job, or the least values of ranges,
    and what is said of the sweep itself.

    Args:
        loader: tells which options of a group a ``glob`` stands for.

    Raises:
        ConfigError: a word can't be read.
    """
    with hydra_bridge.as_config_errors():
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words.overrides)
    settings = tuple(
        replace(setting, value=str(ranged.start) if isinstance(
            ranged := override.value(), IntervalSweep)
            else next(iter(override.sweep_string_iterator()), "null"))
        if override.is_sweep_override() else setting
        for setting, override in zip(words.settings, overrides, strict=True))
    return replace(words, settings=settings).without("--multirun", "hydra.mode")


def of_sweep(words: Words) -> list[str]:
    """What is said of the sweep itself."""
    return [each.key for each in words.settings if each.key.startswith("sweep.")]
