"""Hydra plugins that make ``+recipe=NAME`` and a resumed run's ``config.yaml`` loadable.

Hydra names a config group after its folder, so the top-level ``recipes/`` would be ``+recipes=``.
A source that lists the files of a folder as the options of one group gives ``+recipe=``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from ppocli.config.paths import shipped

# Hydra builds its plugins without arguments; these two carry what one composition looks at.
_config_dirs: ContextVar[tuple[Path, ...]] = ContextVar("ppocli_config_dirs", default=())
_resumed_run: ContextVar[Path | None] = ContextVar("ppocli_resumed_run", default=None)


class RecipeSource(ConfigSource):
    """The YAML files of one folder as the options of the group ``recipe``."""

    group = "recipe"

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def _names(self) -> list[str]:
        return sorted(file.stem for file in Path(self.path).glob("*.yaml"))

    def _name(self, config_path: str) -> str | None:
        group, _, name = config_path.rpartition("/")
        return name.removesuffix(".yaml") if group == self.group else None

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path) / f"{self._name(config_path)}.yaml"
        if not file.is_file():
            raise ConfigLoadError(f"Config not found : {file}")
        with file.open(encoding="utf-8") as stream:
            config = OmegaConf.load(stream)
        return ConfigResult(config=config, path=f"{self.scheme()}://{self.path}",
                            provider=self.provider, header={"package": "_global_"})

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", self.group)

    def is_config(self, config_path: str) -> bool:
        return self._name(config_path) in self._names()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [self.group]
        if config_path == self.group and results_filter != ObjectType.GROUP:
            return self._names()
        return []


class RunSource(RecipeSource):
    """The ``config.yaml`` of the run that is resumed, as ``+run=config``."""

    group = "run"

    @staticmethod
    def scheme() -> str:
        return "run"

    def _names(self) -> list[str]:
        return ["config"] if (Path(self.path) / "config.yaml").is_file() else []


class PpocliSearchPath(SearchPathPlugin):
    """Puts the recipe folders, ``PPOCLI_CONFIG_DIR`` and ``--config-dir`` on the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        run = _resumed_run.get()
        if run is not None:
            search_path.append("resumed-run", f"run://{run}")
        main = SearchPathQuery(provider="main")
        for folder in _config_dirs.get():
            # before conf/, so that a user's group option wins over a shipped one of that name
            search_path.prepend("config-dir", f"file://{folder}", main)
            search_path.append("config-dir", f"recipes://{folder}")
            if (folder / "recipes").is_dir():
                search_path.append("config-dir", f"recipes://{folder / 'recipes'}")
        own = Path.cwd() / "recipes"
        if own.is_dir():
            search_path.append("current-folder", f"recipes://{own}")
        search_path.append("ppocli", f"recipes://{shipped('recipes')}")


def register_plugins() -> None:
    """Make the plugins known to Hydra; registering twice is harmless."""
    for plugin in (RecipeSource, RunSource, PpocliSearchPath):
        Plugins.instance().register(plugin)


@contextmanager
def looking_in(config_dirs: tuple[Path, ...], resumed_run: Path | None) -> Iterator[None]:
    """Let compositions inside the block see ``config_dirs`` and the config of ``resumed_run``."""
    dirs, run = _config_dirs.set(config_dirs), _resumed_run.set(resumed_run)
    try:
        yield
    finally:
        _config_dirs.reset(dirs)
        _resumed_run.reset(run)
