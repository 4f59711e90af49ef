"""The kinds of trackers: TensorBoard's files, accelerate's trackers, classes of the user's own."""

import inspect
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from pathlib import Path
from socket import gethostname
from time import time, time_ns
from typing import Any, Protocol

from ppocli.config import config_yaml
from ppocli.config.secrets import hide_secrets
from ppocli.config.text import error_line
from ppocli.config.user_code import CodeSetting, Kind, Located, check_class
from ppocli.errors import InputError

log = logging.getLogger("ppocli")

EVAL_SAMPLES = "eval/samples"
_INIT_SECONDS = "30"  # wandb's own 90 are long to wait for "no network"

_RUN_IDS: dict[str, Callable[[Any], str]] = {
    "trackio": attrgetter("id"), "clearml": attrgetter("id"),
    "mlflow": attrgetter("info.run_id"), "comet_ml": methodcaller("get_key")}
"""how trackers name a run; wandb and swanlab take the id that we choose"""

Rows = list[dict[str, Any]]


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
                warn("tensorboard", cause_of(error))
            self._warned = True

    def row(self, row: dict[str, Any]) -> None:
        """One step's figures; ``step`` among them."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        with self._failing_quietly():
            self._write(step=row["step"], summary=Summary(value=[
                Summary.Value(tag=name, simple_value=value)
                for name, value in finite_figures(row).items()]))

    def samples(self, step: int, samples: Rows) -> None:
        """They are in samples.jsonl; TensorBoard has no tables."""

    def finish(self, code: int) -> None:
        """Close the file."""
        with self._failing_quietly():
            self._records.close()

    def wait(self, seconds: float) -> None:
        """It is closed."""


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

        environ = os.environ
        self._name, project = name, project or (
            environ.get("WANDB_PROJECT") if name == "wandb" else None) or "ppocli"
        self.run_id = record.get("id") or secrets.token_hex(4)
        if name == "wandb":
            import wandb

            environ.setdefault("WANDB_INIT_TIMEOUT", _INIT_SECONDS)
            self.run_id = record.get("id") or environ.get("WANDB_RUN_ID") or self.run_id
            how = {"id": self.run_id, "resume": "allow",
                   "name": None if environ.get("WANDB_NAME") else run_dir.name,
                   "dir": None if environ.get("WANDB_DIR") else str(run_dir),
                   "settings": wandb.Settings(console="off", silent=True)}
        else:
            how = {"trackio": {"name": run_dir.name, "embed": False,
                               "resume": "allow" if record else "never"},
                   "mlflow": {"run_name": run_dir.name, "run_id": record.get("id")},
                   "swanlab": {"experiment_name": run_dir.name, "id": self.run_id,
                               "resume": "allow", "logdir": str(run_dir / "swanlab")},
                   "comet_ml": {"experiment_key": record.get("id")},
                   "clearml": {"task_name": run_dir.name,
                               "continue_last_task": record.get("id") or False},
                   }[name]
        make: Any = LOGGER_TYPE_TO_CLASS[name]
        self._tracker = make(project, **how)
        self._start(how)
        self._tracker.store_init_configuration(
            dict(config_yaml.leaves("", config)) if name in ("mlflow", "comet_ml") else config)
        run = self._tracker.tracker
        if name == "trackio" and record and run.id != record["id"]:
            # runs go by name, and another run has taken this one's
            self._tracker.init_kwargs["resume"] = "never"
            self._tracker.start()
            run = self._tracker.tracker
            warn("trackio", f"the newest run called {run_dir.name} in project {project} is another "
                 "one; this one goes on in a new run of that name")
        if name in _RUN_IDS:
            self.run_id = _RUN_IDS[name](run)

    def _start(self, how: dict[str, Any]) -> None:
        """Open the run; wandb, if it can't be reached, logs into files to be uploaded later."""
        try:
            self._tracker.start()
        except Exception as error:
            if self._name != "wandb" or os.environ.get("WANDB_MODE", "online") != "online":
                raise
            how["mode"] = "offline"
            self._tracker.init_kwargs = how
            self._tracker.start()
            warn("wandb", f"{cause_of(error)}; the run is logged to files, which can be uploaded "
                  f"later: wandb sync {self._tracker.run.settings.sync_dir}")
            return
        if self._name == "wandb":
            run = self._tracker.run
            log.info("wandb        %s", f"offline; to upload: wandb sync {run.settings.sync_dir}"
                     if run.offline else run.url)

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


def locate_tracker(spec: str) -> Located:
    """The class of the user's own that an entry of ``tracking.trackers`` names.

    Raises:
        InputError: the path leads to nothing, or to something that is no tracker.
    """
    setting = CodeSetting(spec, "tracking.trackers", Kind("class", InputError))
    located = check_class(setting, UserTracker, {"row"})
    fix = "a tracker is a class: __init__(self, run_dir, config), row(self, figures)"
    try:
        inspect.signature(located.target).bind(Path(), {})
    except TypeError as error:
        raise InputError(f"{located.label} can't be made from a folder and a configuration: "
                         f"{error}.", where="tracking.trackers", fix=fix) from None
    return located


def cause_of(error: BaseException) -> str:
    """The first line of an exception's message, without secrets and full stop."""
    return hide_secrets(error_line(error).rstrip("."))


def warn(name: str, cause: str) -> None:
    """Report that a tracker failed."""
    log.warning("%s: %s. The run does not depend on it; metrics.jsonl has everything.", name,
                hide_secrets(cause))
