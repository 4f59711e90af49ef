"""From words to a checked configuration: ``check(compose(read_words(...)))``.

Hydra says which config files the words choose and in which order; their settings, and those of the
command line, are then merged one by one (:mod:`ppocli.config.layers`), so that everything wrong is
told at once and with its source, and so that no secret is ever printed or written.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hydra.types import RunMode
from omegaconf import OmegaConf

from ppocli.builtin.names import config_groups
from ppocli.config.hydra_bridge import config_loader, config_name, hydra_for, run_hydra
from ppocli.config.keys import schema_keys, schema_sections
from ppocli.config.layers import Entry, layered_entries, merge_entries
from ppocli.config.problems import Problem, find_problems, raise_problems
from ppocli.config.resolved import CONFIG_FILE, read_config, schema_node, typed
from ppocli.config.schema import TrainConfig
from ppocli.config.secrets import refuse_secrets
from ppocli.config.words import COMMAND_LINE, Words
from ppocli.errors import CheckpointError, ConfigError
from ppocli.text import did_you_mean

_START_HINT = "start from a recipe, e.g. ppocli train +recipe=quickstart (ppocli recipes list)"


@dataclass(frozen=True, slots=True)
class Composed:
    """What the words of one run come to, right or not.

    ``config`` has the default in place of a value that was refused, and ``???`` where a mandatory
    one is missing; ``refused`` says what was. ``sources`` says where each given key came from.
    """

    config: TrainConfig
    refused: tuple[Problem, ...]
    sources: Mapping[str, str]
    recipe: str | None
    resume_from: Path | None
    """the run folder of ``resume=FOLDER``"""

    @property
    def hint(self) -> str | None:
        """How to begin, for words that set nothing at all."""
        return None if self.sources else _START_HINT

    def values(self) -> TrainConfig:
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

    config: TrainConfig
    resume_from: Path | None = None
    """the folder of the run to go on with"""
    name: str = "run"
    """what a run without ``run_name`` is called, before its time stamp: its recipe, if it has one
    """
    sources: Mapping[str, str] = field(default_factory=dict)


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
    with hydra_for(words, schema_node()):
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
                   composed.sources)


def compose_here(words: Words, run: Path | None = None) -> Composed:
    """As :func:`compose`, inside of :func:`hydra_for`, for words that are one run's."""
    merged = merge_entries(_entries(words, run))
    return Composed(typed(merged.node), merged.problems, merged.sources, words.value("recipe"), run)


def print_composition(words: Words) -> None:
    """Print what ``--cfg``, ``--info``, ``--hydra-help`` or ``--shell-completion`` ask for.

    Raises:
        ConfigError: something is wrong with the words or the files.
    """
    run = _resumed_run(words)
    with hydra_for(words, schema_node()):
        if words.flag("--hydra-help") is not None or words.flag("--shell-completion") is not None:
            run_hydra(words)
            return
        entries = _entries(words, run)
        merged = merge_entries(entries, hydra_resolves=True)
        package = words.flag("--package") or "_global_"
        names = [*schema_keys(), *schema_sections()]
        of_hydra = package == "hydra" or package.startswith("hydra.")
        if package not in (*names, "_global_") and not of_hydra:
            raise ConfigError(f"--package {package}: there is no such part of the configuration"
                              + did_you_mean(package, names), where=COMMAND_LINE)
        raise_problems(list(merged.problems))
        if words.flag("--cfg") != "job" or of_hydra or any(
                "${hydra:" in str(entry.value) for entry in entries):
            run_hydra(words)
            return
        if words.flag("--resolve") is not None:
            OmegaConf.resolve(merged.node)
        part = merged.node if package == "_global_" else OmegaConf.select(merged.node, package)
        title = "" if package == "_global_" else f"# @package {package}\n"
        sys.stdout.write(title + OmegaConf.to_yaml(part) if OmegaConf.is_config(part)
                         else f"{part}\n")


def _entries(words: Words, run: Path | None) -> list[Entry]:
    words = words if run is None else words.without("resume")
    loader = config_loader(words)
    if any(setting.key.startswith("hydra.") for setting in words.settings):
        # only Hydra can tell whether its own keys are right
        loader.load_configuration(config_name(words), words.overrides, RunMode.RUN)
    entries = layered_entries(loader, words, None if run is None else run / CONFIG_FILE)
    refuse_secrets((entry.key, entry.value, entry.source) for entry in entries)
    return entries


def _resumed_run(words: Words) -> Path | None:
    """The run folder of ``resume=FOLDER``; None for the other values of that key."""
    given = words.value("resume")
    if given in (None, "auto", "never"):
        return None
    run = Path(given).expanduser().absolute()
    if not run.is_dir():
        raise CheckpointError(f"resume={given}: there is no such folder", where=str(run),
                              fix="give a run folder, e.g. resume=runs/NAME; to start afresh leave "
                                  "resume out")
    read_config(run / CONFIG_FILE)
    groups = [setting.key for setting in words.settings
              if setting.key in (*config_groups(), "recipe")]
    if groups:
        raise ConfigError(f"{', '.join(groups)} can't be chosen when a run is resumed: its own "
                          "config.yaml is the base", where=COMMAND_LINE,
                          fix="override single keys instead, e.g. ppo.total_episodes=4000")
    return run
