"""Hydra's, OmegaConf's and YAML's exceptions as one short ``ConfigError``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from ppocli.config.keys import schema_keys
from ppocli.config.paths import config_groups
from ppocli.errors import ConfigError
from ppocli.text import did_you_mean


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raise what goes wrong while composing as ConfigError; bugs pass through unchanged."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeError) as error:
        raise _translated(error) from error


def yaml_error(error: yaml.YAMLError) -> ConfigError:
    """A YAML error with the file and line it is in."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    context = getattr(error, "context", None)
    where = f"{_short(mark.name)}:{mark.line + 1}" if mark is not None else None
    return ConfigError(f"not valid YAML: {problem}" + (f" ({context})" if context else ""),
                       where=where, fix="correct the file at that line")


def _translated(error: Exception) -> ConfigError:
    chain = list(_causes(error))
    for cause in chain:
        if isinstance(cause, yaml.YAMLError):
            return yaml_error(cause)
        if isinstance(cause, UnicodeDecodeError):
            return ConfigError(f"a config file is not UTF-8 text: {cause.reason} at byte "
                               f"{cause.start}", fix="save the file as UTF-8")
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, OverrideParseException):
        return _unparsed(error)
    return _general(chain)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _missing(error: MissingConfigException) -> ConfigError:
    path = error.missing_cfg_file or ""
    group, _, name = path.rpartition("/")
    if not group or error.options is None:
        return ConfigError(str(error).splitlines()[0] or f"config {path!r} was not found",
                           fix="see what is there: ppocli train --info searchpath")
    options = list(error.options)
    kind = ("unknown recipe" if group == "recipe"
            else f"unknown option of the config group {group}:")
    inside = re.match(r"In '([^']+)'", str(error))
    outer = inside[1] if inside and "/" in inside[1] else None
    where = f"the defaults list of {outer}" if outer else "command line"
    if group in config_groups() and (":" in name or "." in name):
        fix = f"for a folder or a Hub name write {group}.path={name}"
    elif group == "recipe" and name.endswith((".yaml", ".yml")):
        fix = "give the recipe's name without .yaml; its folder with --config-dir"
    else:
        fix = "choose one of: " + ", ".join(options)
    return ConfigError(f"{kind} {name}{did_you_mean(name, options)}", where=where, fix=fix)


def _unparsed(error: OverrideParseException) -> ConfigError:
    word = error.override
    reason = error.message.splitlines()[0].replace(f"Error parsing override '{word}'", "").strip()
    lines = [line for line in error.message.splitlines()[1:] if "See https" not in line]
    detail = reason or (lines[0].strip() if lines else "")
    return ConfigError(f"{word!r} can't be read as key=value" + (f": {detail}" if detail else ""),
                       where="command line",
                       fix="quote a value with special characters twice: "
                           "'key=\"some (text), more\"'; a list is key=[a,b]")


def _general(chain: list[BaseException]) -> ConfigError:
    error = chain[0]
    text = str(error)
    match = re.search(r"Could not override '([^'@]+)", text)
    if match:
        groups = [*config_groups(), "recipe"]
        return ConfigError(f"there is no config group {match[1]}"
                           + did_you_mean(match[1], groups),
                           fix="config groups: " + ", ".join(config_groups()))
    match = re.search(r"Multiple values for ([\w/]+)", text)
    if match:
        return ConfigError(f"{match[1]} was given more than once", where="command line",
                           fix=f"give one {match[1]}")
    lines = [line.strip() for cause in chain if str(cause)
             for line in str(cause).splitlines()[:1]]
    name = next((str(key) for cause in chain
                 if (key := getattr(cause, "full_key", None))), None)
    hint = did_you_mean(name, list(schema_keys())) if name and name not in schema_keys() else ""
    return ConfigError(": ".join(dict.fromkeys(lines)) + hint or type(error).__name__, where=name,
                       fix="see the composed configuration: ppocli train --cfg job ...")


def _short(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
