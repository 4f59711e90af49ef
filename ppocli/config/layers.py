"""A composition, setting by setting, each with its source, so that all problems are told at once.

Hydra stops at the first wrong key and doesn't say which file it came from. Here its defaults list
is read file by file, each entry is merged into the typed schema, and what fails is collected.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from ppocli.builtin.names import config_groups
from ppocli.config import config_yaml, keys
from ppocli.config.command_words import COMMAND_LINE, Words
from ppocli.config.gone import GONE, gone_key, without_gone_keys
from ppocli.config.hydra_bridge import SCHEMA, config_name
from ppocli.config.problems import Problem
from ppocli.config.row_paths import joined_paths
from ppocli.config.tasks import DATA_TASKS
from ppocli.config.text import (
    did_you_mean,
    each_text,
    first_line,
    how_unescaped,
    parts_of,
    short_path,
    shown,
    unescaped,
)
from ppocli.errors import ConfigError

LENGTHS = {"ppo": ("total_episodes", "epochs", "num_steps"),
           **dict.fromkeys(DATA_TASKS, ("epochs", "num_updates"))}
"""keys that say how long a run is, of which one is given, by section"""
_OF_SWEEPS = ("sweep", "launcher", "mode")
"""beginnings of Hydra's own names that are read, behind ``hydra.``"""
_SIZES = ("num_rollouts", "mini_batch_size", "micro_batch_size")
"""each at most as large as the one before it, if its section has that"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting before it is merged."""

    key: str
    value: Any
    source: str
    prefix: str = ""
    """``+`` adds what must not be there, ``~`` takes something out"""
    notes: tuple[str, ...] = ()
    """how texts in it were read that were typed with backslashes, for the user"""


@dataclass(frozen=True, slots=True)
class Merged:
    """Entries merged into the schema: the node of those that fit, sources by key, and problems."""

    node: DictConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    typed: frozenset[str] = frozenset()
    """all texts among the values on the command line, and the keys that it sets to true"""


def layered_entries(loader: ConfigLoader, words: Words, base: Path | None) -> list[Entry]:
    """All entries in the order in which they are merged: config files first, words last.

    Args:
        base: the configuration of a run that is resumed, above the other files.

    Raises:
        HydraException, yaml.YAMLError: a group option is unknown or a file can't be read.
    """
    overrides = words.overrides
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values, but this is a single run",
                              where=COMMAND_LINE, fix="add -m to run each of them; "
                              "a list is key=[a,b], a text with commas key='\"a,b\"'")
        key = override.key_or_group
        if key == "hydra.searchpath":
            raise ConfigError("recipes and groups are not looked for in hydra.searchpath",
                              where=COMMAND_LINE, fix="give their folder with --config-dir")
        if key.startswith(("hydra.", "hydra/")) and not key[6:].startswith(_OF_SWEEPS):
            raise ConfigError(f"{key} has no effect here: of Hydra's own settings, only those "
                              "of sweeps are read", where=COMMAND_LINE, fix="leave it out; "
                              "output_dir and run_name say where a run goes")
    try:
        defaults = loader.compute_defaults_list(config_name(words), overrides, RunMode.RUN)
    except UnicodeError:
        raise
    except ValueError as error:  # Hydra's word for a malformed defaults list or group choice
        raise ConfigError(first_line(error), where="the choice of config groups",
                          fix="a group takes the name of one of its options, or null") from error
    entries: list[Entry] = []
    for default in defaults.defaults:
        if (path := default.config_path) is None or path.startswith("hydra/") or path == SCHEMA:
            continue
        loaded = loader.repository.load_config(path)  # type: ignore[attr-defined]
        assert loaded is not None, path  # the defaults list has found it
        values = OmegaConf.to_container(loaded.config, resolve=False)
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds no mapping of keys to values", where=loaded.path)
        if default.primary:
            values.pop("hydra", None)
        package = "" if default.package in (None, "", "_global_") else f"{default.package}."
        entries += _file_entries(_file(loaded.path, path), package, values)
    if base is not None:
        settings: Any = OmegaConf.to_container(OmegaConf.load(base))
        entries += _file_entries(base, "", without_gone_keys(settings))
    return entries + [entry for override in defaults.config_overrides
                      for entry in override_entries(override)]


def _file_entries(file: Path, package: str, values: Any) -> Iterator[Entry]:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""  # not all lie on a disk
    lines = dict(line_numbers(yaml.compose(text, Loader=yaml.SafeLoader)))
    shown_file = short_path(str(file))
    for key, value in config_yaml.leaves(package, values):
        line = lines.get(key.removeprefix(package))
        yield Entry(key, value, f"{shown_file}:{line}" if line else shown_file)


def override_entries(override: Override) -> list[Entry]:
    """What a word sets; nothing for one that is Hydra's own."""
    name = override.key_or_group
    if name == "hydra" or name.startswith("hydra."):
        return []
    if override.is_delete():
        return [Entry(name, override.value(), COMMAND_LINE, "~")]
    value, prefix = override.value(), "+" if override.is_add() else ""
    if isinstance(value, dict) and value and name not in keys.schema_keys():
        return [_typed_entry(key, item) for key, item in config_yaml.leaves(f"{name}.", value)]
    return [_typed_entry(name, value, prefix)]


def _typed_entry(key: str, value: Any, prefix: str = "") -> Entry:
    if not keys.takes_escapes(key):
        return Entry(key, value, COMMAND_LINE, prefix)
    notes = tuple(note for name, item in parts_of(key, value) if isinstance(item, str)
                  and (note := how_unescaped(name, item)) is not None)
    return Entry(key, each_text(value, unescaped), COMMAND_LINE, prefix, notes)


def notes_of(entries: list[Entry], words: Words) -> tuple[str, ...]:
    """How typed texts were read where that isn't letter by letter, and what of the typed words has
    no effect (:func:`overruled`), in lines for the user."""
    lost = overruled(entries, words)
    return (*dict.fromkeys(note for entry in entries for note in entry.notes),
            *([] if lost is None else [lost]))


def _file(path: str, config_path: str) -> Path:
    scheme, _, folder = path.partition("://")
    name = config_path.removesuffix(".yaml") + ".yaml"
    return Path(folder) / (Path(name).name if scheme == "recipes" else name)


def line_numbers(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line) of all that stands in a YAML file's mappings."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from line_numbers(value, f"{prefix}{name.value}.")


def merge_entries(entries: list[Entry], *, hydra_resolves: bool = False) -> Merged:
    """Merge each entry into the typed schema; those that don't fit become problems.

    Args:
        hydra_resolves: interpolations of Hydra's own (``${hydra:job.num}``) are none of them: they
            are resolved later.
    """
    node = config_yaml.schema_node()
    sources: dict[str, str] = {}
    problems: list[Problem] = []
    for entry in entries:
        if (problem := _merge(node, entry)) is None:
            sources[entry.key] = entry.source
            if parent := keys.free_mapping_of(entry.key):
                sources[parent] = entry.source
        else:
            named = {*keys.schema_keys(), *keys.schema_sections()}
            problems.append(Problem(entry.key, problem, entry.source,
                                    "wrong-type" if entry.key in named else "unknown-key"))
    problems += _unresolvable(node, sources, hydra_resolves)
    _give_way(node, {key for key, source in sources.items() if source == COMMAND_LINE})
    typed = frozenset(key if value is True else value
                      for entry in entries if entry.source == COMMAND_LINE
                      for key, value in parts_of(entry.key, entry.value)
                      if value is True or isinstance(value, str))
    return Merged(node, sources, tuple(problems), typed)


def overruled(entries: list[Entry], words: Words) -> str | None:
    """Which values of an option of a group that was typed, such as ``ppo=trlx``, a recipe goes
    over; None if there are none."""
    chosen = {f"{setting.key}={setting.value}": f"{setting.key}/{setting.value}.yaml"
              for setting in words.settings if setting.key in config_groups()}
    held: dict[str, tuple[str, Any]] = {}
    lost: dict[tuple[str, str], dict[str, str]] = {}
    for entry in entries:
        if entry.source == COMMAND_LINE:
            continue
        file = entry.source.rpartition(":")[0] or entry.source
        option = next((name for name, end in chosen.items()
                       if f"/{file}".endswith(f"/{end}")), None)
        before, value = held.pop(entry.key, (None, None))
        if option is not None:
            held[entry.key] = option, entry.value
        elif before is not None and value != entry.value:
            lost.setdefault((before, file), {})[entry.key] = \
                f"{entry.key}={shown(entry.value)} (not {shown(value)})"
    typed = {entry.key for entry in entries if entry.source == COMMAND_LINE}
    sentences = [f"{file} goes over {option}: {', '.join(left)}"
                 for (option, file), texts in lost.items()
                 if (left := [text for key, text in texts.items() if key not in typed])]
    return "; ".join(sentences) + "; a key that is typed goes over both" if sentences else None


def _give_way(node: DictConfig, typed: set[str]) -> None:
    """What files and defaults say gives way to typed words that it contradicts: another length of
    the run, batches larger than what they are taken from, lengths beyond the longest response,
    another source of prompts. Two typed words stay as they are."""
    for section, prompts in (("prompts", node.prompts), ("prompts.eval", node.prompts.eval)):
        for name, other in (("path", "items"), ("items", "path")):
            if f"{section}.{name}" in typed and prompts[name] is not None \
                    and f"{section}.{other}" not in typed:
                prompts[other] = None
    if "generation.max_new_tokens" in typed and node.env.fn is None:
        _give_way_to_length(node, typed)
    for section, lengths in LENGTHS.items():
        updates, decided = node[section], False
        if any(f"{section}.{name}" in typed and updates[name] is not None for name in lengths):
            for name in lengths:
                if f"{section}.{name}" not in typed:
                    updates[name] = None
        for most, name in pairwise(size for size in _SIZES if size in updates):
            decided |= f"{section}.{most}" in typed
            if decided and f"{section}.{name}" not in typed \
                    and (updates[name] or 0) > updates[most] > 0:
                updates[name] = updates[most]


def _give_way_to_length(node: DictConfig, typed: set[str]) -> None:
    longest, length_range = node.generation.max_new_tokens, node.generation.length_sampler
    for name in ("min_response_length", "overlong_buffer"):
        if f"reward.{name}" not in typed and (node.reward[name] or 0) > longest > 0:
            node.reward[name] = longest
    if "generation.length_sampler" not in typed and length_range and max(length_range) > longest:
        node.generation.length_sampler = None


def _merge(node: DictConfig, entry: Entry) -> str | None:
    """Merge one entry into ``node``, or say in words why it can't be."""
    if (key := keys.key_for(entry.key)) is None:
        return _unknown(entry, node.task.fn)
    if entry.prefix == "~":
        return _delete(node, entry)
    if entry.key == keys.AUTO and entry.value == "auto":
        entry = replace(entry, value=None)
    if entry.prefix == "+" and not isinstance(entry.value, (dict, list)) and OmegaConf.select(
            node, entry.key, throw_on_missing=False) is not None:
        return "there is such an item already, + can't add it: leave the + out"
    items = entry.value if isinstance(entry.value, list) else [entry.value]
    if key.metadata["holds"] == "rows" and isinstance(entry.value, list):
        try:
            entry = replace(entry, value=joined_paths([str(item) for item in items]))
        except ValueError as error:
            return f"{shown(entry.value)} can't be read: {error}"
    if (key.item in (int, float) and any(isinstance(item, bool) for item in items)) or (
            key.item is int and isinstance(entry.value, float) and not math.isfinite(entry.value)):
        return f"{shown(entry.value)} must be {key.expected}"
    try:
        value = _each_converted(key, entry.value) if key.kind == "sweep" else entry.value
        # an empty mapping takes the place of one, since merged it would do nothing
        OmegaConf.update(node, entry.key, value, merge=key.kind != "mapping" or value != {})
    except OmegaConfBaseException:
        several = (f" (to try several values: -m {entry.key}={','.join(map(str, entry.value))})"
                   if key.kind == "scalar" and isinstance(entry.value, list) else "")
        at_evaluation = entry.key.replace("generation.", "generation.eval.", 1)
        if several and keys.schema_keys().get(at_evaluation, key).kind == "sweep":
            several += f" (to evaluate with each: {at_evaluation}=[...])"
        if (key.item is int and key.kind == "scalar" and isinstance(entry.value, float)
                and entry.value.is_integer() and abs(entry.value) < 2**53):
            return (f"{entry.value!r} must be {key.expected}, without a point or an exponent: "
                    f"{entry.key}={entry.value:.0f}")
        return f"{shown(entry.value)} must be {key.expected}{several}"
    return None


def _each_converted(key: keys.Key, value: Any) -> Any:
    """One value or several of ``key.item``, with the conversions that OmegaConf does for a key of
    that very type.

    Raises:
        OmegaConfBaseException: a value that can't be converted.
    """
    if value is None or (isinstance(value, str) and "${" in value):
        return value
    kinds: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
    many = value if isinstance(value, list) else [value]
    converted = [kinds[key.item](item, is_optional=False)._value() for item in many]
    return converted if isinstance(value, list) else converted[0]


def _unknown(entry: Entry, task: str | None) -> str:
    if (name := gone_key(entry.key)) is not None:
        return f"no longer exists: {GONE[name]}"
    if entry.key in keys.schema_sections():
        inside = [name for name in keys.schema_keys() if name.startswith(entry.key + ".")]
        return (f"is a section, not a single value; it holds {', '.join(inside[:3])}"
                + (", ..." if len(inside) > 3 else ""))
    names = [*keys.schema_keys(), *keys.schema_sections(), *config_groups()]
    if entry.source == COMMAND_LINE and "." not in entry.key:
        names.append("recipe")
    elsewhere = keys.format_foreign_names(keys.named_elsewhere(entry.key, task))
    return f"unknown key{elsewhere or did_you_mean(entry.key, list(dict.fromkeys(names)))}"


def _delete(node: DictConfig, entry: Entry) -> str | None:
    if keys.free_mapping_of(entry.key) is None:
        return "a key can't be removed; leave it out, or set it to another value"
    parent, _, leaf = entry.key.rpartition(".")
    holder = OmegaConf.select(node, parent)
    if not isinstance(holder, DictConfig) or leaf not in holder:
        return "can't be removed: there is no such item"
    if entry.value is not None and entry.value != holder[leaf]:
        return f"can't be removed: it is {shown(holder[leaf])} and not {shown(entry.value)}"
    del holder[leaf]
    return None


def _unresolvable(node: DictConfig, sources: Mapping[str, str], hydra_resolves: bool
                  ) -> Iterator[Problem]:
    """Interpolations that lead nowhere."""
    unresolved: Any = OmegaConf.to_container(node, resolve=False)
    for name, key in keys.schema_keys().items():
        raw = reduce(getitem, name.split("."), unresolved)
        if "${" not in str(raw):
            continue
        try:
            value = OmegaConf.select(node, name)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            if not (hydra_resolves and "${hydra:" in str(raw)):
                yield Problem(name, f"{shown(raw)} can't be resolved: "
                              + first_line(error), sources.get(name, COMMAND_LINE), "unresolved")
            OmegaConf.update(node, name, key.default)
