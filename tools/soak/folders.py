"""Damaged and hostile run folders: every command that opens one ends with a message and an exit
code of its own, soon, and touches nothing else; a resume that goes through is the straight run."""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import runs
import yaml

from tools.soak.cases import ROOT  # first: it makes the tests' helpers importable

SECRET = "planted-secret-of-the-environment"
NESTED = "[" * 200_000
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in pairwise("abcdefghi"))
LEAVES: tuple[Any, ...] = (
    float("inf"), float("nan"), -1, 0, 1e308, 10**400, "", "x", None, True, [], {}, [[]], {"a": {}},
    "\x1b]0;owned\x07\x1b[2J", "../../outside", "/etc/passwd", "${oc.env:PPOCLI_SOAK_SECRET}",
    "numpy:load", "os:system", "9" * 5000)
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("report", "RUN", "-o", "page.html"), ("report", "RUN", "--json"), ("runs", "list", "runs"),
    ("compare", "RUN", "runs/good"), ("watch", "RUN", "--from-start", "--no-progress"),
    ("plot", "RUN", "--json"), ("export", "RUN", "-o", "exported"), ("export", "RUN", "--best"),
    ("eval", "RUN", "--limit", "2"),
    ("generate", "RUN", "-p", "the film", "generation.max_new_tokens=3"),
    ("resume", "RUN"), ("resume", "RUN"), ("train", "resume=RUN", "ppo.num_steps=4"))
CODES = {0, *range(2, 12)}
"""how a command may end that was given a damaged run"""


@cache
def originals() -> Path:
    """A finished run, and the same as it was after its second step."""
    folder = ROOT / "build/soak/folders"
    shutil.rmtree(folder, ignore_errors=True)
    runs.make_world(folder)
    runs.run("train", *runs.words("run_name=good"), cwd=folder, code=0)
    return folder


def one_folder(draw: random.Random, folder: Path, outcomes: Counter[str]) -> None:
    """A run that was damaged in up to three places, and a command that opens it.

    Raises:
        AssertionError: a traceback, a hang, a changed file outside of the run, a secret that was
            told, or a resumed run that differs without a word.
    """
    shutil.copytree(originals(), folder, symlinks=True, dirs_exist_ok=True)
    run = folder / "runs/hurt"
    command = list(draw.choice(COMMANDS))
    run_on = command[0] in ("resume", "train")
    if run_on:
        runs.copied(folder / "runs/good", run, draw.choice((1, 2, 3)))
    else:
        runs.whole_copy(folder / "runs/good", run)
    outside = folder / "outside"
    outside.mkdir()
    (outside / "kept").write_text("of somebody else")
    done = []
    for _ in range(draw.randint(1, 3)):
        files = sorted(path for path in run.rglob("*") if path.is_file())
        damage = draw.choice(DAMAGES)
        path = draw.choice(files)
        damage(draw, path, outside)
        done.append(f"{damage.__name__[1:]} of {path.relative_to(run)}")
    before = _outside_of(folder, run)
    words = [word.replace("RUN", "runs/hurt") for word in command]
    told = f"ppocli {' '.join(words)} after {', '.join(done)}"
    try:
        ended = runs.run(*words, cwd=folder, PPOCLI_SOAK_SECRET=SECRET)
        _check(ended, folder, run, before)
        if run_on and ended.code == 0 and "WARNING" not in ended.err and "changed" not in ended.err:
            _same_weights(folder / "runs/good", run)
            outcomes["resumed to the straight run's weights"] += 1
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__} {error}") from error
    outcomes[f"exit {ended.code}"] += 1


def _check(ended: runs.Ended, folder: Path, run: Path, before: dict[str, bytes]) -> None:
    assert ended.code in CODES, (ended.code, ended.said[-1500:])
    assert "Traceback" not in ended.said, ended.said[-1500:]
    assert "\x1b" not in ended.said, "a raw escape in what was printed"
    assert ended.code == 0 or ended.err.strip(), "an error without a word"
    after = _outside_of(folder, run)
    ours = {name for name in after if name.startswith(("page.", "exported"))}
    changed = {name for name in before.keys() | after.keys()
               if before.get(name) != after.get(name)} - ours
    assert not changed, f"changed outside of the run: {sorted(changed)}"
    written = [folder / name for name in ours] + [
        path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in written:
        assert SECRET.encode() not in path.read_bytes(), f"the secret stands in {path}"
    assert SECRET not in ended.said


def _same_weights(expected: Path, run: Path) -> None:
    name = "model/model.safetensors"
    assert (run / name).read_bytes() == (expected / name).read_bytes(), "other weights, not a word"


def _outside_of(folder: Path, run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink() and run not in path.parents
            and "__pycache__" not in path.parts}


# what may have happened to a file ---------------------------------------------------------------

def _cut(draw: random.Random, path: Path, outside: Path) -> None:
    path.write_bytes(path.read_bytes()[:draw.randrange(max(1, path.stat().st_size))])


def _flip(draw: random.Random, path: Path, outside: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _loss(draw: random.Random, path: Path, outside: Path) -> None:
    path.unlink()


def _emptying(draw: random.Random, path: Path, outside: Path) -> None:
    path.write_bytes(b"")


def _folder_in_place(draw: random.Random, path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_in_place(draw: random.Random, path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(draw.choice((outside / "kept", outside, outside / "new", Path("/dev/zero"))))


def _pipe_in_place(draw: random.Random, path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _nesting(draw: random.Random, path: Path, outside: Path) -> None:
    path.write_text(draw.choice((NESTED, BOMB, '{"step": ' + NESTED)))


def _lines(draw: random.Random, path: Path, outside: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        at = draw.randrange(len(lines))
        lines[at:at + 1] = draw.choice((
            [], [lines[at]] * 2, [b"\xff\xfe{]\n"], [b"null\n", b"3\n"]))
    path.write_bytes(b"".join(lines))


def _exchange(draw: random.Random, path: Path, outside: Path) -> None:
    run = next(parent for parent in path.parents if parent.parent.name == "runs")
    other = draw.choice(sorted(one for one in run.rglob("*") if one.is_file()))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _value(draw: random.Random, path: Path, outside: Path) -> None:
    """Another value somewhere in JSON, JSON lines or YAML."""
    try:
        if path.suffix == ".yaml":
            path.write_text(yaml.safe_dump(_altered(draw, yaml.safe_load(path.read_text()))))
        elif path.suffix == ".jsonl":
            rows = path.read_text().splitlines()
            at = draw.randrange(len(rows))
            rows[at] = json.dumps(_altered(draw, json.loads(rows[at])))
            path.write_text("\n".join(rows) + "\n")
        else:
            path.write_text(json.dumps(_altered(draw, json.loads(path.read_text()))))
    except (ValueError, yaml.YAMLError, RecursionError):
        _flip(draw, path, outside)


def _altered(draw: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.95:
        name = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: _altered(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], _altered(draw, value[at]), *value[at + 1:]]
    return draw.choice(LEAVES)


DAMAGES: tuple[Callable[[random.Random, Path, Path], None], ...] = (
    _cut, _flip, _loss, _emptying, _folder_in_place, _link_in_place, _pipe_in_place, _nesting,
    _lines, _exchange, _value, _value, _value, _value)
