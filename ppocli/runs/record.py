"""A run as its folder tells it: configuration, rows, samples, warnings, status. No torch here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ppocli.config.resolved import read_config
from ppocli.config.schema import TrainConfig, planned_episodes
from ppocli.engine.run_folder import RunFolder, live_owner
from ppocli.errors import CheckpointError

Status = Literal["running", "finished", "stopped", "failed", "interrupted"]
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (\w+) (.*)$")


@dataclass(frozen=True)
class LogLine:
    """A message of ppocli.log; continued lines are joined with newlines."""

    time: str
    """local time of the machine that ran it: ``2026-01-31 12:00:00``"""
    level: str
    text: str


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder; what is read late is read once."""

    folder: RunFolder
    config: TrainConfig
    rows: list[dict[str, Any]]
    """metrics.jsonl: one row a step, in order, step 0 first if there was an evaluation"""
    summary: dict[str, Any] | None
    """summary.json of the newest end of the run; ``status`` tells whether it is still true"""
    status: Status

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name

    @property
    def step(self) -> int:
        """The newest step with a row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def total_steps(self) -> int:
        """Steps in the whole run."""
        return -(-planned_episodes(self.config.ppo) // self.config.ppo.num_rollouts)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a figure at every step that has a finite one."""
        return [(int(row["step"]), float(row[name])) for row in self.rows
                if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])]

    @cached_property
    def names(self) -> list[str]:
        """Names of all figures, in the order they first appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row
                                  if name not in ("step", "episode", "updates")))

    def eval_samples(self, step: int) -> list[dict[str, Any]]:
        """The evaluation samples of one step, in the order of the prompts."""
        return [row for row in read_jsonl(self.folder.samples)
                if row.get("kind") == "eval" and row.get("step") == step]

    def log_lines(self) -> list[LogLine]:
        """Everything that was said during the run."""
        found: list[LogLine] = []
        try:
            text = self.folder.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return found
        for line in text.splitlines():
            match = _LOG_LINE.match(line)
            if match:
                found.append(LogLine(match[1], match[2], match[3]))
            elif found:
                last = found[-1]
                found[-1] = LogLine(last.time, last.level, f"{last.text}\n{line}")
        return found

    def warnings(self) -> list[LogLine]:
        """Warnings and errors that were said, each with its cause and advice in its text."""
        return [line for line in self.log_lines() if line.level in ("WARNING", "ERROR")]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has a configuration, and a run has started to fill it."""
    run = RunFolder(folder)
    return run.config.is_file() and ((folder / "run.json").is_file() or run.metrics.is_file()
                                     or run.checkpoints.is_dir() or run.summary.is_file())


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder; a run that is being written can be read at any moment.

    Raises:
        CheckpointError: it is no run folder, or its config.yaml is damaged.
    """
    run = RunFolder(folder.resolve())
    if not is_run(run.path):
        raise CheckpointError(f"{folder} is no run folder (no config.yaml with metrics.jsonl or "
                              "checkpoints/).", where=str(folder),
                              fix="name a folder that ppocli train made: ppocli runs list")
    config = read_config(run.config)
    rows = _last_of_each_step(read_jsonl(run.metrics))
    summary = _read_json(run.summary)
    return RunRecord(run, config, rows, summary, _status(run, summary, rows))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; missing file, torn and damaged lines give nothing."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def _last_of_each_step(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _status(run: RunFolder, summary: dict[str, Any] | None, rows: list[dict[str, Any]]) -> Status:
    """A live process wins; a summary older than the newest row is of an earlier end."""
    if live_owner(run.path) is not None:
        return "running"
    newest = rows[-1]["step"] if rows else 0
    if summary is None or int(summary.get("steps") or 0) < newest:
        return "interrupted"
    status = summary.get("status")
    return status if status in ("finished", "stopped", "failed") else "interrupted"
