"""The lock of a run's folder."""

import json
import os
import socket
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
    DEAD, {"boot": "another"}, {"started": 1}, "{half"],
    ids=["dead pid", "other boot", "recycled pid", "garbage"])
def test_stale_names_are_taken_over(tmp_path: Path, stale: dict | str):
    (tmp_path / ".lock").write_text(stale if isinstance(stale, str) else json.dumps(
        asdict(run_folder._myself()) | stale))
    with lock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text()) == asdict(run_folder._myself())


