"""Following a run from another terminal, by the files in its folder."""

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from ppocli.cli.output import complain, print_json, say, show_text
from ppocli.config import config_yaml, resume_policy, schema, tasks
from ppocli.config.text import counted, did_you_mean, figure, pasted
from ppocli.errors import CheckpointError, ConfigError, InputError, PpocliError
from ppocli.publish import live_view
from ppocli.runs import environment, run_logs
from ppocli.runs.episode import transcript_turns
from ppocli.runs.record import is_run, read_run, sample_text, whole
from ppocli.runs.run_folder import LOCK, RunFolder, live_owner, other_host
from ppocli.runs.target import RUNS, known_names, list_runs, run_named, written
from ppocli.training import console

LAST = 5
"""steps of the past that are shown first"""
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (?P<level>\w+) (?P<text>.*)$")


class Follower:
    """Prints what is new in a run's folder, and updates a live view's board. ``folder`` is as
    messages name it."""

    def __init__(self, folder: Path, from_start: bool, as_json: bool) -> None:
        self._run, self._shown, self._as_json = RunFolder(folder.resolve()), str(folder), as_json
        self.board = live_view.Dashboard(self._shown)
        self._past: int | None = None if from_start else LAST
        self._rows: list[dict[str, Any]] = []
        self._waiting = self._in_warning = False
        self._log_read = self._run.log.stat().st_size if self._run.log.exists() else 0
        """bytes of the log whose warnings are old, or shown"""
        self._written: dict[Path, tuple[int, int]] = {}
        self._config: schema.TrainConfig | None = None

    @property
    def _total(self) -> int:
        if self._config is None:
            return 0
        last = self._rows[-1] if self._rows else {}
        return tasks.total_steps(self._config, whole(last, "step"), whole(last, "episode"),
                                 environment.examples_of(self._run.path))

    def look(self) -> bool:
        """Show what is new; return whether there may be more."""
        # checked first: a process that is gone by now writes nothing more
        path = self._run.path
        alive = live_owner(path) is not None or other_host(path) is not None or may_begin(path)
        if self._has_changed(self._run.config):
            with suppress(PpocliError):
                self._config = config_yaml.read_config(self._run.config)
        before, rows = self._rows, self._rows
        if self._has_changed(self._run.metrics):
            self._rows = rows = run_logs.read_metrics(self._run.metrics)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1],
                                  zip(before, rows, strict=False))))
        if again := same < len(before):
            say(f"the run was resumed at step {rows[same - 1]['step'] if same else 0}")
        self._feed(rows[same:], again=again)
        self._show_warnings()
        self._show(rows[same:])
        if alive and not self._rows and not self._waiting:
            self._waiting = True
            say(f"waiting for the first step of {self._shown}")
        return alive

    def ending(self) -> str:
        """How the run ended, in words, and what to do next."""
        path = self._shown
        if not is_run(self._run.path):
            removed = "" if self._run.path.is_dir() else " and was removed"
            return f"{path} ended before its first step{removed}"
        record = read_run(self._run.path)
        resume = f"resume with: {resume_policy.how_to_resume(record.config, path)}"
        summary = record.summary or {}
        at = f"at step {record.step} of {record.total_steps}"
        saved = record.folder.checkpoints.is_dir()
        if record.status == "running":  # resumed just now
            return f"{path} is running again; watch it with: ppocli watch {pasted(path)}"
        if record.status == "finished":
            label, name = tasks.kind_of(record.config).evaluations[0]
            before, after = (figures.get(name) if isinstance(figures, dict) else None
                             for figures in map(summary.get, ("eval_before", "eval_after")))
            start = "" if before is None else f"{figure(before, 3)} -> "
            change = "" if after is None else f", {label} {start}{figure(after, 3)}"
            steps = counted(record.step, "step")
            return f"{path} finished: {steps}{change}; model: {path}/model"
        if record.status == "stopped":
            return f"{path} was stopped {at}; {resume}"
        if record.status == "failed":
            error = re.sub(r"\n(?! )", "\n  ", str(summary.get("error", "unknown error")))
            go_on = f"\n  {resume}" if saved else ""
            return f"{path} failed {at}: {error}\n  log:   {path}/ppocli.log{go_on}"
        return f"{path} was interrupted {at}: its process is gone" + (
            f"; {resume}" if saved else ", and no checkpoint is saved")

    def _has_changed(self, path: Path) -> bool:
        """Whether a file has been written to since the last call."""
        try:
            now = path.stat()
        except OSError:
            return False
        before, self._written[path] = self._written.get(path), (now.st_mtime_ns, now.st_size)
        return self._written[path] != before

    def _feed(self, rows: Sequence[dict[str, Any]], *, again: bool) -> None:
        board = self.board
        if again or board.total != self._total:
            board.begin(self._total, self._rows)
        else:
            for row in rows:
                board.add_row(row)
        now = board.clock() - time.time()
        with suppress(OSError):  # times of the run, not of this command
            board.begun = now + (self._run.path / LOCK).stat().st_mtime
            board.step_begun = max(board.begun, now + self._run.metrics.stat().st_mtime)
        if self._has_changed(self._run.samples) and (samples := recent_samples(self._run.samples)):
            board.show([(str(row.get("prompt", "")), transcript_turns(row) or sample_text(row),
                         row.get("score")) for row in samples], samples[0]["step"])

    def _show(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._past is not None:
            rows, self._past = rows[-self._past:], None
        total = self._total
        for row in rows:
            if self._as_json:
                print_json(row, indent=None)
                continue
            for line in console.row_lines(row, total):
                show_text(line)

    def _show_warnings(self) -> None:
        """Print new warnings of the log."""
        with suppress(OSError), self._run.log.open("rb") as file:
            file.seek(self._log_read)
            lines = _whole_lines(file.read())
            self._log_read += sum(map(len, lines))
            for raw in lines:
                text = raw.decode("utf-8", errors="replace").rstrip("\n")
                if match := _LOG_LINE.match(text):
                    self._in_warning = match["level"] in ("WARNING", "ERROR")
                    text = f"{match['level'].lower()}: {match['text']}"
                if self._in_warning:
                    complain(text)


START_SECONDS = 120.0
"""seconds that a run may load before it takes its folder's lock"""
_TAIL_BYTES = 1 << 18


def _whole_lines(raw: bytes) -> list[bytes]:
    return [line for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]


def _sample_row(line: bytes) -> dict[str, Any] | None:
    """A row of samples.jsonl with its step; None for a line that is damaged."""
    row = run_logs.read_row(line)
    return row if row is not None and isinstance(row.get("step"), int) else None


def recent_samples(path: Path) -> list[dict[str, Any]]:
    """The first samples of the newest step and kind at the end of samples.jsonl."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = _whole_lines(file.read())  # a partial line before them is no row
    except OSError:  # gone by now
        return []
    rows = groupby(filter(None, map(_sample_row, reversed(lines))),
                   key=lambda row: (row["step"], row.get("kind")))
    newest = [*next(rows, (None, ()))[1]]
    return newest[::-1]


def find_watched(name: str | None) -> Path:
    """The folder of the run to watch, which may have only just begun, as messages name it.

    A folder of runs, such as a sweep's, stands for its running run, or else its newest.

    Raises:
        ConfigError: nothing is given and there is no run.
        InputError: there is no such folder.
        CheckpointError: the folder is no run's.
    """
    if name is None:
        if (newest := _newest(RUNS)) is None:
            raise ConfigError(f"There is no run in {RUNS} yet.", where=str(RUNS.absolute()),
                              fix="start one: ppocli train +recipe=quickstart")
        say(f"watching {newest}, the newest run")
        return newest
    path = run_named(name, is_match=os.path.isdir)
    if not os.path.isdir(path):
        raise InputError(f"There is no run {name} (looked in {Path.cwd()}).", where="RUN",
                         fix="name a run's folder: ppocli runs list"
                         + did_you_mean(name, known_names(is_match=_has_begun)), code="no-such-run")
    if not _has_begun(path):
        if (inside := _newest(path)) is None:
            raise CheckpointError(f"{name} is not a run folder (no config.yaml).", where=str(path),
                                  fix="name a folder made by ppocli train: ppocli runs list")
        say(f"watching {inside}, the newest run in it")
        path = inside
    return path


def _has_begun(folder: Path) -> bool:
    return os.path.isfile(RunFolder(folder).config)


def may_begin(folder: Path) -> bool:
    """Whether a process may be loading for this run without having taken the folder's lock yet."""
    for sign in (folder / config_yaml.NEXT_CONFIG_FILE,
                 *([] if is_run(folder) else [RunFolder(folder).config])):
        with suppress(OSError):
            if time.time() - sign.stat().st_mtime < START_SECONDS:
                return True
    return False


def _newest(root: Path) -> Path | None:
    folders = list_runs(root, _has_begun)
    running = [folder for folder in folders if live_owner(folder) is not None or may_begin(folder)]
    return max(running or folders, key=written, default=None)
