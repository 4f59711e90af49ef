"""The files a run appends to: rows of JSON and TensorBoard events, and cutting them at a step.

A run that goes on from step k first removes every row past k, so no step appears twice.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from socket import gethostname
from time import time, time_ns
from typing import Any

from ppocli.config.secrets import hide_secrets
from ppocli.config.text import error_line
from ppocli.runs import atomic

log = logging.getLogger("ppocli")
_CHUNK = 1 << 16
_FRAME = 16
"""bytes of length and checksums around a record of TensorBoard's"""


class JsonlWriter(AbstractContextManager["JsonlWriter"]):
    """Appends rows to a JSON-lines file; each ``append`` is on the disk when it returns.

    Rows are strict JSON: NaN and infinities become null. An incomplete last line, left by a kill,
    is cut off on opening. A write that fails leaves nothing behind.

    Args:
        path: the file; created where missing, with its folder.

    Raises:
        DiskError: the disk is full, read-only, or refuses (also from ``append``).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        atomic.make_dirs(path.parent)
        with atomic.disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            self._size = _end_of_last_line(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
            atomic.fsync_dir(path.parent)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows, in order, and sync once."""
        raw, written = b"".join(map(_line, rows)), 0
        try:
            while written < len(raw):
                written += os.pwrite(self._descriptor, raw[written:], self._size + written)
            os.fsync(self._descriptor)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            with atomic.disk_errors(self.path):
                raise
        self._size += written

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def finite_or_null(value: Any) -> Any:
    """``value`` with NaN and infinities, which JSON hasn't, turned to ``None``, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return dict(zip(value, map(finite_or_null, value.values()), strict=True))
    return [finite_or_null(item) for item in value] if isinstance(value, (list, tuple)) else value


def _line(row: dict[str, Any]) -> bytes:
    text = json.dumps(finite_or_null(row), ensure_ascii=False, allow_nan=False)
    # a lone surrogate in someone's text becomes JSON's own escape
    return text.encode(errors="backslashreplace") + b"\n"


def _end_of_last_line(descriptor: int) -> int:
    """Bytes up to and including the last newline."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _CHUNK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; missing file, torn and damaged lines give nothing."""
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            if (row := read_row(line.decode("utf-8", errors="replace"))) is not None:
                yield row


def read_row(line: bytes | str) -> dict[str, Any] | None:
    """The object in a line of JSON; None for a line that is damaged or holds something else."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl by their steps; the last one counts where a step has several."""
    rows = {row["step"]: row for row in map(sound_row, read_jsonl(path)) if row}
    return [rows[step] for step in sorted(rows)]


def sound_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl with finite numbers and None alone: other values are damage. A row
    without a step becomes empty."""
    sound = {name: value for name, value in row.items() if value is None or is_number(value)}
    return sound if isinstance(sound.get("step"), int) else {}


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number, and no longer than 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 63  # a longer one is damage, and no float
    return isinstance(value, float) and math.isfinite(value)


def truncate_jsonl(path: Path, last_step: int,
                   also: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Drop rows whose ``step`` is past ``last_step``, and a torn or damaged last line.

    ``also`` names further rows to drop. All other rows, also those without a step, stay byte for
    byte. The file, if it is there, is replaced atomically, or not touched when nothing is to be
    dropped.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        def goes(line: bytes) -> bool:
            row = read_row(line)
            if row is None or not line.endswith(b"\n"):
                return file.tell() == size  # torn or damaged, and the last
            step = row.get("step")
            return ((isinstance(step, (int, float)) and step > last_step)
                    or (also is not None and also(row)))

        if any(map(goes, file)):
            file.seek(0)
            with atomic.open_atomic(path) as kept:
                kept.writelines(line for line in file if not goes(line))


def truncate_events(events_dir: Path, last_step: int) -> None:
    """Drop TensorBoard events past ``last_step`` and a torn tail from every event file.

    Records that stay are copied byte for byte; a file's version record always stays. Each file is
    replaced atomically, or not touched when nothing is to be dropped. No writer may be open.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    for path in sorted(events_dir.rglob("*tfevents*")):
        if path.is_file():
            _truncate_event_file(path, last_step)


def _truncate_event_file(path: Path, last_step: int) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    def stays(record: bytes) -> bool:
        event = Event.FromString(record)
        return event.step <= last_step or event.WhichOneof("what") == "file_version"

    records = list(RawEventFileLoader(str(path)).Load())  # up to what is damaged
    torn = sum(len(record) + _FRAME for record in records) < path.stat().st_size
    kept = list(filter(stays, records))
    if torn or len(kept) < len(records):
        with atomic.open_atomic(path) as file:
            for record in kept:
                RecordWriter(file).write(record)


# Trackers ----------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def finite_figures(row: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among a row's values, without ``step``."""
    return {name: value for name, value in row.items() if name != "step"
            and isinstance(value, (int, float)) and math.isfinite(value)}


def cause_of(error: BaseException) -> str:
    """The first line of an exception's message, without secrets and full stop."""
    return hide_secrets(error_line(error).rstrip("."))


def warn_of_tracker(name: str, cause: str) -> None:
    """Report that a tracker failed."""
    log.warning("%s: %s. The run does not depend on it; metrics.jsonl has everything.", name,
                hide_secrets(cause))


class EventFiles:
    """TensorBoard's event files in the run's folder. Written here and not by its SummaryWriter,
    whose thread would print a traceback where the folder goes away."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time():010.0f}.{gethostname()}.{os.getpid()}.{time_ns()}"
        self._records: Any = RecordWriter((folder / name).open("xb"))
        self._warned = False
        self._write(file_version="brain.Event:2")

    def _write(self, **event: Any) -> None:
        try:
            self._records.write(self._event(wall_time=time(), **event).SerializeToString())
            self._records.flush()
        except Exception as error:
            self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            warn_of_tracker("tensorboard", cause_of(error))
        self._warned = True

    def row(self, row: dict[str, Any]) -> None:
        """One step's figures; ``step`` among them."""
        summary = self._summary()
        for name, value in finite_figures(row).items():
            summary.value.add(tag=name, simple_value=value)
        self._write(step=row["step"], summary=summary)

    def samples(self, step: int, samples: Rows) -> None:
        """They are in samples.jsonl; TensorBoard has no tables."""

    def finish(self, code: int) -> None:
        """Close the file."""
        with suppress(OSError):
            self._records.close()

    def wait(self, seconds: float) -> None:
        """It is closed."""
