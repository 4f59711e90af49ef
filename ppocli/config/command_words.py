"""The words after ``ppocli train``, read once: Hydra's flags told apart from settings.

Hydra takes settings before flags only, reads ``recipe=x`` and ``+recipe=x`` differently, and has
a grammar in which some plain text needs quotes; here the words become what Hydra expects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppocli.builtin.names import config_groups
from ppocli.config import config_yaml, secrets
from ppocli.config.import_guard import TRUST
from ppocli.config.keys import (
    AUTO,
    format_foreign_names,
    key_for,
    named_elsewhere,
    schema_keys,
    takes_escapes,
)
from ppocli.config.text import did_you_mean, how_unescaped, nearest, pasted, unescaped
from ppocli.errors import ConfigError

COMMAND_LINE = "command line"
"""the source of typed settings, in messages"""
CHOICES = {"--cfg": ("job", "hydra", "all", "deepspeed"),
            "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")}
SHORT = {"-c": "--cfg", "-p": "--package", "-r": "--run", "-m": "--multirun",
          "-sc": "--shell-completion", "-cp": "--config-path", "-cn": "--config-name",
          "-cd": "--config-dir", "-i": "--info"}
_WITH_VALUE = ("--cfg", "--package", "--config-path", "--config-name", "--config-dir")
ACCEPT_CHANGES = "--accept-changes"
"""a flag of ppocli: accept a config.yaml that was changed by hand"""
_PLAIN = ("--hydra-help", "--resolve", "--run", "--multirun", "--shell-completion", TRUST,
          ACCEPT_CHANGES)
FLAGS = tuple(sorted((*_WITH_VALUE, *_PLAIN, "--info", "--help", "--version")))
# options of the command line that never come here; misspelt ones do
_OURS = ("--no-progress", "--dry-run")
_BEFORE = ("-q", "--quiet", "-v", "--verbose", "--no-color")
_EXCLUSIVE = ("--cfg", "--run", "--multirun", "--info", "--shell-completion", "--hydra-help")
_ESCAPE = re.compile(r"\\[nt]")
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_SETTING = re.compile(r"(\+\+|\+|~|)([^=+~\s][^=\s]*)(?:=(.*))?", re.DOTALL)
# what YAML or Hydra would turn into a number or a truth value
_NOT_TEXT = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)|true|false",
                       re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: ``+recipe=x`` is ``+``, ``recipe``, ``x``; the value is None without an ``=``.
    The value is in Hydra's override grammar."""

    prefix: str
    key: str
    value: str | None

    def __str__(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")


@dataclass(frozen=True, slots=True)
class Words:
    """The parts of a command line. ``flags`` are long names; ``config_dirs`` are absolute."""

    settings: tuple[Setting, ...]
    flags: tuple[tuple[str, str | None], ...] = ()
    config_dirs: tuple[Path, ...] = ()
    typed: tuple[str, ...] = ()
    """all words, unchanged"""

    @property
    def overrides(self) -> list[str]:
        """The settings in Hydra's form."""
        return [str(setting) for setting in self.settings]

    def value(self, key: str) -> str | None:
        """The last value of a key, without quotes; None if it isn't set, or set to nothing."""
        return next((config_yaml.unquoted(setting.value) for setting in reversed(self.settings)
                     if setting.key == key and setting.value), None)

    def flag(self, name: str) -> str | None:
        """The value of a flag, "" for a flag without value, None if it isn't there."""
        return next((value or "" for flag, value in self.flags if flag == name), None)

    def without(self, *names: str) -> Words:
        """A copy without some flags and without the settings of some keys."""
        return replace(self, settings=tuple(s for s in self.settings if s.key not in names),
                       flags=tuple(flag for flag in self.flags if flag[0] not in names))

    def adding(self, *words: str) -> Words:
        """A copy with further settings at the end."""
        return replace(self, settings=(*self.settings, *map(read_setting, words)))

    @property
    def is_sweep(self) -> bool:
        """Whether these words ask for several jobs (``-m``)."""
        return self.flag("--multirun") is not None or any(
            word.lower().replace(" ", "") == "hydra.mode=multirun" for word in self.overrides)

    @property
    def of_sweep(self) -> list[str]:
        """The keys of the sweep itself."""
        return [each.key for each in self.settings if each.key.startswith("sweep.")]

    @property
    def only_prints(self) -> bool:
        """Whether the words only print something."""
        return any(flag in ("--cfg", "--info", "--hydra-help", "--shell-completion")
                   for flag, _ in self.flags)

    def argv(self, *, whole: bool = False) -> list[str]:
        """The words in Hydra's order and spelling; with ppocli's own flags if ``whole``."""
        parts = self.overrides
        for flag, value in self.flags:
            # config folders go through the search path, a new main folder through hydra.main
            if whole or flag not in ("--config-dir", "--config-path", TRUST, ACCEPT_CHANGES):
                parts += [flag] if value is None else [flag, value]
        return parts


def read_words(words: Sequence[str]) -> Words:
    """Tell flags from settings and check the flags.

    Args:
        words: the command line after the command's name, in any order.

    Raises:
        ConfigError: an unknown flag, one without its value, flags that exclude each other, a word
            that is no setting, or a secret.
    """
    settings: list[Setting] = []
    flags: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, attached = word.partition("=")
        is_setting = equals and not name.startswith("--") and name not in SHORT
        if word == "--" or not word.startswith("-") or is_setting:
            settings += [] if word == "--" else [read_setting(word)]
            continue
        name = SHORT.get(name, name)
        value = attached if equals else None
        if name in _WITH_VALUE and value is None:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else None
            if value is None:
                raise ConfigError(f"{word} needs a value", where=COMMAND_LINE,
                                  fix=f"e.g. {word} {CHOICES.get(name, ('NAME',))[0]}")
        elif name == "--info" and value is None and rest and rest[0] in CHOICES["--info"]:
            value = rest.pop(0)
        if name not in FLAGS:
            raise _unknown_flag(word, rest[0] if rest and value is None else value, words)
        _check_flag(name, value)
        flags.append((name, value))
    _check_combination(dict(flags))
    secrets.refuse_secrets((setting.key, setting.value, COMMAND_LINE) for setting in settings)
    folders = [value for flag, value in flags if flag == "--config-dir" and value]
    return Words(tuple(settings), tuple(flags),
                 tuple(_config_dir(folder, "--config-dir") for folder in folders)
                 + tuple(_config_dir(folder, "PPOCLI_CONFIG_DIR") for folder
                         in os.environ.get("PPOCLI_CONFIG_DIR", "").split(":") if folder),
                 tuple(words))


def given_words(settings: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Settings from Python, a list of words or a nested mapping, as words.

    Raises:
        ConfigError: one text, or a list that has other items than texts.
    """
    return (config_yaml.mapping_words(settings) if isinstance(settings, Mapping)
            else list_of_texts(settings, "overrides"))


def list_of_texts(values: Sequence[str], name: str) -> list[str]:
    """``values``, if it is a list of texts; one text would be taken letter by letter.

    Raises:
        ConfigError: it is one text, or not all items are texts.
    """
    if isinstance(values, str):
        raise ConfigError(f"{name} is one text, not a list of them.", where=name,
                          fix=f"{name}=[{values!r}]")
    texts = list(values)
    for value in texts:
        if not isinstance(value, str):
            raise ConfigError(f"{name} holds {value!r}, which is no text.", where=name,
                              fix="give a list of texts")
    return texts


def _unknown_flag(word: str, value: str | None, words: Sequence[str]) -> ConfigError:
    """The error for an unknown option, which most often stands for a setting of ppocli or of
    another library."""
    shown = word.partition("=")[0]
    name = shown.lstrip("-").replace("-", "_")
    secrets.refuse_secrets([(name, value, COMMAND_LINE)])
    task = next((each.partition("=")[2] for each in words if each.startswith("task=")), None)
    elsewhere = named_elsewhere(name, task)
    keys = list(elsewhere) or nearest(name, list(schema_keys()), count=1)
    example = "..." if value is None or value.startswith("-") or "=" in value else value
    fix = f"settings are written without dashes: {pasted(f'{keys[0]}={example}')}" if keys else \
        "see `ppocli train --help`"
    if shown in _BEFORE:
        fix = f"it stands before the command: ppocli {shown} train ..."
    return ConfigError(f"unknown option {shown}" + (
        format_foreign_names(elsewhere) or did_you_mean(shown, (*FLAGS, *_OURS))),
        where=COMMAND_LINE, fix=fix)


def _check_flag(name: str, value: str | None) -> None:
    if name in _PLAIN and value is not None:
        raise ConfigError(f"{name} takes no value", where=COMMAND_LINE)
    if name in CHOICES and value is not None and value not in CHOICES[name]:
        raise ConfigError(f"{name} {value}: must be one of {', '.join(CHOICES[name])}"
                          + did_you_mean(value, CHOICES[name]), where=COMMAND_LINE)


def _check_combination(flags: dict[str, str | None]) -> None:
    modes = [flag for flag in flags if flag in _EXCLUSIVE]
    if len(modes) > 1 and set(modes) != {"--cfg", "--multirun"}:  # which is about the first job
        raise ConfigError(f"{' and '.join(modes)} exclude each other", where=COMMAND_LINE,
                          fix="give one of them")
    # what DeepSpeed would be given is printed by ourselves, whole
    if flags.get("--cfg", "deepspeed") == "deepspeed":
        for flag, example in (("--resolve", "--resolve"), ("--package", "--package ppo")):
            if flag in flags:
                raise ConfigError(f"{flag} belongs to --cfg", where=COMMAND_LINE,
                                  fix=f"ppocli train --cfg job {example} ...")


def _config_dir(folder: str, source: str) -> Path:
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"config folder {folder} does not exist", where=source,
                          fix="give an existing folder with recipes or config groups")
    return path


def read_setting(word: str) -> Setting:
    """A setting in the form that Hydra reads correctly: ``recipe=x`` as ``+recipe=x``, texts as
    texts.

    A value for a text key that Hydra's grammar would turn into a number (a commit ``12e4567``) or
    can't read at all (a path with umlauts or brackets, a template with braces) is quoted.

    Raises:
        ConfigError: the word is no setting.
    """
    if (match := _SETTING.fullmatch(word)) is None or (match[3] is None and match[1] != "~"):
        raise ConfigError(f"{word!r} is not a setting", where=COMMAND_LINE, fix="write key=value, "
                          "e.g. ppo.total_episodes=2000; a recipe is +recipe=quickstart")
    prefix, key, value = match.groups()
    if value is None or key == "resume":
        return Setting(prefix, key, value)
    if key == "recipe" and prefix == "":
        prefix = "+"
    if key in config_groups() and value == "null":
        return Setting("~", key, None)
    if key == AUTO and value == "auto":
        value = "null"
    if (schema_key := key_for(key)) is not None and schema_key.kind != "list":
        is_text = schema_key.item is str and (
            schema_key.kind == "scalar" or (schema_key.kind == "sweep" and value[:1] != "["))
        takes_text = is_text or (schema_key.kind == "mapping" and key != schema_key.name)
        if (is_text and _NOT_TEXT.fullmatch(value)) or (takes_text and not _readable(value)):
            value = config_yaml.quoted(value)
    elif key.startswith("hydra.") and key.endswith(".dir") and not _readable(value):
        value = config_yaml.quoted(value)
    return Setting(prefix, key, _quoting_escapes(value) if takes_escapes(key) else value)


def for_hydra(setting: Setting) -> tuple[list[str], list[str]]:
    """The words that make Hydra set a value, and notes on texts that were typed with backslashes.

    ``KEY={}`` empties a mapping; Hydra alone would merge it.
    """
    key, value = setting.key, setting.value
    if value is None:
        return [str(setting)], []
    notes: list[str] = []

    def read(match: re.Match[str]) -> str:
        text = config_yaml.unquoted(match[0])
        if (note := how_unescaped(key, text)) is not None:
            notes.append(note)
        return match[0] if note is None else config_yaml.quoted(unescaped(text))

    if takes_escapes(key):
        value = _QUOTED.sub(read, value)
    words = [str(replace(setting, value=value))]
    schema_key = key_for(key)
    empties = value.replace(" ", "") == "{}" and schema_key and schema_key.kind == "mapping"
    return [f"{key}=???", *words] if empties else words, notes


def _quoting_escapes(value: str) -> str:
    """A value with texts that contain ``\\n`` or ``\\t`` in quotes: outside of quotes Hydra would
    drop one of two backslashes."""
    ends = r",\[\]{}()'\"" + ":" * ("{" in value)

    def quote(match: re.Match[str]) -> str:
        item = match[0]
        if item[0] in "'\"" or not _ESCAPE.search(item):
            return item
        text = re.sub(r"(\\+[nt])|\\([\\()\[\]{}:=, \t])", lambda m: m[1] or m[2], item.strip())
        return item.replace(item.strip(), config_yaml.quoted(text))

    if not _ESCAPE.search(value):
        return value
    quoted = re.sub(rf"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.|[^\\{ends}])+""", quote, value,
                    flags=re.DOTALL)
    return quoted if _readable(quoted) else value


def _readable(value: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"x={value}")
    except HydraException:
        return False
    return True
