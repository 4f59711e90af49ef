"""Whether the tests notice what they are there to notice: faults put into the code by hand, one at
a time, each with the tests that must fail for it.

``python -m tools.mutants`` runs them all, ``python -m tools.mutants early_stop`` only those
named. The code is copied first; the checkout is never touched. ``tests/unit/
test_mutants.py`` keeps the list true to the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.mutant_list import Mutant
from tools.mutants_of_rooms import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("ppocli", "tests", "tools", "conf", "recipes", "pyproject.toml")
SECONDS = 300
"""that the tests of one mutant may take"""
PASSED, FAILED = 0, 1
"""exit codes of pytest; all others mean that tests could not be run"""


def mutated_text(mutant: Mutant, root: Path = ROOT) -> str:
    """The whole file with the fault in it.

    Raises:
        ValueError: the snippet does not stand in the file exactly once.
    """
    text = (root / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.original)
    if count != 1:
        raise ValueError(f"{mutant.name}: found {count} times in {mutant.file}, not once: "
                         f"{mutant.original!r}")
    return text.replace(mutant.original, mutant.mutated)


def copy_checkout(target: Path) -> None:
    """What tests need, without caches."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target / name)


def run_tests(folder: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Pytest's exit code in a copy, None where it took too long, and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
                   "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider",
               *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"longer than {seconds:.0f} s"
    return done.returncode, done.stdout


def verdict_on(mutant: Mutant, folder: Path) -> str:
    """``killed``, ``SURVIVED`` or why neither can be said; the copy is as before afterwards."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutated_text(mutant, folder), encoding="utf-8")
    try:
        code, said = run_tests(folder, mutant.tests, SECONDS)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == FAILED:
        return "killed"
    return "SURVIVED" if code == PASSED else f"NOT RUN: {said.strip().splitlines()[-1]}"


def say(text: str) -> None:
    """A line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Run the mutants that are asked for; 1 if one is not killed."""
    parser = argparse.ArgumentParser(description="Put faults into a copy of the code, one at a "
                                     "time, and see that the tests named for them fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    asked = parser.parse_args(words).names
    unknown = sorted(set(asked) - {mutant.name for mutant in MUTANTS})
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = [mutant for mutant in MUTANTS if not asked or mutant.name in asked]
    with tempfile.TemporaryDirectory(prefix="ppocli-mutants-") as name:
        folder = Path(name)
        copy_checkout(folder)
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        code, said = run_tests(folder, tests, SECONDS * 2)
        if code != PASSED:  # a test that fails anyway would kill everything
            say(f"the tests fail on the code as it is:\n{said}")
            return 1
        left = 0
        for mutant in chosen:
            begun = time.monotonic()
            verdict = verdict_on(mutant, folder)
            left += verdict != "killed"
            say(f"{mutant.name:30} {mutant.file:36} {verdict} ({time.monotonic() - begun:.0f} s)")
    say(f"{len(chosen) - left} of {len(chosen)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
