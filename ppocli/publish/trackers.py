"""Where a run's figures go beside ``metrics.jsonl``: TensorBoard files, accelerate's trackers, or a
class of the user's own.

None of them can stop a run or hold it up. All but TensorBoard have a daemon thread each, fed
through a queue that has an end; an error is reported once, and all of them together get 10 seconds
to finish. ``trackers/NAME.json`` in the run's folder keeps the run's id in the tracker and the last
step that was logged, so that a resumed run goes on in the same tracker run.
"""

import logging
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import yaml

from ppocli.config import keys, schema
from ppocli.config.secrets import hide_secrets
from ppocli.config.text import each_text, short_path
from ppocli.errors import StoppedError
from ppocli.publish.tracker_kinds import (
    AccelerateTracker,
    ClassTracker,
    EventFiles,
    Rows,
    cause_of,
    finite_figures,
    locate_tracker,
    warn,
)
from ppocli.runs.atomic import read_json, write_json_atomic
from ppocli.runs.episode import in_a_table
from ppocli.runs.run_folder import RunFolder

log = logging.getLogger("ppocli")

FINISH_SECONDS = 10.0
"""seconds that all trackers together may take to finish"""
SILENT_SECONDS = 120.0
"""seconds on one row after which a tracker counts as hanging"""
QUEUE_ROWS = 1000
"""rows and tables that may wait for a tracker before further ones are dropped"""
TABLE_ROWS = 64
"""evaluation samples in one table"""


class Tracker(Protocol):
    """Takes the figures of steps. Its methods never raise, and only ``wait`` waits."""

    def row(self, row: dict[str, Any]) -> None:
        """One step's figures; ``step`` among them."""

    def samples(self, step: int, samples: Rows) -> None:
        """The samples of a step's evaluation, before its row."""

    def finish(self, code: int) -> None:
        """No more rows will come; ``code`` is 0 for a run that finished."""

    def wait(self, seconds: float) -> None:
        """Wait at most so long until the tracker has finished."""


class OpenTracker(Protocol):
    """A run in a tracker, used by one thread."""

    run_id: str
    """under which a resumed run goes on; empty if the tracker has no such thing"""

    def log(self, figures: dict[str, Any], samples: Rows, step: int) -> None:
        """Log a step; ``samples`` is empty at most steps."""

    def close(self, code: int) -> None:
        """No more steps will come."""


class ThreadTracker:
    """A tracker in a daemon thread of its own, which may fail or hang.

    Args:
        name: of the tracker, as typed.
        folder: the run's.
        cfg: ``tracking``.
    """

    def __init__(self, name: str, folder: RunFolder, cfg: schema.TrackingConfig) -> None:
        self._name, self._folder, self._cfg = name, folder, cfg
        self._record = folder.path / "trackers" / (re.sub(r"\W+", "-", Path(name).name) + ".json")
        self._waiting: queue.Queue[tuple[str, Any]] = queue.Queue(QUEUE_ROWS)
        self._busy_since: float | None = None
        self._warned = self._too_late = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()

    def row(self, row: dict[str, Any]) -> None:
        """Queue one step's figures."""
        self._send("row", {"step": row["step"], **finite_figures(row)})

    def samples(self, step: int, samples: Rows) -> None:
        """Queue the first samples of a step's evaluation."""
        self._send("samples", (step, list(map(in_a_table, samples[:TABLE_ROWS]))))

    def finish(self, code: int) -> None:
        """Let the thread close the tracker."""
        self._send("finish", code)

    def wait(self, seconds: float) -> None:
        """Wait for the thread; what fails after that is not reported."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn("it did not finish in time; what was not sent by now is missing there")
        self._too_late = True

    def _send(self, kind: str, what: Any) -> None:
        try:
            self._waiting.put_nowait((kind, what))
        except queue.Full:
            self._warn(f"it is {QUEUE_ROWS} rows behind; those that follow are left out")
        since = self._busy_since
        if since is not None and monotonic() - since > SILENT_SECONDS:
            self._warn(f"no answer for {SILENT_SECONDS:.0f} seconds")

    def _warn(self, cause: str) -> None:
        """Report what failed, once."""
        if not self._warned and not self._too_late:
            self._warned = True
            warn(short_path(self._name), cause)

    def _serve(self) -> None:
        """Open the tracker, log what comes, and close it."""
        self._busy_since = monotonic()
        lost = "; nothing is logged there"
        try:
            record = read_json(self._record) or {}
            opened = self._open(record)
            lost = ""
            last = record.get("step", -1)
            self._keep(opened.run_id, last)
            evaluated: tuple[int, Rows] = (-1, [])
            while True:
                self._busy_since = None
                kind, what = self._waiting.get()
                self._busy_since = monotonic()
                if kind == "finish":
                    return opened.close(what)
                if kind == "samples":
                    evaluated = what
                elif (step := what.pop("step")) > last:
                    self._log(opened, what, evaluated[1] if evaluated[0] == step else [], step)
        except (Exception, SystemExit) as error:
            self._warn(cause_of(error) + lost)
        finally:
            self._busy_since = None

    def _log(self, opened: OpenTracker, figures: dict[str, Any], samples: Rows, step: int) -> None:
        try:
            opened.log(figures, samples, step)
            self._keep(opened.run_id, step)
        except (Exception, SystemExit) as error:
            self._warn(f"step {step} could not be logged: {cause_of(error)}")

    def _keep(self, run_id: str, step: int) -> None:
        self._record.parent.mkdir(exist_ok=True)
        write_json_atomic(self._record, {"id": run_id, "step": step})

    def _open(self, record: dict[str, Any]) -> OpenTracker:
        config = each_text(yaml.safe_load(self._folder.config.read_text(encoding="utf-8")),
                           hide_secrets, str)
        if keys.is_import_path(self._name):
            return ClassTracker(locate_tracker(self._name).target(self._folder.path, config))
        return AccelerateTracker(self._name, self._cfg.project, self._folder.path, config, record)


def check_trackers(cfg: schema.TrackingConfig) -> None:
    """Import the trackers that are classes of the user's own, before anything else is loaded.

    Raises:
        InputError: as :func:`locate_tracker`.
    """
    for spec in filter(keys.is_import_path, cfg.trackers):
        log.info("running code from %s", locate_tracker(spec).file)


@contextmanager
def open_trackers(cfg: schema.TrackingConfig, folder: RunFolder) -> Iterator[Sequence[Tracker]]:
    """The run's trackers; one that can't be opened is named in a warning and left out."""
    trackers: list[Tracker] = []
    for name in cfg.trackers:
        try:
            trackers.append(EventFiles(folder.events) if name == "tensorboard"
                            else ThreadTracker(name, folder, cfg))
        except Exception as error:
            warn(name, cause_of(error))
    code = 1
    try:
        yield tuple(trackers)
        code = 0
    except StoppedError:
        code = 255  # what wandb takes for a Ctrl-C
        raise
    finally:
        deadline = monotonic() + FINISH_SECONDS
        for tracker in trackers:
            tracker.finish(code)
        for tracker in trackers:
            tracker.wait(max(0.0, deadline - monotonic()))
