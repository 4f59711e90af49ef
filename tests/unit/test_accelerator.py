"""The engine on a simulated accelerator, in processes of its own (``tests/accelerator``)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "accelerator"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "which"), [(name, "not slow") for name in FILES] + [
    pytest.param("test_on_device.py", "slow", marks=pytest.mark.slow)])
def test_what_runs_on_a_simulated_accelerator(name: str, which: str):
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider",
         "-m", which, FOLDER / name],
        cwd=FOLDER.parents[1], env={**os.environ, "PPOCLI_SIMULATED": "1"}, text=True,
        capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
