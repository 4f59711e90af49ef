"""All problems of a composed configuration at once.

Types are checked while composing; here are the ranges and choices in the schema's field metadata,
and the rules between keys.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, ge, gt, le, lt
from typing import Any, Self

from omegaconf import MISSING
from omegaconf.errors import OmegaConfBaseException

from ppocli.config import schema
from ppocli.config.checks import Rules, rules
from ppocli.config.keys import (
    Key,
    free_mapping_of,
    is_import_path,
    schema_keys,
    schema_sections,
    why_unknown,
)
from ppocli.config.tasks import task_name
from ppocli.config.text import did_you_mean, shown
from ppocli.errors import ConfigError

DEFAULT_SOURCE = "default"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its key or keys, what is wrong and allowed, and the source of the value."""

    key: str
    text: str
    source: str = DEFAULT_SOURCE
    code: str = "contradiction"
    """as of :class:`ppocli.errors.PpocliError`: also ``unknown-key``, ``wrong-type``, ``missing``,
    ``out-of-range``, ``unresolved``"""

    def __str__(self) -> str:
        origin = "" if self.source == DEFAULT_SOURCE else f" (from {self.source})"
        return f"{self.key}: {self.text}{origin}"

    def parted(self) -> tuple[Self, str | None]:
        """A copy whose text ends with other words to paste."""
        what, colon, words = self.text.rpartition(": ")
        if not colon or not (_ASSIGNMENT.search(words) or words.startswith("pip install ")):
            return self, None
        return replace(self, text=what), words


def unknown_key(key: str, source: str, task: str | None = None) -> Problem:
    """The problem with a key that doesn't exist, or is a section; ``task`` as for
    :func:`ppocli.config.keys.named_elsewhere`."""
    return Problem(key, why_unknown(key, task), source,
                   "wrong-type" if key in schema_sections() else "unknown-key")


_ASSIGNMENT = re.compile(r"\b[a-z_]+(\.[a-z_]+)*=")


def raise_problems(problems: Iterable[Problem], fix: str | None = None) -> None:
    """Raise one ConfigError that lists every problem; do nothing without any. For a single problem,
    words to paste become the fix, unless ``fix`` is given."""
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1 and fix is None:
        alone, fix = problems[0].parted()
        problems = [alone]
    if problems:
        codes = {problem.code for problem in problems}
        raise ConfigError(listed(map(str, problems)), fix=fix,
                          code=codes.pop() if len(codes) == 1 else None)


def listed(problems: Iterable[str], before: str = "", place: str = "in the configuration") -> str:
    """The text of one problem after ``before``, or of several on lines of their own."""
    first, *more = problems
    if not more:
        return before + first
    return "\n".join([f"{1 + len(more)} problems {place}:", *(f"  {p}" for p in (first, *more))])


def find_problems(config: schema.TrainConfig, sources: Mapping[str, str] | None = None,
                  handed_in: frozenset[str] = frozenset()) -> list[Problem]:
    """Everything wrong with a composed configuration.

    Args:
        config: the composed values; ``???`` where a mandatory one is missing.
        sources: where each key's value came from ("command line", a file); a key that is not in
            it has its default.
        handed_in: the keys whose place is taken by a Python object given to ``ppocli.train()``,
            of ``reward.fn``, ``reward.metric_fn``, ``prompts.path``, ``data.path``.
    """
    sources = sources or {}
    problems = range_problems(config, sources)
    bad = {problem.key for problem in problems}
    for broken, keys, text in chain(rules(config, handed_in), _entries(config)):
        names = keys.split(", ")
        # a value that is wrong in itself is not also reported as a contradiction
        if broken and not bad.intersection(names):
            origins = dict.fromkeys(origin for name in names if (
                origin := sources.get(name) or sources.get(free_mapping_of(name) or "")))
            problems.append(Problem(keys, text, " and ".join(origins) or DEFAULT_SOURCE))
    return problems


def range_problems(config: schema.TrainConfig, sources: Mapping[str, str],
                   names: Collection[str] | None = None) -> list[Problem]:
    """Missing values, and values outside the ranges and choices of the schema, for all keys or for
    some."""
    return [Problem(name, text, sources.get(name, DEFAULT_SOURCE),
                    "missing" if MISSING in str(attrgetter(name)(config)) else "out-of-range")
            for name in schema_keys() if names is None or name in names
            for text in _range_problems(schema_keys()[name], attrgetter(name)(config))]


def _range_problems(key: Key, value: Any) -> Iterator[str]:
    if isinstance(value, str) and value == MISSING:
        yield f"missing; it must be given: {key.name}=... ({key.doc})"
        return
    if key.kind == "mapping":
        yield from (f"{name} is missing; it must be given: {key.name}.{name}=..."
                    for name, item in (value or {}).items() if item == MISSING)
        return
    if value is None:
        return
    if key.kind == "sweep" and value == []:
        yield "the list must hold at least one value"
    for item in value if isinstance(value, list) else [value]:
        if key.item in (int, float) and isinstance(item, float) and not math.isfinite(item):
            yield f"{shown(item)} must be a finite number"
        elif key.allowed and not _allowed(key.metadata, item):
            hint = (did_you_mean(item, key.metadata["choices"])
                    if key.metadata["choices"] and isinstance(item, str) else "")
            yield f"{shown(item)} must be {key.allowed}{hint}"


def _allowed(metadata: Mapping[str, Any], item: Any) -> bool:
    if metadata["choices"]:
        return item in metadata["choices"] or (metadata["import_path"] and is_import_path(item))
    return all(test(item, metadata[test.__name__]) for test in (gt, ge, lt, le)
               if metadata[test.__name__] is not None)


# Entries of free mappings -------------------------------------------------------------------------

def _entries(config: schema.TrainConfig) -> Rules:
    """Rules on the entries of ``reward.fns`` and ``prompts.mix``, where a task reads them."""
    for key, entries, problems_of, readers in (
            ("reward.fns", config.reward.fns, _fns_entry, ("ppo",)),
            ("prompts.mix", config.prompts.mix, _mix_entry, ("ppo", "own"))):
        for name, entry in entries.items() if task_name(config) in readers else ():
            for text in problems_of(entry):
                yield True, f"{key}.{name}", text


def _fns_entry(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("fn"), str):
        yield (f"{shown(entry)} must be a mapping with fn, an import path or a built-in's name "
               f"(keys: {', '.join(schema.FNS_KEYS)})")
        return
    for name in (name for name in entry if name not in schema.FNS_KEYS):
        yield (f"unknown key {name}{did_you_mean(str(name), schema.FNS_KEYS)} "
               f"(allowed: {', '.join(schema.FNS_KEYS)})")
    if not isinstance(entry.get("kwargs") or {}, dict):
        yield f"kwargs {shown(entry['kwargs'])} must be a mapping"
    style, styles = entry.get("style", "auto"), ("auto", *schema.REWARD_STYLES)
    if style not in styles:
        yield f"style {shown(style)} must be one of {', '.join(styles)}"
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not math.isfinite(weight):
        yield f"weight {shown(weight)} must be a finite number"


def _mix_entry(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict) or not entry.get("path"):
        yield (f"{shown(entry)} must be a mapping with path: a file, folder, task or Hub data set "
               f"(keys: {', '.join(schema.MIX_KEYS)})")
        return
    for name, value in entry.items():
        key = schema_keys().get(f"prompts.{name}")
        if name == "weight":
            if type(value) not in (int, float) or not 0 < value < math.inf:
                yield f"weight {shown(value)} must be a number above 0"
        elif name not in schema.MIX_KEYS or key is None:
            yield (f"unknown key {name}{did_you_mean(str(name), schema.MIX_KEYS)} "
                   f"(allowed: {', '.join(schema.MIX_KEYS)})")
        elif key.kind == "mapping":
            if not isinstance(value, dict | None):
                yield f"{name} {shown(value)} must be a mapping"
        else:
            yield from _source_value(key, name, value)


def _source_value(key: Key, name: str, value: Any) -> Iterator[str]:
    try:
        converted = key.converted(value)
        if key.kind == "list" and not isinstance(value, list | None):
            raise ValueError
    except (OmegaConfBaseException, ValueError):
        yield f"{name} {shown(value)} must be {key.expected}"
        return
    yield from (f"{name} {text}" for text in _range_problems(key, converted))
    if name == "template" and "{" not in (value or "{"):
        yield f"template {shown(value)} has no placeholder such as {{prompt}}"
