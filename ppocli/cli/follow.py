"""Following files that another process writes: whole lines, each once, also after a resume."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppocli.config.resolved import NEXT_CONFIG_FILE
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.runs.record import is_run
from ppocli.runs.target import known_names, list_runs, run_named, written
from ppocli.storage.run_folder import RunFolder, live_owner
from ppocli.text import did_you_mean

START_SECONDS = 120.0
"""how long a run may load before it takes its folder's lock"""
_TAIL_BYTES = 1 << 18


class Tail:
    """The lines of a file that grows, is cut, or is replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests: list[int] = []  # of each line given out
        self._end = 0  # of the last line given out
        self._last = b""

    def poll(self) -> tuple[int, list[bytes]]:
        """How many of the lines given out are gone, and those that are new; only whole lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._end - len(self._last))
                # whether the last line still stands where it stood
                if file.read(len(self._last)) == self._last:
                    return 0, self._take(_whole_lines(file.read()))
                file.seek(0)
                lines = _whole_lines(file.read())
        except OSError:  # not there yet, or between two names
            return 0, []
        old, self._digests, self._end, self._last = self._digests, [], 0, b""
        self._take(lines)
        pairs = enumerate(zip(old, self._digests, strict=False))
        same = next((at for at, (was, now) in pairs if was != now), min(len(old), len(lines)))
        return len(old) - same, lines[same:]

    def _take(self, lines: list[bytes]) -> list[bytes]:
        self._digests += map(hash, lines)
        self._end += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        return lines


def _whole_lines(raw: bytes) -> list[bytes]:
    return [line for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]


def read_row(line: bytes) -> dict[str, Any] | None:
    """A row with its step; None for a line that is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def recent_samples(path: Path) -> list[dict[str, Any]]:
    """The first samples of the newest step and kind at the end of samples.jsonl."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = _whole_lines(file.read())[1 if size > _TAIL_BYTES else 0:]
    except OSError:  # gone by now
        return []
    found: list[dict[str, Any]] = []
    for row in filter(None, map(read_row, reversed(lines))):
        if found and (row["step"], row.get("kind")) != (found[0]["step"], found[0].get("kind")):
            break
        found.append(row)
    return found[::-1]


def find_watched(given: str | None, say: Callable[[str], None], runs: Path = Path("runs")
                 ) -> tuple[Path, str]:
    """The folder of the run to watch, one that has only just begun too, and how messages call it.

    A folder of runs, such as a sweep's, stands for the one that is running, else its newest.

    Raises:
        ConfigError: nothing is given and there is no run.
        InputError: there is no such folder.
        CheckpointError: the folder is no run's.
    """
    if given is None:
        found = _newest(runs)
        if found is None:
            raise ConfigError(f"There is no run in {runs} yet.", where=str(runs.absolute()),
                              fix="start one: ppocli train +recipe=quickstart")
        say(f"watching {found}, the newest run")
        return found.resolve(), str(found)
    path = run_named(given, runs, os.path.isdir)
    if not os.path.isdir(path):
        raise InputError(f"There is no run {given} (looked in {Path.cwd()}).", where="RUN",
                         fix="name a run's folder: ppocli runs list"
                         + did_you_mean(given, known_names(runs, _has_begun)))
    if not _has_begun(path):
        inside = _newest(path)
        if inside is None:
            raise CheckpointError(f"{given} is not a run folder (no config.yaml).", where=str(path),
                                  fix="name a folder made by ppocli train: ppocli runs list")
        say(f"watching {inside}, the newest run in it")
        path = inside
    return path.resolve(), str(path)


def _has_begun(folder: Path) -> bool:
    return os.path.isfile(RunFolder(folder).config)


def may_begin(folder: Path) -> bool:
    """Whether a process may be loading for this run that has not taken the folder's lock yet."""
    signs = [folder / NEXT_CONFIG_FILE]
    if not is_run(folder):
        signs.append(RunFolder(folder).config)
    for sign in signs:
        with suppress(OSError):
            if time.time() - sign.stat().st_mtime < START_SECONDS:
                return True
    return False


def _newest(root: Path) -> Path | None:
    found = list_runs(root, _has_begun)
    running = [folder for folder in found
               if live_owner(folder) is not None or may_begin(folder)]
    return max(running or found, key=written, default=None)
