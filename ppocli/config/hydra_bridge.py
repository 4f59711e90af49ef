"""Hydra: its search path, its loader, and its errors as one short ``ConfigError``.

Hydra names a config group after its folder, so the top-level ``recipes/`` would be ``+recipes=``.
A source that lists the files of a folder as the options of one group gives ``+recipe=``.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppocli.builtin.names import config_groups, shipped
from ppocli.config import config_yaml, import_guard, secrets
from ppocli.config.command_words import COMMAND_LINE, Words
from ppocli.config.keys import schema_keys
from ppocli.config.text import did_you_mean, first_line, short_path
from ppocli.errors import ConfigError

# 1.4 warns of any that is named, and has this one's behaviour
VERSION: Any = "1.3" if hydra.__version__.startswith("1.3") else version._UNSPECIFIED_
"""version of Hydra whose behaviour is requested"""
SCHEMA = "ppocli_schema"
"""the schema's name in the defaults list"""
PRIMARY = "train"
"""name of the primary config"""

# Hydra builds its plugins without arguments; this carries where one composition looks
_config_dirs: ContextVar[tuple[Path, ...]] = ContextVar("ppocli_config_dirs", default=())


class RecipeSource(FileConfigSource):
    """The YAML files of one folder as the options of the group ``recipe``."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        loaded = super().load_config(Path(config_path).name)
        loaded.header = {"package": "_global_"}
        return loaded

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "recipe")

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith("recipe/") and super().is_config(Path(config_path).name)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else ["recipe"]
        if config_path == "recipe" and results_filter != ObjectType.GROUP:
            return sorted(file.stem for file in Path(self.path).glob("*.yaml"))
        return []


class PpocliSearchPath(SearchPathPlugin):
    """Puts the recipe folders and ``--config-dir`` on the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        main = SearchPathQuery(provider="main")
        for folder in _config_dirs.get():
            # before conf/, so that a user's group option wins over a shipped one of that name
            search_path.prepend("config-dir", f"file://{folder}", main)
            search_path.append("config-dir", f"recipes://{folder}")
        if (recipes := Path.cwd() / "recipes").is_dir():
            search_path.append("current-folder", f"recipes://{recipes}")
        search_path.append("ppocli", f"recipes://{shipped('recipes')}")


class Entry(NamedTuple):
    """A setting in a file."""

    key: str
    value: Any
    file: str


# a release of Hydra without it fails here: files would not be searched for secrets
_COMPOSE_FILES = ConfigLoaderImpl._compose_config_from_defaults_list


class Loader(ConfigLoaderImpl):
    """Hydra's loader, which lists the settings of the files that it composes."""

    files: Sequence[Entry] = ()
    """in the order in which they are composed"""

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault],
                                           repo: IConfigRepository) -> DictConfig:
        self.files = [entry for default in defaults for entry in _settings(default, repo)]
        secrets.refuse_secrets(self.files)
        return _COMPOSE_FILES(self, defaults, repo)


def _settings(default: ResultDefault, repo: IConfigRepository) -> Iterator[Entry]:
    if (path := default.config_path) is None or path.startswith("hydra/") or path == SCHEMA:
        return
    loaded = repo.load_config(path)
    assert loaded is not None, path  # it is in the defaults list
    values = OmegaConf.to_container(loaded.config, resolve=False)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping of keys to values", where=loaded.path)
    if default.primary:
        values.pop("hydra", None)
    scheme, _, folder = loaded.path.partition("://")
    name = f"{path.removesuffix('.yaml')}.yaml"
    file = Path(folder) / (Path(name).name if scheme == "recipes" else name)
    package = "" if default.package in (None, "", "_global_") else f"{default.package}."
    for key, value in config_yaml.leaves(package, values):
        yield Entry(key, value, short_path(str(file)))


@contextmanager
def hydra_for(words: Words, schema: DictConfig) -> Iterator[None]:
    """Let compositions inside the block use the schema and the words' config folders; errors are
    raised as ConfigError."""
    dirs, store = _config_dirs.set(words.config_dirs), ConfigStore.instance()
    try:
        with as_config_errors():
            for plugin in (RecipeSource, PpocliSearchPath):
                Plugins.instance().register(plugin)  # once more does no harm
            store.store(name=SCHEMA, node=schema, provider="ppocli")
            yield
    finally:
        del store.repo[f"{SCHEMA}.yaml"]
        _config_dirs.reset(dirs)


def config_loader() -> Loader:
    """Hydra's loader of config files, for use inside :func:`hydra_for`."""
    version.setbase(VERSION)
    setup_globals()
    return Loader(create_config_search_path(str(shipped("conf"))))


def first_job(words: Words, loader: Loader | None = None) -> Words:
    """The words of a sweep as those of a single run: its first job, or the least values of ranges,
    and what is set for the sweep itself.

    Args:
        loader: lists the options of a group that a ``glob`` stands for.

    Raises:
        ConfigError: a word can't be read.
    """
    with as_config_errors():
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words.overrides)
    settings = tuple(
        replace(setting, value=str(ranged.start) if isinstance(
            ranged := override.value(), IntervalSweep)
            else next(iter(override.sweep_string_iterator()), "null"))
        if override.is_sweep_override() else setting
        for setting, override in zip(words.settings, overrides, strict=True))
    return replace(words, settings=settings).without("--multirun", "hydra.mode")


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raise errors of composing as ConfigError; bugs pass through unchanged."""
    try:
        yield
    except MissingConfigException as error:
        raise _missing(error) from error
    except OverrideParseException as error:
        first, *more = error.message.splitlines()
        detail = first.replace(f"Error parsing override '{error.override}'", "").strip() or next(
            (line.strip() for line in more if "See https" not in line), "")
        raise ConfigError(
            f"{error.override!r} can't be read as key=value" + (f": {detail}" if detail else ""),
            where=COMMAND_LINE, fix="quote a value with special characters twice: "
            "'key=\"some (text), more\"'; a list is key=[a,b]") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeError) as error:
        raise _translated(error) from error


def _translated(error: BaseException) -> ConfigError:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for cause in chain:
        if isinstance(cause, yaml.YAMLError | UnicodeDecodeError):
            mark = getattr(cause, "problem_mark", None)
            return ConfigError(
                "a config file is not valid YAML in UTF-8: "
                f"{getattr(cause, 'problem', None) or ' '.join(str(cause).split())}",
                where=mark and f"{short_path(mark.name)}:{mark.line + 1}", fix="correct that file")
    text = str(error)
    if match := re.search(r"(?:Could not override|No earlier Group Default for) '([^'@]+)", text):
        return ConfigError(f"there is no config group {match[1]}"
                           + did_you_mean(match[1], [*config_groups(), "recipe"]),
                           fix="config groups: " + ", ".join(config_groups()))
    if match := re.search(r"Multiple values for ([\w/]+)", text):
        return ConfigError(f"{match[1]} was given more than once",
                           where=f"{COMMAND_LINE}, or a recipe's defaults list",
                           fix=f"give one {match[1]}" + (
                               "" if match[1] == "recipe" else
                               f"; a recipe's defaults say `- override /{match[1]}: NAME`"))
    lines = dict.fromkeys(first_line(cause) for cause in chain if str(cause))
    return ConfigError(": ".join(lines) or type(error).__name__,
                       fix="see the composed configuration: ppocli train --cfg job ...")


def _missing(error: MissingConfigException) -> ConfigError:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group or error.options is None:
        return ConfigError(first_line(error), fix="see what there is: ppocli recipes list")
    inside = re.match(r"In '([^']+/[^']+)'", str(error))
    return unknown_option(group, name, list(error.options),
                          f"the defaults list of {inside[1]}" if inside else COMMAND_LINE)


def unknown_option(group: str, name: str, options: list[str], where: str = COMMAND_LINE
                   ) -> ConfigError:
    """The error for an unknown recipe or option of a config group."""
    plain, fix = name.lower().replace("-", "_"), "choose one of: " + ", ".join(options)
    for key, more in (("ppo.policy_loss", ""), ("ppo.advantage", " ppo.n=8")):
        if group in ("ppo", "recipe", "task") and plain in schema_keys()[key].metadata["choices"]:
            fix = f"{key}={plain}{more * (plain != 'gae')}, with the other words; published " \
                f"settings are {', '.join(f'ppo={each}' for each in config_groups()['ppo'])}"
    if group in config_groups() and (":" in name or "." in name):
        fix = f"for a folder or a Hub name write {group}.path={name}"
    elif group == "recipe" and name.endswith((".yaml", ".yml")):
        fix = "give the recipe's name without .yaml; its folder with --config-dir"
    elif group == "hydra/launcher" and name in import_guard.LAUNCHERS:
        fix = f"pip install 'ppocli[{import_guard.LAUNCHERS[name]}]'"
    kind = "recipe" if group == "recipe" else f"option of the config group {group}:"
    return ConfigError(f"unknown {kind} {name}{did_you_mean(name, options)}", where=where, fix=fix)
