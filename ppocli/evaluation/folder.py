"""The folder of one evaluation: its name, who may write there, what is there already.

``settings.json`` is written first and says what the samples are of; ``samples.jsonl`` grows chunk
by chunk; ``eval.json`` comes last, so an evaluation is finished exactly if it is there.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.errors import CheckpointError, DiskError
from ppocli.storage.atomic import disk_errors, make_dirs, read_json
from ppocli.storage.run_folder import LOCK, lock, probe_writable
from ppocli.storage.run_logs import read_row
from ppocli.text import cut

EVAL = "eval"
"""folder of a run that holds its evaluations"""
SETTINGS = "settings.json"
"""what the samples are made from: a resumed evaluation must agree with it"""
SAMPLES = "samples.jsonl"
"""one JSON object a sample"""
RESULT = "eval.json"
"""what came out, one JSON object; there only if the evaluation is finished"""
PICTURE = "frontier.svg"
"""the frontier, if it was asked for"""
Row = dict[str, Any]
"""a row of samples.jsonl"""
_REPORT = {"model", "figures", "stderr", "quantiles", "samples", "scored", "against", "win_rate",
           "frontier", "base"}
"""what readers of eval.json count on"""


def is_finished(folder: Path) -> bool:
    """Whether the evaluation in a folder went through."""
    return (folder / RESULT).is_file()


def read_result(folder: Path) -> dict[str, Any] | None:
    """The contents of a finished evaluation's eval.json; None if there is none, or a damaged one.
    """
    report = read_json(folder / RESULT)
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
        folder = self.default
        if not os.path.lexists(folder):
            return
        if self.overwrite:
            known = {SETTINGS, SAMPLES, RESULT, PICTURE, LOCK}
            foreign = (sorted({path.name for path in folder.iterdir()} - known) if folder.is_dir()
                       else ["a file"])
            if foreign:
                raise CheckpointError(
                    f"{folder} holds what is no evaluation ({foreign[0]}); it is not overwritten.",
                    where=str(folder), fix="choose another --name or --output")
        elif self.name is not None and not self.resume:
            what = "a finished" if is_finished(folder) else "an unfinished"
            raise CheckpointError(f"{folder} holds {what} evaluation already.",
                                  where=f"--name {self.name}",
                                  fix="--resume goes on with it, --overwrite starts it again; or "
                                      "choose another --name")

    def numbered(self) -> list[Path]:
        """Folders there are under the default name, by number."""
        pattern = re.compile(re.escape(self.label) + r"(?:-([0-9]+))?")
        names = [(int(match[1] or 1), path) for path in self.root.glob("*")
                 if (match := pattern.fullmatch(path.name)) and match[1] not in ("0", "1")]
        return [path for _, path in sorted(names)]


def choose(place: Place, identity: dict[str, Any], say: Callable[[str], None]) -> Path:
    """The folder to work in: that of an evaluation to go on with, or a new one, made.

    Raises:
        CheckpointError: the evaluation to go on with was begun under other settings.
        DiskError: the folder can't be made.
    """
    if place.resume:
        candidates = [place.default] if place.name else place.numbered()
        candidates = [folder for folder in candidates if folder.is_dir()]
        unfinished = [folder for folder in candidates if not is_finished(folder)]
        for folder in (*reversed(unfinished), *reversed(candidates)):
            if not differences(folder, identity):
                return folder
        if unfinished or (candidates and place.name):
            check_same((unfinished or candidates)[-1], identity)
        say(f"there is no evaluation to go on with in {place.root}: starting afresh")
    with _naming_output():
        probe_writable(place.root)
        if place.overwrite:
            make_dirs(place.default)
            return place.default
        for number in itertools.count(1):
            path = place.default if number == 1 else place.root / f"{place.default.name}-{number}"
            with disk_errors(path):
                try:
                    path.mkdir()
                except FileExistsError:
                    if not is_finished(path) and path.is_dir():
                        say(f"{path} holds an unfinished evaluation; to go on with it: the same "
                            f"command with --resume --name {path.name}")
                    continue
            return path
    raise AssertionError("unreachable")


@contextmanager
def working_in(folder: Path, place: Place) -> Iterator[None]:
    """Hold the folder for this process; a folder in which nothing came to be is removed again.

    Raises:
        CheckpointError: another process works there.
    """
    try:
        with _naming_output(), lock(folder):
            if place.overwrite:
                for name in (RESULT, SETTINGS, SAMPLES, PICTURE):
                    with disk_errors(folder / name):
                        (folder / name).unlink(missing_ok=True)
            try:
                yield
            finally:
                if not is_finished(folder) and _is_empty(folder / SAMPLES):
                    for name in (SAMPLES, SETTINGS):
                        (folder / name).unlink(missing_ok=True)
    finally:
        names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else {""}
        if names <= {LOCK}:
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()
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


def _is_empty(path: Path) -> bool:
    return not path.is_file() or path.stat().st_size == 0


def differences(folder: Path, identity: dict[str, Any]) -> list[str]:
    """Lines on what differs between the settings a folder was begun with and ``identity``.

    Models are compared where both name their weights: those that weren't reached yet have none.
    """
    if _is_empty(folder / SAMPLES) and not is_finished(folder):
        return []
    old = read_json(folder / SETTINGS)
    if old is None:
        return [f"{folder / SETTINGS} is missing or damaged"]
    before, now = _flat(old.get("identity", {})), _flat(identity)
    names = list(dict.fromkeys([*before, *now]))
    return [f"{name}: {_shown(before.get(name))} -> {_shown(now.get(name))}" for name in names
            if before.get(name) != now.get(name)
            and not (name.partition(".")[0] == "models" and not (name in before and name in now))]


def check_same(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse to go on with samples of something else.

    Raises:
        CheckpointError: names what differs.
    """
    lines = differences(folder, identity)
    if lines:
        more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise CheckpointError(
            "\n".join([f"{folder} was begun under other settings:",
                       *(f"  {line}" for line in lines[:8]), *more]), where=str(folder / SETTINGS),
            fix="give the settings it was begun with; or start again: --overwrite in place of "
                "--resume; or choose another --name")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for part, inner in value.items()
                for key, leaf in _flat(inner, f"{name}.{part}" if name else str(part)).items()}
    return {name: value}


def _shown(value: Any) -> str:
    return cut("none" if value is None else value if isinstance(value, str)
               else json.dumps(value), 80)


def take_up(folder: Path, sizes: Mapping[str, int], chunk: int) -> dict[str, list[Row]]:
    """Rows there already, by model; what follows the last whole chunk is cut off the file.

    Args:
        sizes: how many samples each model has, in the order they are evaluated in.
        chunk: samples of one generate call.

    Raises:
        DiskError: the file can't be cut.
    """
    found: dict[str, list[Row]] = {role: [] for role in sizes}
    path = folder / SAMPLES
    if not path.is_file():
        return found
    end = place = 0
    pending: list[Row] = []
    expected = [(role, number) for role, total in sizes.items() for number in range(total)]
    with disk_errors(path), path.open("rb") as lines:
        for line, (role, number) in zip(lines, expected, strict=False):
            row = read_row(line) if line.endswith(b"\n") else None
            if row is None or (row.get("model"), row.get("number")) != (role, number):
                break
            place += len(line)
            pending.append(row)
            if (number + 1) % chunk == 0 or number + 1 == sizes[role]:
                found[role] += pending
                pending, end = [], place
    with disk_errors(path):
        if path.stat().st_size > end:
            os.truncate(path, end)
    return found
