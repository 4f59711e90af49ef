"""The process of a run's trackers: ``python -m ppocli.publish.tracker_child DESCRIPTOR``.

wandb and trackio wait for networks, start services and threads, wrap standard output and register
exit handlers; a tracker of the user's own may do anything. In this process the run neither waits
for them nor ends with them; each has a thread, so that none waits for another.
``multiprocessing.Process`` would import the training program once more, and a fork would inherit
its locks and its GPU.

A ``multiprocessing`` connection delivers first the fields of :class:`Opening`, then ``(tracker,
kind, what)``: a ``row`` of figures, ``samples`` as (step, rows) before the row of that step, and at
last ``finish`` with an exit code. Replies are ``news`` and ``warning`` with a text, ``done`` after
each row and table, and ``finished``. Printed text goes into ``trackers/output.log``.

``trackers/NAME.json`` in the run's folder keeps the run's id in the tracker and the last step that
was logged, so that a resumed run goes on in the same tracker run and logs no step twice.
"""

import inspect
import os
import queue
import re
import secrets
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from ppocli.config.secrets import hide_secrets
from ppocli.config.text import error_line
from ppocli.config.user_classes import refuse_unfit
from ppocli.config.user_code import CodeSetting, Kind, Located, locate
from ppocli.errors import InputError
from ppocli.runs.atomic import read_json, write_json_atomic

EVAL_SAMPLES = "eval/samples"
_ORPHAN_SECONDS = 30.0  # time to finish in when the run was killed
_INIT_SECONDS = "30"  # wandb's own 90 are long to wait for "no network"


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments with which a run's trackers are opened."""

    trackers: list[str]
    """``wandb``, ``trackio`` or import paths"""
    name: str
    """of the run"""
    project: str | None
    """null: as the library's environment variables say, or ``ppocli``"""
    run_dir: str
    config: dict[str, Any]
    pid: int
    """of the run: its CPU, memory and GPUs are monitored, and the trackers end with it"""
    import_path: list[str]
    """the run's module search path"""


Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Opened:
    """An open run of a tracker."""

    log: Callable[[dict[str, Any], Rows, int], Any]
    """takes figures, evaluation samples (none at most steps) and the step"""
    finish: Callable[[int], Any]
    """closes the run; a code other than 0 says that it failed"""
    run_id: str
    first_step: int
    """that it may be given"""


Say = Callable[[str, Any], None]
"""sends a kind of message and its content to the run"""


def main(descriptor: int) -> None:
    """Serve the trackers until each was told to finish, or the run is gone."""
    connection: Connection[Any, Any] = Connection(descriptor)
    opening = Opening(**connection.recv())
    sys.path.extend(path for path in opening.import_path if path not in sys.path)
    turn = threading.Lock()

    def say(tracker: str, kind: str, what: Any = None) -> None:
        with turn, suppress(OSError):  # the run no longer listens
            connection.send((tracker, kind, what))

    inboxes = {name: queue.SimpleQueue[tuple[str, Any]]() for name in opening.trackers}
    threads = [threading.Thread(target=_serve, args=(name, opening, inbox, partial(say, name)),
                                name=name, daemon=True) for name, inbox in inboxes.items()]
    for thread in threads:
        thread.start()
    open_ones = set(inboxes)
    while open_ones:
        try:
            # a process that the run has forked may hold the other end open when the run has died
            while not connection.poll(1.0):
                if os.getppid() != opening.pid:
                    raise EOFError
            name, kind, what = connection.recv()
        except (EOFError, OSError):
            # whoever resumes the run goes on in the same tracker run
            # and this process and its services end after a while, even if they hang
            killer = threading.Timer(_ORPHAN_SECONDS, os.killpg, (0, signal.SIGKILL))
            killer.daemon = True
            killer.start()
            for name in open_ones:
                inboxes[name].put(("finish", 255))
            break
        inboxes[name].put((kind, what))
        if kind == "finish":
            open_ones.remove(name)
    for thread in threads:
        thread.join()


def _serve(name: str, opening: Opening, inbox: queue.SimpleQueue[tuple[str, Any]], say: Say
           ) -> None:
    """Open a tracker, log what comes, and close it."""
    record = Path(opening.run_dir) / "trackers" / (re.sub(r"\W+", "-", Path(name).name) + ".json")
    lost = "; nothing is logged there"
    try:
        opened = OPEN.get(name, partial(_open_own, name))(opening, read_json(record) or {}, say)
        lost = ""
        step = opened.first_step - 1
        _keep(record, opened.run_id, step)
        samples_step, samples = -1, Rows()
        while (message := inbox.get())[0] != "finish":
            kind, what = message
            if kind == "samples":
                samples_step, samples = what
            elif what["step"] >= opened.first_step:
                step = what.pop("step")
                try:
                    opened.log(what, samples if samples_step == step else [], step)
                    _keep(record, opened.run_id, step)
                except (Exception, SystemExit) as error:
                    traceback.print_exc()
                    say("warning", f"step {step} could not be logged: {cause_of(error)}")
            say("done", None)
        opened.finish(message[1])
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        say("warning", cause_of(error) + lost)
    say("finished", None)


def cause_of(error: BaseException) -> str:
    """The first line of an exception's message, without secrets and full stop."""
    return hide_secrets(error_line(error).rstrip("."))


def _keep(record: Path, run_id: str, step: int) -> None:
    write_json_atomic(record, {"id": run_id, "step": step})


def _open_wandb(opening: Opening, record: dict[str, Any], say: Say) -> Opened:
    """Weights & Biases: online or, if that fails, into files that can be uploaded later."""
    import wandb

    os.environ.setdefault("WANDB_INIT_TIMEOUT", _INIT_SECONDS)
    run_id = record.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)

    def start(mode: Any = None) -> Any:
        return wandb.init(
            id=run_id, resume="allow", mode=mode, config=opening.config, allow_val_change=True,
            name=None if os.environ.get("WANDB_NAME") else opening.name,
            project=opening.project or os.environ.get("WANDB_PROJECT") or "ppocli",
            dir=None if os.environ.get("WANDB_DIR") else opening.run_dir,
            settings=wandb.Settings(console="off", x_stats_pid=opening.pid))

    try:
        run = start()
    except Exception as error:
        if os.environ.get("WANDB_MODE", "online") != "online":
            raise
        wandb.teardown()
        run = start("offline")
        say("warning", f"{cause_of(error)}; the run is logged to files, which can be uploaded "
            f"later: wandb sync {run.settings.sync_dir}")
    else:
        if run.offline:
            say("news", f"offline; to upload: wandb sync {run.settings.sync_dir}")
        elif run.url:
            say("news", run.url)
    # online, the service knows its last step; offline, only our record does
    first = record.get("step", -1) + 1 if run.offline else run.step

    def log(figures: dict[str, Any], samples: Rows, step: int) -> None:
        if samples:
            figures[EVAL_SAMPLES] = wandb.Table(columns=list(samples[0]), data=[
                [row[name] for name in samples[0]] for row in samples])
        run.log(figures, step=step)

    return Opened(log, lambda code: run.finish(exit_code=code), run_id, first)


def _open_trackio(opening: Opening, record: dict[str, Any], say: Say) -> Opened:
    """trackio: into its own folder on this machine, or to the Space that its environment names."""
    import trackio

    def tell(message: Warning | str, *more: Any, **others: Any) -> None:
        """It warns where others raise."""
        if str(message).startswith("trackio"):
            say("warning", hide_secrets(str(message).splitlines()[0]))
        sys.stderr.write(f"{message}\n")

    warnings.showwarning = tell
    project = opening.project or "ppocli"

    def start(resume: str) -> Any:
        return trackio.init(project=project, name=opening.name, config=opening.config,
                            resume=resume, embed=False)

    run = start("allow" if record else "never")
    if record and run.id != record["id"]:  # runs go by name, and another run has this one
        run = start("never")
        say("warning", f"the newest run called {opening.name} in project {project} is another one; "
            "this one goes on in a new run of that name")
        record = {}
    say("news", os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        or f"trackio show --project {project}")

    def log(figures: dict[str, Any], samples: Rows, step: int) -> None:
        if samples:
            figures[EVAL_SAMPLES] = trackio.Table(data=samples)
        run.log(figures, step=step)

    return Opened(log, lambda code: run.finish(), run.id, record.get("step", -1) + 1)


class OwnTracker(Protocol):
    """A tracker of the user's own, of which ``row`` alone must be there."""

    def row(self, figures: dict[str, Any]) -> None:
        """One step's figures, ``step`` among them."""

    def samples(self, step: int, samples: Rows) -> None:
        """The samples of a step's evaluation."""

    def close(self) -> None:
        """No more rows will come."""


def locate_tracker(spec: str) -> Located:
    """The class of the user's own that an entry of ``tracking.trackers`` names.

    Raises:
        InputError: the path leads to nothing, or to something that is no tracker.
    """
    located = locate(CodeSetting(spec, "tracking.trackers", Kind("class", InputError)))
    fix = "a tracker is a class: __init__(self, run_dir, config), row(self, figures)"
    refuse_unfit(located, OwnTracker, InputError, frozenset({"row"}))
    try:
        inspect.signature(located.target).bind(Path(), {})
    except TypeError as error:
        raise InputError(f"{located.label} can't be made from a folder and a configuration: "
                         f"{error}.", where="tracking.trackers", fix=fix) from None
    return located


def _open_own(spec: str, opening: Opening, record: dict[str, Any], say: Say) -> Opened:
    """A class of the user's own."""
    tracker = locate_tracker(spec).target(Path(opening.run_dir), opening.config)

    def log(figures: dict[str, Any], samples: Rows, step: int) -> None:
        if samples and hasattr(tracker, "samples"):
            tracker.samples(step, samples)
        tracker.row({"step": step, **figures})

    return Opened(log, lambda code: getattr(tracker, "close", lambda: None)(), "",
                  record.get("step", -1) + 1)


OPEN: dict[str, Callable[[Opening, dict[str, Any], Say], Opened]] = {
    "wandb": _open_wandb, "trackio": _open_trackio}
"""how each tracker that ppocli knows is opened"""

if __name__ == "__main__":
    main(int(sys.argv[1]))
