"""The folder of one evaluation: its name, who may write there, what is there already.

``settings.json`` is written first and says what the samples are of; ``samples.jsonl`` grows chunk
by chunk; ``eval.json`` comes last, so an evaluation is finished exactly if it is there.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.errors import CheckpointError, DiskError
from ppocli.storage.atomic import disk_errors, make_dirs, read_json
from ppocli.storage.run_folder import LOCK, lock, probe_writable
from ppocli.storage.run_logs import read_row

EVAL = "eval"
"""folder of a run that holds its evaluations"""
Row = dict[str, Any]
"""a row of samples.jsonl"""
_REPORT = {"model", "figures", "stderr", "quantiles", "samples", "scored", "against", "win_rate",
           "frontier", "base"}
"""what readers of eval.json count on"""


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """Where the parts of an evaluation lie. Nothing is created by naming it."""

    path: Path

    @property
    def settings(self) -> Path:
        """What the samples are made from: a resumed evaluation must agree with it."""
        return self.path / "settings.json"

    @property
    def samples(self) -> Path:
        """One JSON object a sample."""
        return self.path / "samples.jsonl"

    @property
    def result(self) -> Path:
        """What came out, one JSON object; there only if the evaluation is finished."""
        return self.path / "eval.json"

    @property
    def picture(self) -> Path:
        """The frontier, if it was asked for."""
        return self.path / "frontier.svg"

    @property
    def finished(self) -> bool:
        """Whether the evaluation went through."""
        return self.result.is_file()


def read_result(folder: Path) -> dict[str, Any] | None:
    """The contents of a finished evaluation's eval.json; None if there is none, or a damaged one.
    """
    report = read_json(EvalFolder(folder).result)
    return report if report is not None and report.keys() >= _REPORT else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where results are to go, as asked for."""

    root: Path
    label: str
    """the name where none was given"""
    name: str | None
    overwrite: bool
    resume: bool

    @property
    def default(self) -> Path:
        """The folder under its own name, without a number."""
        return self.root / (self.name or self.label)

    def refuse_taken(self) -> None:
        """Refuse a name that is taken, before anything is loaded.

        Raises:
            CheckpointError: nothing is overwritten unless asked for, and only an evaluation.
        """
        folder = EvalFolder(self.default)
        if self.overwrite and os.path.lexists(folder.path) and any(_foreign(folder)):
            raise CheckpointError(f"{folder.path} holds what is no evaluation "
                                  f"({next(_foreign(folder))}); it is not overwritten.",
                                  where=str(folder.path), fix="choose another --name or --output")
        if self.name is None or self.overwrite or self.resume:
            return
        if os.path.lexists(folder.path):
            what = "a finished" if folder.finished else "an unfinished"
            raise CheckpointError(f"{folder.path} holds {what} evaluation already.",
                                  where=f"--name {self.name}",
                                  fix="--resume goes on with it, --overwrite starts it again; or "
                                      "choose another --name")

    def numbered(self) -> list[EvalFolder]:
        """Folders there are under the default name, by number."""
        pattern = re.compile(re.escape(self.label) + r"(?:-([0-9]+))?")
        names = [(int(match[1] or 1), path) for path in self.root.glob("*") if path.is_dir()
                 and (match := pattern.fullmatch(path.name)) and match[1] not in ("0", "1")]
        return [EvalFolder(path) for _, path in sorted(names)]


def choose(place: Place, identity: dict[str, Any], say: Callable[[str], None]) -> EvalFolder:
    """The folder to work in: that of an evaluation to go on with, or a new one, made.

    Raises:
        CheckpointError: the evaluation to go on with was begun under other settings.
        DiskError: the folder can't be made.
    """
    if place.resume:
        candidates = [EvalFolder(place.default)] if place.name else place.numbered()
        candidates = [folder for folder in candidates if folder.path.is_dir()]
        same = [folder for folder in candidates if not differences(folder, identity)]
        unfinished = [folder for folder in candidates if not folder.finished]
        for folder in (*reversed([f for f in same if not f.finished]), *reversed(same)):
            return folder
        if unfinished or (candidates and place.name):
            raise _other_settings((unfinished or candidates)[-1], identity)
        say(f"there is no evaluation to go on with in {place.root}: starting afresh")
    with _naming_output():
        probe_writable(place.root)
        if place.overwrite:
            make_dirs(place.default)
            return EvalFolder(place.default)
        for number in itertools.count(1):
            path = place.default if number == 1 else place.root / f"{place.default.name}-{number}"
            with disk_errors(path):
                try:
                    path.mkdir()
                except FileExistsError:
                    if not EvalFolder(path).finished and path.is_dir():
                        say(f"{path} holds an unfinished evaluation; to go on with it: the same "
                            f"command with --resume --name {path.name}")
                    continue
            return EvalFolder(path)
    raise AssertionError("unreachable")


@contextmanager
def working_in(folder: EvalFolder, place: Place) -> Iterator[None]:
    """Hold the folder for this process; a folder in which nothing came to be is removed again.

    Raises:
        CheckpointError: another process works there.
    """
    try:
        with _naming_output(), lock(folder.path):
            if place.overwrite:
                for path in (folder.result, folder.settings, folder.samples, folder.picture):
                    with disk_errors(path):
                        path.unlink(missing_ok=True)
            try:
                yield
            finally:
                if not folder.finished and _is_empty(folder.samples):
                    for path in (folder.samples, folder.settings):
                        path.unlink(missing_ok=True)
    finally:
        names = {entry.name for entry in folder.path.iterdir()} if folder.path.is_dir() else {""}
        if names <= {LOCK}:
            with suppress(OSError):
                (folder.path / LOCK).unlink(missing_ok=True)
                folder.path.rmdir()
                if place.root.name == EVAL:
                    place.root.rmdir()


@contextmanager
def _naming_output() -> Iterator[None]:
    try:
        yield
    except DiskError as error:
        if error.fix is not None and "output_dir" in error.fix:
            error.fix = "name another folder: --output DIR"
        raise
    except CheckpointError as error:
        if error.fix is not None:
            error.fix = error.fix.replace("run_name", "--name")
        raise


def _foreign(folder: EvalFolder) -> Iterator[str]:
    known = {path.name for path in (folder.settings, folder.samples, folder.result, folder.picture)}
    if not folder.path.is_dir():
        yield "a file"
        return
    yield from sorted({entry.name for entry in folder.path.iterdir()} - known - {LOCK})


def _is_empty(path: Path) -> bool:
    return not path.is_file() or path.stat().st_size == 0


def differences(folder: EvalFolder, identity: dict[str, Any]) -> list[str]:
    """Lines on what differs between the settings a folder was begun with and ``identity``.

    Models are compared where both name their weights: those that weren't reached yet have none.
    """
    if _is_empty(folder.samples) and not folder.finished:
        return []
    old = read_json(folder.settings)
    if old is None:
        return [f"{folder.settings} is missing or damaged"]
    before, now = _flat(old.get("identity", {})), _flat(identity)
    names = list(dict.fromkeys([*before, *now]))
    return [f"{name}: {_shown(before.get(name))} -> {_shown(now.get(name))}" for name in names
            if before.get(name) != now.get(name)
            and not (name.partition(".")[0] == "models" and not (name in before and name in now))]


def _other_settings(folder: EvalFolder, identity: dict[str, Any]) -> CheckpointError:
    lines = differences(folder, identity)
    more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
    return CheckpointError(
        "\n".join([f"{folder.path} was begun under other settings:",
                   *(f"  {line}" for line in lines[:8]), *more]), where=str(folder.settings),
        fix="give the settings it was begun with; or start again: --overwrite in place of "
            "--resume; or choose another --name")


def check_same(folder: EvalFolder, identity: dict[str, Any]) -> None:
    """Refuse to go on with samples of something else.

    Raises:
        CheckpointError: names what differs.
    """
    if differences(folder, identity):
        raise _other_settings(folder, identity)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for part, inner in value.items()
                for key, leaf in _flat(inner, f"{name}.{part}" if name else str(part)).items()}
    return {name: value}


def _shown(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}..."


def take_up(folder: EvalFolder, parts: Sequence[tuple[str, int]], chunk: int
            ) -> dict[str, list[Row]]:
    """Rows there already, by model; what follows the last whole chunk is cut off the file.

    Args:
        parts: the models in the order they are evaluated in, and how many samples each has.
        chunk: samples of one generate call.

    Raises:
        DiskError: the file can't be cut.
    """
    found: dict[str, list[Row]] = {role: [] for role, _ in parts}
    if not folder.samples.is_file():
        return found
    end = place = 0
    pending: list[Row] = []
    expected = [(role, number, total) for role, total in parts for number in range(total)]
    with disk_errors(folder.samples), folder.samples.open("rb") as lines:
        for line, (role, number, total) in zip(lines, expected, strict=False):
            row = _row(line, role, number)
            if row is None:
                break
            place += len(line)
            pending.append(row)
            if (number + 1) % chunk == 0 or number + 1 == total:
                found[role] += pending
                pending, end = [], place
    with disk_errors(folder.samples):
        if folder.samples.stat().st_size > end:
            os.truncate(folder.samples, end)
    return found


def _row(line: bytes, role: str, number: int) -> Row | None:
    """The row of a whole line, if it is the ``number``-th of this model."""
    row = read_row(line)
    if row is None or not line.endswith(b"\n"):
        return None
    return row if (row.get("model"), row.get("number")) == (role, number) else None
