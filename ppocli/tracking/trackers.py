"""Where a run's figures go beside ``metrics.jsonl``: TensorBoard files, wandb, trackio.

None of them can stop a run or hold it up: what fails is said once and the run goes on. wandb and
trackio run in processes of their own (:mod:`ppocli.tracking.tracker_child`), which are handed rows
through a queue and, at the end, given at most 10 seconds together.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import yaml

from ppocli.config.schema import TrackingConfig
from ppocli.config.secrets import hide_secrets
from ppocli.errors import StoppedError
from ppocli.storage.run_folder import RunFolder
from ppocli.tracking.tracker_child import Opening, cause_of

log = logging.getLogger("ppocli")

FINISH_SECONDS = 10.0
"""how long all trackers together may take to finish"""
SILENT_SECONDS = 120.0
"""after how long without an answer a tracker is said to hang"""
QUEUE_ROWS = 1000
TABLE_ROWS = 64
"""evaluation samples in one table"""


class Tracker(Protocol):
    """Takes figures of steps. Nothing it does raises or waits."""

    def row(self, row: dict[str, Any]) -> None:
        """One step's figures; ``step`` among them."""

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """The samples of a step's evaluation, before its row."""

    def ask_to_finish(self, code: int) -> None:
        """No more rows will come; ``code`` is 0 for a finished run."""

    def wait(self, deadline: float) -> None:
        """Wait for the end until this monotonic time, then make it."""


def finite_figures(row: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among a row's values, without ``step``."""
    return {name: value for name, value in row.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)}


class EventFiles:
    """TensorBoard's event files in the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events: Any = SummaryWriter(str(folder))
        self._warned = False

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self._warned:
                _warn("tensorboard", cause_of(error))
            self._warned = True

    def row(self, row: dict[str, Any]) -> None:
        def write() -> None:
            for name, value in finite_figures(row).items():
                self._events.add_scalar(name, value, row["step"])
            self._events.flush()

        self._try(write)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """They are in samples.jsonl; TensorBoard has no tables."""

    def ask_to_finish(self, code: int) -> None:
        """Files are closed when they are waited for."""

    def wait(self, deadline: float) -> None:
        self._try(self._events.close)


class TrackerProcess:
    """A tracker in a process of its own, fed through a queue by a thread that may hang."""

    def __init__(self, opening: Opening) -> None:
        self.name = opening.tracker
        self.log_file = Path(opening.run_dir) / "trackers" / f"{opening.tracker}.log"
        self.log_file.parent.mkdir(exist_ok=True)
        with self.log_file.open("ab") as output:
            # away from our terminal: Ctrl-C is for the run, which will tell it to finish
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ppocli.tracking.tracker_child"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=output, start_new_session=True)
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._sent = self._done = 0
        self._answered = monotonic()
        self._warned = self._finished = False
        self._waiting.put(asdict(opening))
        threads = [threading.Thread(target=work, daemon=True, name=f"{self.name}-{work.__name__}")
                   for work in (self._feed, self._listen)]
        for thread in threads:
            thread.start()
        self._listener = threads[1]

    def _feed(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has died, which the listener hears
            while True:
                message = self._waiting.get()
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError, AttributeError):
                for kind, what in json.loads(line).items():
                    self._answered = monotonic()
                    if kind == "done":
                        self._done = what
                    elif kind == "finished":
                        self._finished = True
                    else:
                        self._heard.put((kind, str(what)))
        if not self._finished:
            self._heard.put(("warning", f"its process ended; see {self.log_file}"))

    def _tell(self) -> None:
        """Say what was heard, in the run's own thread, which owns the display."""
        while not self._heard.empty():
            kind, text = self._heard.get()
            if kind == "news":
                log.info("%-12s %s", self.name, text)
            else:
                self._warn(text)
        behind = self._sent - self._done
        if behind and self._alive() and monotonic() - self._answered > SILENT_SECONDS:
            self._warn(f"no answer for {SILENT_SECONDS:.0f} seconds")

    def _warn(self, cause: str) -> None:
        if not self._warned:
            _warn(self.name, cause)
        self._warned = True

    def _alive(self) -> bool:
        return self._listener.is_alive()

    def _send(self, message: dict[str, Any]) -> None:
        if self._sent == self._done:
            self._answered = monotonic()  # it had nothing to answer to
        if self._sent - self._done >= QUEUE_ROWS:
            self._warn(f"it is {QUEUE_ROWS} rows behind; those that follow are left out")
        elif self._alive():
            self._sent += 1
            self._waiting.put(message)
        self._tell()

    def row(self, row: dict[str, Any]) -> None:
        self._send({"row": {"step": row["step"], **finite_figures(row)}})

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._send({"table": samples[:TABLE_ROWS], "step": step})

    def ask_to_finish(self, code: int) -> None:
        self._waiting.put({"finish": code})

    def wait(self, deadline: float) -> None:
        try:
            self._process.wait(max(deadline - monotonic(), 0))
        except subprocess.TimeoutExpired:
            if not self._finished:
                self._heard.put(("warning", f"it did not finish within {FINISH_SECONDS:.0f} "
                                 f"seconds and was ended; see {self.log_file}"))
            with suppress(OSError):  # its services too
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # a service that it left behind may keep the pipe open
        self._listener.join(0.5)
        self._tell()


def _warn(name: str, cause: str) -> None:
    log.warning("%s: %s. The run does not depend on it; metrics.jsonl has everything.", name,
                hide_secrets(cause))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    return hide_secrets(value) if isinstance(value, str) else value


def _open(name: str, cfg: TrackingConfig, folder: RunFolder) -> Tracker:
    if name == "tensorboard":
        return EventFiles(folder.events)
    config = _without_secrets(yaml.safe_load(folder.config.read_text(encoding="utf-8")))
    return TrackerProcess(Opening(name, folder.path.name, cfg.project, str(folder.path), config,
                                  os.getpid()))


@contextmanager
def open_trackers(cfg: TrackingConfig, folder: RunFolder) -> Iterator[Sequence[Tracker]]:
    """The run's trackers; one that can't be opened is named in a warning and left out."""
    trackers: list[Tracker] = []
    for name in cfg.trackers:
        try:
            trackers.append(_open(name, cfg, folder))
        except Exception as error:
            _warn(name, cause_of(error))
    code = 1
    try:
        yield tuple(trackers)
        code = 0
    except StoppedError:
        code = 255  # what wandb takes for a Ctrl-C
        raise
    finally:
        for tracker in trackers:
            tracker.ask_to_finish(code)
        deadline = monotonic() + FINISH_SECONDS
        for tracker in trackers:
            tracker.wait(deadline)
