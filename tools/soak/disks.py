"""Disks that are too small, or that somebody else fills meanwhile: exit code 6 and the step that is
kept, or a finished run; with room again, the same command comes to the straight run."""

import random
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import helpers
import runs

from tools.soak.cases import ROOT  # first: it makes the tests' helpers importable

KINDS: tuple[tuple[str, ...], ...] = (
    (), ("checkpoint.keep_last=1",), ("model.peft={type:lora,r:4}",), ("checkpoint.keep_last=2",))
SCRIPT = """\
mount -t tmpfs -o size={size}k tmpfs runs || exit 77
{filler}
{python} -m ppocli train {words}
code=$?
wait
rm -f runs/of-somebody-else
cp -a runs kept
exit $code
"""
FILLER = "(sleep {:.2f}; cat /dev/zero > runs/of-somebody-else) > /dev/null 2>&1 &"


@cache
def straight(kind: tuple[str, ...]) -> Path:
    """The run of a kind with room for all it writes."""
    folder = ROOT / f"build/soak/disks-{KINDS.index(kind)}"
    shutil.rmtree(folder, ignore_errors=True)
    runs.make_world(folder)
    runs.run("train", *runs.words("run_name=r", *kind, stateful=True), cwd=folder, code=0)
    return folder / "runs/r"


def one_disk(draw: random.Random, folder: Path, outcomes: Counter[str]) -> None:
    """A run on a disk of some hundred kilobytes, or on one that fills at some moment.

    Raises:
        AssertionError: another end than 0 or 6, or not the straight run afterwards.
    """
    kind = draw.choice(KINDS)
    expected = straight(kind)
    for name in ("lm", "rewards.py", "prompts.jsonl"):
        (folder / name).symlink_to(expected.parents[1] / name)
    (folder / "runs").mkdir()
    small = draw.random() < 0.5
    words = runs.words("run_name=r", *kind, stateful=True)
    script = SCRIPT.format(size=draw.randrange(20, 2500) if small else 50_000,
                           filler="" if small else FILLER.format(draw.uniform(1, 9)),
                           python=sys.executable,
                           words=" ".join(f"'{word}'" for word in words))
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], cwd=folder, text=True,
                          env=helpers.environment(), capture_output=True, timeout=240, check=False)
    assert done.returncode in (0, 6), (done.returncode, done.stderr[-1500:])
    assert "Traceback" not in done.stderr, done.stderr[-1500:]
    assert done.returncode == 0 or "isk full" in done.stderr, done.stderr[-1500:]
    outcomes[f"exit {done.returncode}"] += 1
    (folder / "runs").rmdir()
    (folder / "kept").rename(folder / "runs")
    runs.run("train", *words, "resume=auto", cwd=folder, code=0)
    runs.assert_equal_runs(expected, folder / "runs/r")
    outcomes["went on to the straight run"] += 1
