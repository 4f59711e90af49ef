"""Processes of a run: their arguments, how they are waited for, and the outcome of the run.

A child process gets our signals, shares our output, and ends when we end.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ppocli.config import config_yaml, schema
from ppocli.distributed import stop
from ppocli.distributed.launchers import RankOutcome
from ppocli.errors import PpocliError

if TYPE_CHECKING:
    from ppocli.publish.console import DisplayMode


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of a process of a run: which run it takes part in, and how."""

    run_dir: Path
    resume: bool = False
    """go on from the newest valid checkpoint"""
    display: DisplayMode = "auto"
    """what a person is shown"""
    reserved_by: int | None = None
    """the process that keeps the folder for this one"""
    node_rank: int | None = None
    """number of this machine, where the configuration is node 0's"""
    lifeline: int | None = None
    """the reading end of a pipe; when its other end closes, the run stops and saves"""
    limited: tuple[str, ...] = ()
    """import paths that recipes name, see :mod:`ppocli.config.import_guard`"""

    def argv(self) -> list[str]:
        """The same as command-line arguments: the run's folder, and the rest as JSON."""
        how = asdict(self)
        return [str(how.pop("run_dir")), json.dumps(how)]

    def config(self) -> schema.TrainConfig:
        """The configuration that the run starts or goes on with.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return config_yaml.read_config(config_yaml.next_config(self.run_dir) if self.resume
                                    else self.run_dir / config_yaml.CONFIG_FILE)

    @classmethod
    def read(cls, argv: Sequence[str]) -> Start:
        """Parse such arguments, and start to watch the lifeline if there is one."""
        run_dir, how = argv
        start = cls(Path(run_dir), **json.loads(how))
        if start.lifeline is not None:
            stop.stop_when_closed(start.lifeline)
        return start


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run. ``model_dir`` and ``summary`` are None if the run didn't get that far;
    ``stopped_by`` is the signal that this process received, and forwarded, while it waited."""

    run_dir: Path
    exit_code: int
    model_dir: Path | None
    summary: dict[str, Any] | None
    stopped_by: int | None = None


def outcome_of(rank: int, work: Callable[[], object]) -> RankOutcome:
    """Run ``work`` and return how it ended: errors of all kinds become an outcome; its result is
    dropped."""
    try:
        work()
    except PpocliError as error:
        return RankOutcome(rank, error.exit_code, str(error), retry=getattr(error, "retry", {}))
    except KeyboardInterrupt:
        return RankOutcome(rank, 128 + signal.SIGINT, "interrupted")
    except SystemExit as leaving:
        return RankOutcome(rank, leaving.code if isinstance(leaving.code, int)
                           else int(leaving.code is not None))
    except Exception as error:
        from ppocli.distributed.ranks import is_lost_neighbour

        return RankOutcome(rank, 1, f"{type(error).__name__}: {error}", traceback.format_exc(),
                           lost=is_lost_neighbour(error))
    return RankOutcome(rank, 0)


def run_process(command: list[str], passed: Sequence[int] = ()) -> tuple[int, int | None]:
    """Run a command to its end, its standard output on our standard error.

    The child has its own process group, so that a Ctrl-C reaches it once, through us, and it can
    save before it leaves; a second Ctrl-C is handed on as well.

    Args:
        passed: file descriptors that it inherits.

    Returns:
        its exit code (128 + n if signal n killed it), and the first signal that we got meanwhile.

    Raises:
        PpocliError: the process couldn't be started.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None and process.poll() is None:
            process.send_signal(number)

    with stop.signal_handlers(dict.fromkeys(stop.heeded(), hand_on)):
        try:
            process = subprocess.Popen(command, process_group=0, pass_fds=passed,
                                       stdin=subprocess.DEVNULL, stdout=_standard_error())
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.ENOENT, errno.EACCES):
                raise PpocliError(f"the worker process couldn't be started: {error.strerror}",
                                  where=command[0]) from error
            raise
        if received:
            process.send_signal(received[0])
        code = _wait(process)
    return (code if code >= 0 else 128 - code), (received[0] if received else None)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The child's exit code. Waits in short turns: a signal that comes just before a blocking wait
    would have its handler run only when the child has ended by itself."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1.0)


def _standard_error() -> int:
    with suppress(AttributeError, OSError, ValueError):
        return sys.stderr.fileno()
    return subprocess.DEVNULL
