"""Commands that load models: notes on standard error, stops at safe points, one exit code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ppocli.cli.output import complain, say
from ppocli.errors import ConfigError, StoppedError
from ppocli.parallel.launchers import Launched, find_launch

if TYPE_CHECKING:
    from ppocli.parallel.stop import StopFlag

_WORD = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=")


def refuse_several(what: str) -> None:
    """Keep to one process what several would only do several times over; rank 0 says so.

    Raises:
        ConfigError: a launcher has started this process among others.
    """
    launched = find_launch(os.environ)
    if launched is None or launched.world == 1:
        return
    if not launched.first:
        raise SystemExit(ConfigError.exit_code)
    raise one_process_error(what, launched)


def one_process_error(what: str, launched: Launched) -> ConfigError:
    """The words for what needs one process."""
    return ConfigError(f"{what} works in one process, and {launched.by} has started "
                       f"{launched.world}.", where="WORLD_SIZE or srun's number of tasks",
                       fix="start it without the launcher, or with one process (srun --ntasks=1)")


@contextmanager
def working(fix: str | None = None) -> Iterator[StopFlag]:
    """A flag that Ctrl-C and SIGTERM set; the engine's notes go to
    standard error, transformers' progress bars and reports nowhere.

    Args:
        fix: how to go on after a stop, for the message.

    Raises:
        ConfigError: a launcher has started several processes of this command.
        StoppedError: a signal asked to stop and the work reached a safe point.
    """
    import logging

    refuse_several("This command")

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                complain(f"{record.levelname.lower()}: {record.getMessage()}")
            else:
                say(record.getMessage())

    from ppocli.display.console import logging_to
    from ppocli.parallel.stop import StopRequested, catch_signals
    from ppocli.storage.model_files import quiet_transformers
    from ppocli.user_code import join_working_directory

    quiet_transformers()
    join_working_directory()
    try:
        with logging_to(logging.INFO, Notes()), catch_signals() as stop:
            yield stop
    except StopRequested as stopped:
        raise StoppedError(f"stopped by {stopped}", signal_number=stopped.signal_number,
                           fix=fix) from None


def split_words(run: str | None, words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """RUN and the words after it; a first word KEY=VALUE means that RUN was left out.

    Raises:
        ConfigError: something among the words is neither.
    """
    rest = list(words or [])
    if run is not None and _WORD.match(run) and not Path(run).exists():
        rest, run = [run, *rest], None
    wrong = [word for word in rest if not _WORD.match(word)]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is neither an option nor a setting KEY=VALUE.",
                          where="command line", fix="ppocli COMMAND --help lists the options")
    return run, rest
