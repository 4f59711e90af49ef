"""``ppocli watch``: a run seen from another terminal, through what it writes into its folder."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppocli.cli.follow import Tail, find_watched, may_begin, recent_samples
from ppocli.cli.output import complain, display_mode, say
from ppocli.config.resolved import read_config
from ppocli.config.schema import planned_episodes
from ppocli.display.console import can_live, open_console, row_lines
from ppocli.display.live_view import Dashboard, Sample, resident_mib
from ppocli.display.pane import Pane
from ppocli.errors import PpocliError
from ppocli.runs.record import is_run, read_run
from ppocli.storage.run_folder import LOCK, RunFolder, finite_or_null, live_owner
from ppocli.text import clean, figure

LAST = 5
"""steps of the past that are shown first"""
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (?P<level>\w+) (?P<text>.*)$")


def watch(given: str | None, *, interval: float, from_start: bool, plain: bool,
          as_json: bool) -> None:
    """Follow a run until it ends, and say how.

    Args:
        given: the run's folder or name; None for the newest below ``runs``.
        interval: seconds between two looks.
        from_start: show every step, not only the last ones and those to come.
        plain: lines even on a terminal.
        as_json: the rows of metrics.jsonl as they are.

    Raises:
        PpocliError: there is no such run.
        SystemExit: 130, for Ctrl-C.
    """
    folder, shown = find_watched(given, say)
    follower = _Follower(folder, shown, from_start, as_json)
    console = open_console(sys.stdout)
    if display_mode() == "auto" and not (plain or as_json) and can_live(console):
        follower.pane = _open_pane(follower, console)
    try:
        while follower.look():
            time.sleep(interval)
        follower.close()
        complain(follower.ending())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        follower.close()


def _open_pane(follower: _Follower, console: Any) -> Pane:
    board = follower.board = Dashboard(follower.shown, follower.memory)
    narrow = not console.encoding.lower().startswith("utf")
    pane = Pane(console, lambda width, height: board.lines(width, height, ascii_only=narrow))
    follower.look()  # the past first, so that the first frame is whole
    pane.start()
    return pane


class _Follower:
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
