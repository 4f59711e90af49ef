"""Standard output of a command, which is for its results alone."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class _Streams:
    """Of this process."""

    results: TextIO | None = None


def result_stream() -> TextIO:
    """Where results are printed: standard output, also once :func:`reserve_stdout` has led that
    elsewhere."""
    return _Streams.results or sys.stdout


def put(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Print a result."""
    print(*values, sep=sep, end=end, file=result_stream(), flush=True)


def reserve_stdout() -> None:
    """Keep standard output for results, to the end of this process: what a reward, an environment,
    a library (C code, too) or a child process writes to its own goes to standard error. A reader of
    ``$(ppocli ...)`` gets no line that isn't ours."""
    if _Streams.results is not None:
        return
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        descriptor, error = sys.stdout.fileno(), sys.stderr.fileno()
        kept = os.fdopen(os.dup(descriptor), "w", encoding=sys.stdout.encoding,
                         errors=sys.stdout.errors)
        for each in {descriptor, 1}:
            os.dup2(error, each)
        _Streams.results = kept
        # in the order of what is written to standard error itself
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
