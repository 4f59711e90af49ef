"""Where a run's figures go beside ``metrics.jsonl``: TensorBoard files, wandb, trackio, or a class
of the user's own.

None of them can stop a run or hold it up: what fails is said once and the run goes on. All but
TensorBoard run in one process of their own (:mod:`ppocli.publish.tracker_child`), which is handed
rows through a queue that has an end, and is given 10 seconds when the run is over.
"""

import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from socket import gethostname
from time import monotonic, sleep, time, time_ns
from typing import Any

import yaml

from ppocli.config import keys, schema, secrets
from ppocli.config.text import each_text, short_path
from ppocli.errors import StoppedError
from ppocli.publish.tracker_child import Opening, cause_of, locate_tracker
from ppocli.runs.episode import in_a_table
from ppocli.runs.run_folder import RunFolder

log = logging.getLogger("ppocli")

FINISH_SECONDS = 10.0
"""seconds that all trackers together may take to finish"""
SILENT_SECONDS = 120.0
"""seconds without an answer after which a tracker counts as hanging"""
QUEUE_ROWS = 1000
"""rows and tables that may wait for a tracker before further ones are dropped"""
TABLE_ROWS = 64
"""evaluation samples in one table"""


def finite_figures(row: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among a row's values, without ``step``."""
    return {name: value for name, value in row.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)}


class EventFiles:
    """TensorBoard's event files in the run's folder. Written here and not by its SummaryWriter,
    whose thread would print a traceback where the folder goes away."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time():010.0f}.{gethostname()}.{os.getpid()}.{time_ns()}"
        self._records: Any = RecordWriter((folder / name).open("xb"))
        self._warned = False
        self._write(file_version="brain.Event:2")

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time(), **event).SerializeToString())
        self._records.flush()

    @contextmanager
    def _failing_quietly(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._warned:
                _warn("tensorboard", cause_of(error))
            self._warned = True

    def row(self, row: dict[str, Any]) -> None:
        """One step's figures; ``step`` among them."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        with self._failing_quietly():
            self._write(step=row["step"], summary=Summary(value=[
                Summary.Value(tag=name, simple_value=value)
                for name, value in finite_figures(row).items()]))

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """They are in samples.jsonl; TensorBoard has no tables."""

    def finish(self, code: int) -> None:
        """No more rows will come."""
        with self._failing_quietly():
            self._records.close()


class TrackerProcess:
    """The trackers that run in a process of their own, fed through a queue by a thread that may
    hang."""

    def __init__(self, opening: Opening) -> None:
        self.log_file = Path(opening.run_dir) / "trackers/output.log"
        self.log_file.parent.mkdir(exist_ok=True)
        self._connection, theirs = Pipe()
        with theirs, self.log_file.open("ab") as output:
            # away from our terminal: Ctrl-C is for the run, which will tell it to finish
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ppocli.publish.tracker_child",
                 str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True)
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting.put(asdict(opening))
        threading.Thread(target=self._feed, daemon=True, name="trackers").start()
        self._behind = dict.fromkeys(opening.trackers, 0)
        self._answered = dict.fromkeys(opening.trackers, monotonic())
        self._unfinished = set(opening.trackers)
        self._warned: set[str] = set()

    def _feed(self) -> None:
        with suppress(OSError):  # the process died, which the run is told
            for message in iter(self._waiting.get, None):
                self._connection.send(message)

    def row(self, row: dict[str, Any]) -> None:
        """One step's figures; ``step`` among them."""
        self._send("row", {"step": row["step"], **finite_figures(row)})

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """The samples of a step's evaluation, before its row."""
        self._send("samples", (step, list(map(in_a_table, samples[:TABLE_ROWS]))))

    def _send(self, kind: str, what: Any) -> None:
        self._listen()
        for name in sorted(self._unfinished):
            if self._behind[name] == 0:
                self._answered[name] = monotonic()  # nothing was pending
            if self._behind[name] >= QUEUE_ROWS:
                self._warn([name], f"it is {QUEUE_ROWS} rows behind; those that follow are left "
                           "out")
                continue
            self._behind[name] += 1
            self._waiting.put((name, kind, what))
            if monotonic() - self._answered[name] > SILENT_SECONDS:
                self._warn([name], f"no answer for {SILENT_SECONDS:.0f} seconds")

    def _listen(self) -> None:
        """Process replies, in the run's own thread, which owns the display."""
        ended = self._process.poll() is not None  # checked before its last replies are read
        with suppress(EOFError, OSError):
            while self._connection.poll():
                name, kind, what = self._connection.recv()
                self._answered[name] = monotonic()
                if kind == "done":
                    self._behind[name] -= 1
                elif kind == "finished":
                    self._unfinished.discard(name)
                elif kind == "news":
                    log.info("%-12s %s", short_path(name), what)
                else:
                    self._warn([name], what)
        if ended:
            self._warn(self._unfinished, f"the process of the trackers ended; see {self.log_file}")
            self._unfinished = set()

    def _warn(self, names: Iterable[str], cause: str) -> None:
        """Report what failed, once per tracker."""
        if news := sorted(set(names) - self._warned):
            _warn(", ".join(map(short_path, news)), cause)
        self._warned.update(news)

    def finish(self, code: int) -> None:
        """Let the trackers finish and wait for the end of their process; kill it if it takes too
        long. ``code`` is 0 for a finished run."""
        for name in self._behind:
            self._waiting.put((name, "finish", code))
        deadline = monotonic() + FINISH_SECONDS
        while self._process.poll() is None and monotonic() < deadline:
            self._listen()
            sleep(0.01)
        self._listen()
        self._warn(self._unfinished, f"it did not finish within {FINISH_SECONDS:.0f} seconds and "
                   f"was ended; see {self.log_file}")
        if self._process.poll() != 0:
            with suppress(OSError):  # its services too
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._waiting.put(None)
        self._connection.close()


Tracker = EventFiles | TrackerProcess
"""takes figures of steps; its methods never raise, and only ``finish`` waits"""


def _warn(name: str, cause: str) -> None:
    log.warning("%s: %s. The run does not depend on it; metrics.jsonl has everything.", name,
                secrets.hide_secrets(cause))


def check_trackers(cfg: schema.TrackingConfig) -> None:
    """Import the trackers that are classes of the user's own, before anything else is loaded.

    Raises:
        InputError: as :func:`ppocli.publish.tracker_child.locate_tracker`.
    """
    for spec in filter(keys.is_import_path, cfg.trackers):
        log.info("running code from %s", locate_tracker(spec).file)


@contextmanager
def open_trackers(cfg: schema.TrackingConfig, folder: RunFolder) -> Iterator[Sequence[Tracker]]:
    """The run's trackers; one that can't be opened is named in a warning and left out."""
    served = [name for name in cfg.trackers if name != "tensorboard"]
    trackers: list[Tracker] = []
    try:
        if served:
            config = each_text(yaml.safe_load(folder.config.read_text(encoding="utf-8")),
                               secrets.hide_secrets, str)
            trackers.append(TrackerProcess(Opening(
                served, folder.path.name, cfg.project, str(folder.path), config, os.getpid(),
                [path for path in sys.path if path])))
    except Exception as error:
        _warn(", ".join(served), cause_of(error))
    try:
        if len(served) < len(cfg.trackers):
            trackers.append(EventFiles(folder.events))
    except Exception as error:
        _warn("tensorboard", cause_of(error))
    code = 1
    try:
        yield tuple(trackers)
        code = 0
    except StoppedError:
        code = 255  # what wandb takes for a Ctrl-C
        raise
    finally:
        for tracker in reversed(trackers):  # the process is waited for last
            tracker.finish(code)
