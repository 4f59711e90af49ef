"""What ``make`` decides before and after pip: which Python, what is still to be installed.

The installation itself takes minutes and a network, so a small program stands for Python here: it
makes a ``.venv`` whose pip notes its words and fails when it is told to.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """\
#!/bin/sh
case "$*" in
  "-c import sys"*) exit ${UNFIT:-0} ;;
  "-c import venv"*) exit ${NO_VENV:-0} ;;
  --version) echo Python 3.13.0 ;;
  "-m venv "*) mkdir -p $3/bin && cp "$0" $3/bin/python && touch $3/bin/pip && chmod +x $3/bin/pip
               echo venv >> calls ;;
  "-m pip install "*) echo "$*" >> calls; echo chatter; exit ${PIP_FAILS:-0} ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout's files for the set-up, with the stand-in for Python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(STAND_IN, encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(folder: Path, target: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", "PYTHON=./python", target], cwd=folder, text=True, check=False,
                          capture_output=True, timeout=30, env={**inherited, **env})


def calls(folder: Path) -> list[str]:
    """What was asked of venv and pip since the last look."""
    log = folder / "calls"
    found = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def test_tests_see_nothing_of_the_checkout_or_the_home():
    assert not os.listdir()
    assert Path.home().parent == Path(os.environ["XDG_CACHE_HOME"])
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert ci.index("make quickstart") < ci.index("make test"), "beside a finished run"


def test_set_up_is_done_once_and_a_changed_pin_goes_into_the_same_environment(folder):
    done = make(folder, "setup-dev")
    assert done.returncode == 0, done.stderr
    assert "chatter" not in done.stdout
    venv, pip = calls(folder)
    assert venv == "venv"
    assert pip.endswith("-c constraints.txt -e .[dev]")
    assert make(folder, "setup-dev").returncode == 0
    assert calls(folder) == []
    stamp = folder / ".venv/.installed-dev"
    later = stamp.stat().st_mtime + 10
    os.utime(folder / "constraints.txt", (later, later))
    assert make(folder, "setup-dev").returncode == 0
    assert [call.partition(" install")[0] for call in calls(folder)] == ["-m pip"]


def test_an_interrupted_set_up_is_made_anew(folder):
    assert make(folder, "setup").returncode == 0
    assert make(folder, "setup-dev", PIP_FAILS="1").returncode == 2
    calls(folder)
    assert make(folder, "setup").returncode == 0
    venv, pip = calls(folder)
    assert venv == "venv"
    assert pip.endswith("-c constraints.txt -e .")


def test_a_wrong_python_is_named_and_nothing_is_made(folder):
    done = make(folder, "setup", UNFIT="1")
    assert done.returncode == 2
    assert "ppocli needs Python 3.11 or 3.12, but ./python is Python 3.13.0" in done.stderr
    assert "make PYTHON=python3.12" in done.stderr
    assert not (folder / ".venv").exists()
