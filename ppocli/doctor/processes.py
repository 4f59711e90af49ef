"""Questions that are asked in a process of its own, because the answer may be a crash or a hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """Facts, or why there are none."""

    facts: dict[str, Any] | None
    error: str = ""


def ask(probe: str, *arguments: str, seconds: float) -> Answer:
    """What ``python -m ppocli.doctor.PROBE`` prints as JSON, within ``seconds``."""
    return ask_all(probe, [arguments], seconds=seconds)[0]


def ask_all(probe: str, arguments: Sequence[Sequence[str]], *, seconds: float) -> list[Answer]:
    """The answers of several processes of one probe that run at the same time."""
    # -P: nothing of the current folder; behind all else, this very ppocli
    command = [sys.executable, "-P", "-m", f"ppocli.doctor.{probe}"]
    paths = [os.environ.get("PYTHONPATH"), str(Path(__file__).resolve().parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    deadline = monotonic() + seconds
    started: list[subprocess.Popen[str]] = []
    try:
        for words in arguments:
            started.append(subprocess.Popen(
                [*command, *words], env=environment, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return [_answer(process, max(deadline - monotonic(), 0.1), seconds)
                for process in started]
    except OSError as error:
        return [Answer(None, f"no process could be started: {error.strerror or error}")
                for _ in arguments]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            with suppress(subprocess.TimeoutExpired, ValueError, OSError):
                process.communicate(timeout=5)


def _answer(process: subprocess.Popen[str], seconds: float, total: float) -> Answer:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {total:g} s")
    for line in reversed(out.splitlines()):
        with suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict):
                return Answer(facts) if "error" not in facts else Answer(None, facts["error"])
    if process.returncode < 0:
        return Answer(None, f"the process was ended by {signal.Signals(-process.returncode).name}")
    said = [line for line in err.splitlines() if line.strip()]
    return Answer(None, said[-1].strip() if said else f"exit code {process.returncode}")
