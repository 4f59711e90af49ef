"""What ``ppocli watch`` follows: the files of a run that another process writes."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppocli.cli.output import complain, say
from ppocli.config.resolved import NEXT_CONFIG_FILE, read_config
from ppocli.config.schema import planned_episodes
from ppocli.display.console import clean, figure, row_lines
from ppocli.display.live_view import Dashboard, Sample, resident_mib
from ppocli.display.pane import Pane
from ppocli.errors import CheckpointError, ConfigError, InputError, PpocliError
from ppocli.runs.record import is_run, read_run, subfolders
from ppocli.runs.target import run_named, written
from ppocli.storage.run_folder import LOCK, RunFolder, finite_or_null, live_owner
from ppocli.text import did_you_mean

LAST = 5
"""steps of the past that are shown first"""
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (?P<level>\w+) (?P<text>.*)$")

START_SECONDS = 120.0
"""how long a run may load before it takes its folder's lock"""
_TAIL_BYTES = 1 << 18


class Tail:
    """The lines of a file that grows, is cut, or is replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests: list[int] = []  # of each line given out
        self._file: tuple[int, int] | None = None  # device and inode
        self._end = 0  # of the last line given out
        self._last = b""

    def poll(self) -> tuple[int, list[bytes]]:
        """How many of the lines given out are gone, and those that are new; only whole lines."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or not self._goes_on(file):
                    self._file = (status.st_dev, status.st_ino)
                    file.seek(0)
                    return self._again(file.read())
                lines = _whole_lines(file.read())
        except OSError:  # not there yet, or between two names
            return 0, []
        self._take(lines)
        return 0, lines

    def _goes_on(self, file: Any) -> bool:
        """Whether the last line still stands where it stood; the file is then behind it."""
        file.seek(self._end - len(self._last))
        return bool(file.read(len(self._last)) == self._last)

    def _again(self, raw: bytes) -> tuple[int, list[bytes]]:
        lines = _whole_lines(raw)
        digests = [hash(line) for line in lines]
        old, same = self._digests, 0
        while same < min(len(old), len(digests)) and old[same] == digests[same]:
            same += 1
        self._digests, self._end, self._last = [], 0, b""
        self._take(lines)
        return len(old) - same, lines[same:]

    def _take(self, lines: list[bytes]) -> None:
        if lines:
            self._digests += [hash(line) for line in lines]
            self._end += sum(map(len, lines))
            self._last = lines[-1]


def _whole_lines(raw: bytes) -> list[bytes]:
    return [line for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]


def recent_samples(path: Path) -> list[dict[str, Any]]:
    """The first samples of the newest step and kind at the end of samples.jsonl."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL_BYTES))
        lines = _whole_lines(file.read())[1 if size > _TAIL_BYTES else 0:]
    found: list[dict[str, Any]] = []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
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
        names = [name for run in _begun(runs)
                 for name in (str(run), run.relative_to(runs).as_posix())]
        raise InputError(f"There is no run {given} (looked in {Path.cwd()}).", where="RUN",
                         fix="name a run's folder: ppocli runs list" + did_you_mean(given, names))
    if not _has_begun(path):
        inside = _newest(path)
        if inside is None:
            raise CheckpointError(f"{given} is no run folder (no config.yaml).", where=str(path),
                                  fix="name a folder that ppocli train made: ppocli runs list")
        say(f"watching {inside}, the newest run in it")
        path = inside
    return path.resolve(), str(path)


def _begun(root: Path) -> list[Path]:
    """Folders of runs, those of sweeps one folder deeper too, that have at least begun."""
    found = []
    for folder in subfolders(root):
        if _has_begun(folder):
            found.append(folder)
        elif not folder.name.startswith("."):
            found += [job for job in subfolders(folder) if _has_begun(job)]
    return found


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
    found = _begun(root)
    running = [folder for folder in found
               if live_owner(folder) is not None or may_begin(folder)]
    return max(running or found, key=written, default=None)


def open_pane(follower: Follower, console: Any) -> Pane:
    board = follower.board = Dashboard(follower.shown, follower.memory)
    narrow = not console.encoding.lower().startswith("utf")
    pane = Pane(console, lambda width, height: board.lines(width, height, ascii_only=narrow))
    follower.look()  # the past first, so that the first frame is whole
    pane.start()
    return pane


class Follower:
    """What has been seen of a run, and shows what is new."""

    def __init__(self, folder: Path, shown: str, from_start: bool, as_json: bool) -> None:
        self.run = RunFolder(folder)
        self.shown = shown
        self.pane: Pane | None = None
        self.board: Dashboard | None = None
        self._as_json = as_json
        self._past: int | None = None if from_start else LAST
        self._metrics = Tail(self.run.metrics)
        self._log = Tail(self.run.log)
        self._steps: list[dict[str, Any]] = []
        self._log_seen = self._waiting = self._in_warning = False
        self._samples_at = -1
        self._config_at = -1
        self._total = 0

    def look(self) -> bool:
        """Show what is new; whether there may be more."""
        # asked first: a process that is gone by now has written all it ever will
        alive = self._is_alive()
        self._read_total()
        dropped, lines = self._metrics.poll()
        rows = [row for row in map(_row, lines) if row is not None]
        if dropped:
            self._steps = self._steps[:max(0, len(self._steps) - dropped)]
            last = self._steps[-1]["step"] if self._steps else 0
            self._note(f"the run was taken up again at step {last}")
        self._steps += rows
        self._feed(rows, dropped)
        self._show_warnings()
        self._show(rows)
        if alive and not self._steps and not self._waiting:
            self._waiting = True
            self._note(f"waiting for the first step of {self.shown}")
        return alive

    def memory(self) -> float | None:
        """MiB that the run's process holds."""
        owner = live_owner(self.run.path)
        return None if owner is None else resident_mib(owner.pid)

    def close(self) -> None:
        """Take the live view away."""
        if self.pane is not None:
            self.pane.stop()
            self.pane = None

    def ending(self) -> str:
        """How the run ended, in words, and what to do next."""
        path, resume = self.shown, f"resume with: ppocli resume {self.shown}"
        if not self.run.path.is_dir():
            return f"{path} ended before its first step and was removed"
        if not is_run(self.run.path):
            return f"{path} ended before its first step"
        record = read_run(self.run.path)
        summary = record.summary or {}
        step = record.step
        at = f"at step {step} of {self._total}"
        if record.status == "running":  # taken up again in this very moment
            return f"{path} is running again; watch it with: ppocli watch {path}"
        if record.status == "finished":
            before, after = (((summary.get(name) or {}).get("reward_mean"))
                             for name in ("eval_before", "eval_after"))
            change = "" if after is None else \
                f", reward {'' if before is None else figure(before, 3) + ' -> '}{figure(after, 3)}"
            return f"{path} finished: {step} steps{change}; model: {path}/model"
        if record.status == "stopped":
            return f"{path} was stopped {at}; {resume}"
        if record.status == "failed":
            error = re.sub(r"\n(?! )", "\n  ", str(summary.get("error", "unknown error")))
            go_on = f"\n  {resume}" if record.folder.checkpoints.is_dir() else ""
            return f"{path} failed {at}: {error}\n  log:   {path}/ppocli.log{go_on}"
        if not record.folder.checkpoints.is_dir():
            return f"{path} was interrupted {at}: its process is gone, and no checkpoint is saved"
        return f"{path} was interrupted {at}: its process is gone; {resume}"

    def _is_alive(self) -> bool:
        if live_owner(self.run.path) is not None:
            return True
        with suppress(OSError, ValueError, TypeError, KeyError):
            # nothing tells from here whether another machine's process lives: believe the lock
            name = json.loads((self.run.path / LOCK).read_bytes())["host"]
            import socket

            if name != socket.gethostname():
                return True
        return may_begin(self.run.path)

    def _read_total(self) -> None:
        with suppress(OSError, PpocliError):
            at = self.run.config.stat().st_mtime_ns
            if at != self._config_at:
                ppo = read_config(self.run.config).ppo
                self._total = -(-planned_episodes(ppo) // ppo.num_rollouts)
                self._config_at = at

    def _feed(self, rows: list[dict[str, Any]], dropped: int) -> None:
        board = self.board
        if board is None:
            return
        if dropped or not board.total or board.total != self._total:
            board.begin(self._total, self._steps)
        else:
            for row in rows:
                board.add_row(row)
        now = board.clock() - time.time()
        with suppress(OSError):  # clocks of the run, not of who watches
            board.begun = now + (self.run.path / LOCK).stat().st_mtime
            board.step_begun = max(board.begun, now + self.run.metrics.stat().st_mtime)
        with suppress(OSError):
            at = self.run.samples.stat().st_mtime_ns
            if at != self._samples_at:
                self._samples_at = at
                found = recent_samples(self.run.samples)
                if found:
                    board.show([Sample(str(row.get("prompt", "")), str(row.get("response", "")),
                                       row.get("score")) for row in found], found[0]["step"])
        if self.pane is not None:
            self.pane.changed()

    def _show(self, rows: Iterable[dict[str, Any]]) -> None:
        rows = list(rows)
        if self._past is not None:
            rows, self._past = rows[-self._past:], None
        for row in rows:
            if self._as_json:
                self._print(json.dumps(finite_or_null(row), ensure_ascii=False))
            else:
                for line in row_lines(row, self._total):
                    self._print(line)

    def _show_warnings(self) -> None:
        """Warnings of the log from now on, which its first reading is not."""
        _, lines = self._log.poll()
        fresh, self._log_seen = self._log_seen, True
        for raw in lines:
            text = raw.decode("utf-8", errors="replace").rstrip("\n")
            if match := _LOG_LINE.match(text):
                self._in_warning = match["level"] in ("WARNING", "ERROR")
                text = f"{match['level'].lower()}: {match['text']}"
                if self._in_warning and self.board is not None:
                    self.board.warn(match["text"])
            if self._in_warning and fresh:
                self._note(clean(text), complain)

    def _note(self, text: str, tell: Callable[[str], None] = say) -> None:
        if self.pane is not None:
            self.pane.write(text + "\n")
        else:
            tell(text)

    def _print(self, line: str) -> None:
        if self.pane is not None:
            self.pane.write(line + "\n")
        else:
            print(line, flush=True)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
