"""A tracker in a process of its own: ``python -m ppocli.tracking.tracker_child``.

wandb and trackio wait for networks, start services and threads, wrap standard output and register
exit handlers. Here they can do so without the run waiting for them or ending with them.

On standard input come JSON lines: first what the tracker is opened with (:class:`Opening`), then
``{"row": {...}}``, ``{"table": [...], "step": n}`` and at last ``{"finish": code}``. On standard
output go back ``{"news": text}``, ``{"warning": text}``, ``{"done": n}`` after each line and
``{"finished": true}``. What the libraries print goes to the standard error.

``trackers/NAME.json`` in the run's folder keeps the run's id in the tracker and the last step that
was logged, so that a resumed run goes on in the same tracker run and logs no step twice.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ppocli.config.secrets import hide_secrets
from ppocli.storage.atomic import write_json_atomic

EVAL_SAMPLES = "eval/samples"
_ORPHAN_SECONDS = 30.0  # time to finish in when the run was killed
_INIT_SECONDS = "30"  # wandb's own 90 are long to wait for "no network"


@dataclass(frozen=True, slots=True)
class Opening:
    """What a tracker's run is opened with."""

    tracker: str
    name: str
    """of the run"""
    project: str | None
    """null: what the library's environment says, else ``ppocli``"""
    run_dir: str
    config: dict[str, Any]
    pid: int
    """whose CPU, memory and GPUs are watched"""


class Service(Protocol):
    """One open run of a tracker."""

    def log(self, figures: dict[str, Any], table: list[dict[str, Any]] | None, step: int) -> None:
        """Log one step: its figures, and its evaluation samples if there were any."""

    def finish(self, code: int) -> None:
        """Close the run; a code other than 0 says that it failed."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open service, its id, and the first step that it may be given."""

    service: Service
    run_id: str
    first_step: int


Say = Callable[[str, Any], None]


def main() -> None:
    """Serve one tracker until standard input ends or says so."""
    lines, say = _take_streams()
    opening = Opening(**json.loads(lines.readline()))
    record = Path(opening.run_dir) / "trackers" / f"{opening.tracker}.json"
    try:
        opened = OPEN[opening.tracker](opening, _read(record), say)
    except Exception as error:
        say("warning", f"{cause_of(error)}; nothing is logged there")
        raise
    step = opened.first_step - 1
    _keep(record, opened.run_id, step)
    table: tuple[int, list[dict[str, Any]]] | None = None
    for number, line in enumerate(lines, 1):
        message = json.loads(line)
        if "finish" in message:
            opened.service.finish(message["finish"])
            say("finished", True)
            return
        if "table" in message:
            table = (message["step"], message["table"])
        elif (row := message["row"])["step"] >= opened.first_step:
            step = row.pop("step")
            rows = table[1] if table is not None and table[0] == step else None
            try:
                opened.service.log(row, rows, step)
                _keep(record, opened.run_id, step)
            except Exception as error:
                say("warning", f"step {step} could not be logged: {cause_of(error)}")
        say("done", number)
    # the run was killed: whoever resumes it goes on in the same tracker run
    _end_within(_ORPHAN_SECONDS)
    opened.service.finish(255)


def _take_streams() -> tuple[BinaryIO, Say]:
    """Our ends of the pipes. The libraries find an empty standard input, at which none can wait for
    a password, and a standard output that goes where the standard error goes."""
    lines, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    def say(kind: str, what: Any) -> None:
        with suppress(OSError):  # nobody listens any more
            answers.write(json.dumps({kind: what}).encode() + b"\n")
            answers.flush()

    return lines, say


def cause_of(error: BaseException) -> str:
    """The first line of what an exception says, without secrets."""
    text = str(error).strip().rstrip(".").splitlines()
    return hide_secrets(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)


def _read(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text())
        return {"id": str(found["id"]), "step": int(found["step"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _keep(record: Path, run_id: str, step: int) -> None:
    write_json_atomic(record, {"id": run_id, "step": step})


def _end_within(seconds: float) -> None:
    """End this process and its services after a while, whatever they wait for."""
    timer = threading.Timer(seconds, lambda: os.killpg(0, signal.SIGKILL))
    timer.daemon = True
    timer.start()


@dataclass(frozen=True, slots=True)
class _Wandb:
    run: Any
    table: Any

    def log(self, figures: dict[str, Any], table: list[dict[str, Any]] | None, step: int) -> None:
        if table:
            columns = list(table[0])
            figures = {**figures, EVAL_SAMPLES: self.table(
                columns=columns, data=[[row[name] for name in columns] for row in table])}
        self.run.log(figures, step=step)

    def finish(self, code: int) -> None:
        self.run.finish(exit_code=code)


def _open_wandb(opening: Opening, found: dict[str, Any], say: Say) -> Opened:
    """Weights & Biases: online or, where that can't be, into files that can be uploaded later."""
    import wandb

    os.environ.setdefault("WANDB_INIT_TIMEOUT", _INIT_SECONDS)
    run_id = found.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)

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
    # online the service knows what it has; offline only we do
    first = found.get("step", -1) + 1 if run.offline else run.step
    return Opened(_Wandb(run, wandb.Table), run_id, first)


@dataclass(frozen=True, slots=True)
class _Trackio:
    run: Any
    table: Any

    def log(self, figures: dict[str, Any], table: list[dict[str, Any]] | None, step: int) -> None:
        self.run.log({**figures, EVAL_SAMPLES: self.table(data=table)} if table else figures,
                     step=step)

    def finish(self, code: int) -> None:
        self.run.finish()


def _open_trackio(opening: Opening, found: dict[str, Any], say: Say) -> Opened:
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

    run = start("allow" if found else "never")
    if found and run.id != found["id"]:  # it knows runs by name, and another one has taken this
        run = start("never")
        say("warning", f"the newest run called {opening.name} in project {project} is another one; "
            "this one goes on in a new run of that name")
        found = {}
    say("news", os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        or f"trackio show --project {project}")
    return Opened(_Trackio(run, trackio.Table), run.id, found.get("step", -1) + 1)


OPEN: dict[str, Callable[[Opening, dict[str, Any], Say], Opened]] = {
    "wandb": _open_wandb, "trackio": _open_trackio}
"""how each tracker's run is opened"""

if __name__ == "__main__":
    main()
