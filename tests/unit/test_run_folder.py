"""The lock of a run's folder."""

import json
import os
import signal
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoint_samples import start_python

from ppocli.errors import CheckpointError
from ppocli.runs import run_folder
from ppocli.runs.run_folder import live_owner, lock, reserved

HOLD = """
import sys, time
from pathlib import Path
from threading import Event, Thread
from ppocli.runs.run_folder import lock
from ppocli.errors import PpocliError
try:
    with lock(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except PpocliError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def test_a_live_process_is_named_and_its_death_frees_the_folder(tmp_path: Path):
    run = tmp_path / "run"
    holder = start_python(HOLD, run, 60)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError) as refused, lock(run):
        pass
    assert f"in use by process {holder.pid} on {socket.gethostname()}" in str(refused.value)
    assert refused.value.exit_code == 5
    holder.kill()  # not waited for: a zombie is dead too
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with lock(run):
        assert json.loads((run / ".lock").read_text())["pid"] == os.getpid()
    holder.communicate()
    assert (run / ".lock").read_bytes() == b""


def test_the_same_process_cannot_hold_it_twice_and_gives_it_back_after_an_exception(tmp_path: Path):
    with lock(tmp_path):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"), lock(tmp_path):
            pass
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    with pytest.raises(ValueError, match="x"), lock(tmp_path):
        raise ValueError("x")
    with lock(tmp_path):
        pass


def test_a_reserved_folder_waits_for_its_worker_alone(tmp_path: Path):
    with reserved(tmp_path):
        assert live_owner(tmp_path) is not None
        with pytest.raises(CheckpointError, match="is in use by"), lock(tmp_path):
            pass
        with pytest.raises(CheckpointError, match="is in use by"), reserved(tmp_path):
            pass
        with lock(tmp_path, reserved_by=os.getpid()):
            pass
    with reserved(tmp_path):  # whose worker never comes that far
        pass
    assert (tmp_path / ".lock").read_bytes() == b""


DEAD = {"pid": 2**22 + 1}
"""above what Linux gives any process"""


@pytest.mark.parametrize("stale", [
    DEAD, {"boot": "another"}, {"started": 1}, {"host": "elsewhere", "boot": "another"}, "{half",
    ""], ids=["dead pid", "other boot", "recycled pid", "other host", "garbage", "empty"])
def test_stale_names_are_taken_over(tmp_path: Path, stale: dict | str):
    (tmp_path / ".lock").write_text(stale if isinstance(stale, str) else json.dumps(
        asdict(run_folder._myself()) | stale))
    with lock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text()) == asdict(run_folder._myself())


def test_a_live_name_counts_without_a_kernel_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a file system that has no locks."""
    with subprocess.Popen(["sleep", "20"]) as sleeper:
        owner = {"pid": sleeper.pid, "host": socket.gethostname(), "boot": run_folder._boot_id(),
                 "started": run_folder._start_ticks(sleeper.pid)}
        (tmp_path / ".lock").write_text(json.dumps(owner))
        with pytest.raises(CheckpointError, match=f"process {sleeper.pid} on"), lock(tmp_path):
            pass
        sleeper.kill()
    with lock(tmp_path):
        pass


def test_a_forked_child_that_outlives_its_parent_does_not_hold_it(tmp_path: Path):
    code = """
import os, sys, time
from pathlib import Path
from threading import Event, Thread
from ppocli.runs.run_folder import lock
with lock(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""
    parent = start_python(code, tmp_path)
    orphan = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        with lock(tmp_path):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)
        parent.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "stale"])
def test_of_processes_that_race_exactly_one_wins(tmp_path: Path, before: str):
    if before:
        (tmp_path / ".lock").write_text(json.dumps(asdict(run_folder._myself()) | DEAD))
    racers = [start_python(HOLD, tmp_path, 60) for _ in range(5)]
    said = [racer.stdout.readline() for racer in racers]
    for racer in racers:
        racer.kill()
        racer.communicate()
    assert said.count("held\n") == 1
    holder = racers[said.index("held\n")]
    assert sum(f"in use by process {holder.pid} on" in line for line in said) == 4, said
