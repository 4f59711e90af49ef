"""The arguments of a process that trains, and what a finished run leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.config import config_yaml, schema

if TYPE_CHECKING:
    from ppocli.publish.console import DisplayMode


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of a process that trains: the run and its configuration, and how to start."""

    run_dir: Path
    config: schema.TrainConfig
    """other processes read it from the run's folder"""
    resume: bool = False
    """go on from the newest valid checkpoint"""
    display: DisplayMode = "auto"
    """what the user sees"""
    reserved_by: int | None = None
    """the process that keeps the folder for this one"""
    parent: int | None = None
    """the process that has started this one; when it ends, the run stops and saves"""
    reports: str | None = None
    """folder in which this process writes its pid, phase and outcome for its parent"""
    limited: tuple[str, ...] = ()
    """import paths that recipes name, see :mod:`ppocli.config.import_guard`"""

    def argv(self) -> list[str]:
        """The same as command-line arguments: the run's folder, and the rest as JSON."""
        how = {name: getattr(self, name) for name in self.__slots__
               if name not in ("run_dir", "config")}
        return [str(self.run_dir), json.dumps(how)]

    @classmethod
    def read(cls, argv: Sequence[str]) -> Start:
        """The start with the arguments of :meth:`argv`; raises as :meth:`of_folder`."""
        return cls.of_folder(Path(argv[0]), **json.loads(argv[1]))

    @classmethod
    def of_folder(cls, run_dir: Path, *, resume: bool = False, **how: Any) -> Start:
        """The start of a run with the configuration in its folder.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        config = config_yaml.read_config(config_yaml.next_config(run_dir) if resume
                                         else run_dir / config_yaml.CONFIG_FILE)
        return cls(run_dir, config, resume, **how)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a finished run has left. ``stopped_by`` is a signal that came too late to stop it."""

    run_dir: Path
    model_dir: Path | None
    summary: dict[str, Any] | None
    stopped_by: int | None = None
