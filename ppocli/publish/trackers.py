"""Where a run's figures go beside ``metrics.jsonl``: TensorBoard files, accelerate's trackers, or a
class of the user's own.

None of them can stop a run or hold it up. All but TensorBoard have a daemon thread each, fed
through a queue that has an end; an error is reported once, and all of them together get 10 seconds
to finish. ``trackers/NAME.json`` in the run's folder keeps the run's id in the tracker and the last
step that was logged, so that a resumed run goes on in the same tracker run.
"""

import inspect
import logging
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import yaml

from ppocli.config import config_yaml, keys, schema
from ppocli.config.secrets import hide_secrets
from ppocli.config.text import each_text, short_path
from ppocli.config.user_code import CodeSetting, Kind, Located, check_class
from ppocli.errors import InputError, StoppedError
from ppocli.runs.atomic import read_json, write_json_atomic
from ppocli.runs.episode import in_a_table
from ppocli.runs.run_folder import RunFolder
from ppocli.runs.run_logs import EventFiles, Rows, cause_of, finite_figures, warn_of_tracker

log = logging.getLogger("ppocli")

FINISH_SECONDS = 10.0
"""seconds that all trackers together may take to finish"""
QUEUE_ROWS = 1000
"""rows and tables that may wait for a tracker before further ones are dropped"""
TABLE_ROWS = 64
"""evaluation samples in one table"""
EVAL_SAMPLES = "eval/samples"
_INIT_SECONDS = "30"  # wandb's own 90 are long to wait for "no network"
_RUN_IDS: dict[str, Callable[[Any], str]] = {
    "trackio": attrgetter("id"), "clearml": attrgetter("id"),
    "mlflow": attrgetter("info.run_id"), "comet_ml": methodcaller("get_key")}
"""how trackers name a run; wandb and swanlab take the id that we choose"""


class ThreadTracker:
    """A tracker in a daemon thread of its own, which may fail or hang. Its methods never raise, and
    only ``wait`` waits.

    Args:
        name: of the tracker, as typed.
        folder: the run's.
        cfg: ``tracking``.
    """

    def __init__(self, name: str, folder: RunFolder, cfg: schema.TrackingConfig) -> None:
        self._name, self._folder, self._cfg = name, folder, cfg
        self._record = folder.path / "trackers" / (re.sub(r"\W+", "-", Path(name).name) + ".json")
        self._waiting: queue.Queue[tuple[str, Any]] = queue.Queue(QUEUE_ROWS)
        self._warned = self._too_late = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()

    def row(self, row: dict[str, Any]) -> None:
        """Queue one step's figures."""
        self._send("row", {"step": row["step"], **finite_figures(row)})

    def samples(self, step: int, samples: Rows) -> None:
        """Queue the first samples of a step's evaluation, before its row."""
        self._send("samples", (step, list(map(in_a_table, samples[:TABLE_ROWS]))))

    def finish(self, code: int) -> None:
        """Let the thread close the tracker; ``code`` is 0 for a run that finished."""
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

    def _warn(self, cause: str) -> None:
        """Report what failed, once."""
        if not self._warned and not self._too_late:
            self._warned = True
            warn_of_tracker(short_path(self._name), cause)

    def _serve(self) -> None:
        """Open the tracker, log what comes, and close it."""
        lost = "; nothing is logged there"
        try:
            record = read_json(self._record) or {}
            opened = self._open(record)
            lost = ""
            last = record.get("step", -1)
            self._keep(opened.run_id, last)
            evaluated: tuple[int, Rows] = (-1, [])
            while True:
                kind, what = self._waiting.get()
                if kind == "finish":
                    return opened.close(what)
                if kind == "samples":
                    evaluated = what
                elif (step := what.pop("step")) > last:
                    self._log(opened, what, evaluated[1] if evaluated[0] == step else [], step)
        except (Exception, SystemExit) as error:
            self._warn(cause_of(error) + lost)

    def _log(self, opened: "AccelerateTracker | ClassTracker", figures: dict[str, Any],
             samples: Rows, step: int) -> None:
        try:
            opened.log(figures, samples, step)
            self._keep(opened.run_id, step)
        except (Exception, SystemExit) as error:
            self._warn(f"step {step} could not be logged: {cause_of(error)}")

    def _keep(self, run_id: str, step: int) -> None:
        self._record.parent.mkdir(exist_ok=True)
        write_json_atomic(self._record, {"id": run_id, "step": step})

    def _open(self, record: dict[str, Any]) -> "AccelerateTracker | ClassTracker":
        config = each_text(yaml.safe_load(self._folder.config.read_text(encoding="utf-8")),
                           hide_secrets, str)
        if keys.is_import_path(self._name):
            return ClassTracker(_locate_tracker(self._name).target(self._folder.path, config))
        return AccelerateTracker(self._name, self._cfg.project, self._folder.path, config, record)


Tracker = EventFiles | ThreadTracker


class AccelerateTracker:
    """A run in one of accelerate's trackers (``accelerate.tracking``).

    Args:
        name: of the tracker, as accelerate has it.
        project: None: as the library's environment variables say, or ``ppocli``.
        run_dir: its name becomes the name of the tracker's run.
        config: settings of the run, without secrets.
        record: ``trackers/NAME.json``.
    """

    def __init__(self, name: str, project: str | None, run_dir: Path, config: dict[str, Any],
                 record: dict[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        environ, own_id = os.environ, record.get("id")
        self._name, project = name, project or (
            environ.get("WANDB_PROJECT") if name == "wandb" else None) or "ppocli"
        self.run_id = own_id or (
            environ.get("WANDB_RUN_ID") if name == "wandb" else None) or secrets.token_hex(4)
        how: dict[str, Any] = {
            "wandb": {"id": self.run_id, "resume": "allow",
                      "name": None if environ.get("WANDB_NAME") else run_dir.name,
                      "dir": None if environ.get("WANDB_DIR") else str(run_dir)},
            "trackio": {"name": run_dir.name, "embed": False,
                        "resume": "allow" if record else "never"},
            "mlflow": {"run_name": run_dir.name, "run_id": own_id},
            "swanlab": {"experiment_name": run_dir.name, "id": self.run_id, "resume": "allow",
                        "logdir": str(run_dir / "swanlab")},
            "comet_ml": {"experiment_key": own_id},
            "clearml": {"task_name": run_dir.name, "continue_last_task": own_id or False}}[name]
        make: Any = LOGGER_TYPE_TO_CLASS[name]
        self._tracker = make(project, **how)
        if name == "wandb":
            self._start_wandb()
        else:
            self._tracker.start()
        if name == "trackio" and record and self._tracker.tracker.id != own_id:
            # runs go by name, and another run has taken this one's
            self._tracker.init_kwargs["resume"] = "never"
            self._tracker.start()
        self._tracker.store_init_configuration(
            dict(config_yaml.leaves("", config)) if name in ("mlflow", "comet_ml") else config)
        if name in _RUN_IDS:
            self.run_id = _RUN_IDS[name](self._tracker.tracker)

    def _start_wandb(self) -> None:
        """Open the run; if wandb can't be reached, it logs into files to be uploaded later."""
        import wandb

        tracker, sync = self._tracker, "to upload it later: wandb sync %s"
        os.environ.setdefault("WANDB_INIT_TIMEOUT", _INIT_SECONDS)
        tracker.init_kwargs["settings"] = wandb.Settings(console="off", silent=True)
        try:
            tracker.start()
        except Exception as error:
            if os.environ.get("WANDB_MODE", "online") != "online":
                raise
            tracker.init_kwargs["mode"] = "offline"
            tracker.start()
            warn_of_tracker("wandb", f"{cause_of(error)}; the run is logged to files; "
                           + sync % tracker.run.settings.sync_dir)
        else:
            log.info("wandb        %s", sync % tracker.run.settings.sync_dir
                     if tracker.run.offline else tracker.run.url)

    def log(self, figures: dict[str, Any], samples: Rows, step: int) -> None:
        """Log a step, and its samples where the tracker has tables."""
        if samples and self._name == "wandb":
            self._tracker.log_table(EVAL_SAMPLES, columns=list(samples[0]), data=[
                [row[name] for name in samples[0]] for row in samples], step=step)
        elif samples and self._name == "trackio":
            import trackio

            figures[EVAL_SAMPLES] = trackio.Table(data=samples)
        self._tracker.log(figures, step=step)

    def close(self, code: int) -> None:
        """Finish the run; wandb also learns how it ended."""
        if self._name == "wandb":
            self._tracker.run.finish(exit_code=code)
        else:
            self._tracker.finish()


class UserTracker(Protocol):
    """A tracker of the user's own, of which ``row`` alone must be there."""

    def row(self, figures: dict[str, Any]) -> None:
        """One step's figures, ``step`` among them."""

    def samples(self, step: int, samples: Rows) -> None:
        """The samples of a step's evaluation."""

    def close(self) -> None:
        """No more rows will come."""


class ClassTracker:
    """A run in an object of the user's own class."""

    run_id = ""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def log(self, figures: dict[str, Any], samples: Rows, step: int) -> None:
        """Hand a step on."""
        if samples and hasattr(self._tracker, "samples"):
            self._tracker.samples(step, samples)
        self._tracker.row({"step": step, **figures})

    def close(self, code: int) -> None:
        """Close the object if it can be closed."""
        getattr(self._tracker, "close", lambda: None)()


def _locate_tracker(spec: str) -> Located:
    """The class of the user's own that an entry of ``tracking.trackers`` names.

    Raises:
        InputError: the path leads to nothing, or to something that is no tracker.
    """
    setting = CodeSetting(spec, "tracking.trackers", Kind("class", InputError))
    located = check_class(setting, UserTracker, {"row"})
    try:
        inspect.signature(located.target).bind(Path(), {})
    except TypeError as error:
        raise InputError(f"{located.label} can't be made from a folder and a configuration: "
                         f"{error}.", where="tracking.trackers", fix="a tracker is a class: "
                         "__init__(self, run_dir, config), row(self, figures)") from None
    return located


def check_trackers(cfg: schema.TrackingConfig) -> None:
    """Import the trackers that are classes of the user's own, before anything else is loaded.

    Raises:
        InputError: one of them is missing, or no tracker.
    """
    for spec in filter(keys.is_import_path, cfg.trackers):
        log.info("running code from %s", _locate_tracker(spec).file)


@contextmanager
def open_trackers(cfg: schema.TrackingConfig, folder: RunFolder) -> Iterator[Sequence[Tracker]]:
    """The run's trackers; one that can't be opened is named in a warning and left out."""
    trackers: list[Tracker] = []
    for name in cfg.trackers:
        try:
            trackers.append(EventFiles(folder.events) if name == "tensorboard"
                            else ThreadTracker(name, folder, cfg))
        except Exception as error:
            warn_of_tracker(name, cause_of(error))
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


