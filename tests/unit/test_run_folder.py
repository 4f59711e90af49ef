import json
import os
import signal
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoint_samples import save, start_python, tree, write_files

from ppocli.engine import atomic, faults, run_folder
from ppocli.engine.publishing import publish_folder, repair_published
from ppocli.engine.run_folder import (
    RunFolder,
    live_owner,
    lock,
    lock_beside,
    probe_writable,
    reserved,
    write_summary,
)
from ppocli.errors import CheckpointError, DiskError

HOLD = """
import sys, time
from pathlib import Path
from ppocli.engine.run_folder import lock
from ppocli.errors import PpocliError
try:
    with lock(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except PpocliError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def test_paths():
    run = RunFolder(Path("runs/x"))
    assert run.metrics == Path("runs/x/metrics.jsonl")
    assert run.checkpoints == Path("runs/x/checkpoints")
    with pytest.raises(AttributeError):
        run.path = Path("y")


# --------------------------------------------------------------------------------- the lock


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


def test_the_same_process_cannot_hold_it_twice(tmp_path: Path):
    with lock(tmp_path):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"), lock(tmp_path):
            pass
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
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


def test_it_is_given_back_after_an_exception(tmp_path: Path):
    with pytest.raises(ValueError, match="x"), lock(tmp_path):
        raise ValueError("x")
    with lock(tmp_path):
        pass


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.mark.parametrize("stale", ["dead pid", "other boot", "recycled pid", "other host",
                                   "garbage", "empty"])
def test_stale_names_are_taken_over(tmp_path: Path, stale: str):
    owner = asdict(run_folder._myself())
    if stale == "dead pid":
        owner |= {"pid": dead_pid()}
    elif stale == "other boot":
        owner |= {"boot": "another"}
    elif stale == "recycled pid":
        owner |= {"started": owner["started"] - 1}
    elif stale == "other host":
        owner |= {"host": "elsewhere", "boot": "another"}
    text = {"garbage": "{half", "empty": ""}.get(stale, json.dumps(owner))
    (tmp_path / ".lock").write_text(text)
    with lock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text()) == asdict(run_folder._myself())


def test_a_live_name_counts_without_a_kernel_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a file system that has no locks."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        owner = {"pid": sleeper.pid, "host": socket.gethostname(), "boot": run_folder._boot_id(),
                 "started": run_folder._start_ticks(sleeper.pid)}
        (tmp_path / ".lock").write_text(json.dumps(owner))
        with pytest.raises(CheckpointError, match=f"process {sleeper.pid} on"), lock(tmp_path):
            pass
    finally:
        sleeper.kill()
        sleeper.wait()
    with lock(tmp_path):
        pass


def test_a_forked_child_that_outlives_its_parent_does_not_hold_it(tmp_path: Path):
    code = """
import os, sys, time
from pathlib import Path
from ppocli.engine.run_folder import lock
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


@pytest.mark.parametrize("before", ["", "stale"])
def test_of_processes_that_race_exactly_one_wins(tmp_path: Path, before: str):
    if before:
        owner = asdict(run_folder._myself()) | {"pid": dead_pid()}
        (tmp_path / ".lock").write_text(json.dumps(owner))
    racers = [start_python(HOLD, tmp_path, 60) for _ in range(5)]
    said = {}
    winners = []
    for racer in racers:
        line = racer.stdout.readline()
        if line == "held\n":
            winners.append(racer)
        else:
            said[racer.pid] = line
    for racer in winners:
        racer.kill()
    for racer in racers:
        racer.communicate()
    assert len(winners) == 1
    assert len(said) == 4
    assert all(f"in use by process {winners[0].pid} on" in line for line in said.values()), said


def test_a_folder_that_is_replaced_is_held_from_beside(tmp_path: Path):
    target = tmp_path / "run" / "model"
    code = HOLD.replace("import lock\n", "import lock_beside as lock\n").replace(
        "sys.argv[1])", "sys.argv[1]), 'go away'")
    holder = start_python(code, target, 60)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError) as refused, lock_beside(target, "go away"):
        pass
    assert f"{target} is in use by process {holder.pid} on" in str(refused.value)
    assert str(refused.value).endswith("or go away")
    holder.kill()
    holder.communicate()
    with lock_beside(target, ""), pytest.raises(CheckpointError), lock_beside(target, ""):
        pass  # not even by this process itself
    with lock_beside(target.with_name("other"), ""):
        pass
    assert list(target.parent.iterdir()) == []


TURNS = """
import sys
from pathlib import Path
from ppocli.engine.run_folder import lock_beside
from ppocli.errors import CheckpointError
target, turns = Path(sys.argv[1]), 0
print("ready", flush=True)
while turns < 200:
    try:
        with lock_beside(target, ""):
            target.mkdir()  # fails if another is here
            target.rmdir()
            turns += 1
    except CheckpointError:
        pass
"""


def test_deleting_the_file_beside_lets_no_two_in(tmp_path: Path):
    racers = [start_python(TURNS, tmp_path / "model") for _ in range(3)]
    said = [racer.communicate(timeout=60)[1] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], said
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------- folders that appear whole


def write_model(text: str):
    def write(staging: Path) -> None:
        (staging / "sub").mkdir()
        (staging / "config.json").write_text(text)
        (staging / "sub" / "a.txt").write_text(text)
    return write


def test_publish_and_replace(tmp_path: Path):
    target = tmp_path / "run" / "model"
    publish_folder(write_model("one"), target)
    assert tree(target) == {"config.json": b"one", "sub/a.txt": b"one"}
    publish_folder(write_model("two"), target)
    assert tree(target) == {"config.json": b"two", "sub/a.txt": b"two"}
    assert [p.name for p in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_can_be_read_by_whom_the_umask_lets(tmp_path: Path, mask: int, mode: int):
    """Safetensors makes its files private."""
    old = os.umask(mask)
    try:
        publish_folder(write_files(1), tmp_path / "model")
        saved = save(tmp_path / "checkpoints", 1)
    finally:
        os.umask(old)
    files = [path for folder in (tmp_path / "model", saved) for path in folder.rglob("*")
             if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_what_a_neighbour_is_writing_is_left_alone(tmp_path: Path):
    (tmp_path / ".staging-model-2-0123abcd").mkdir()
    (tmp_path / ".staging-model-0123abcd").mkdir()
    assert len(repair_published(tmp_path / "model")) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".staging-model-2-0123abcd"]


def test_a_failed_publish_keeps_the_old_folder(tmp_path: Path):
    target = tmp_path / "model"
    publish_folder(write_model("one"), target)

    def bug(staging: Path) -> None:
        (staging / "config.json").write_text("two")
        raise ValueError("bug")

    def full(staging: Path) -> None:
        raise OSError(28, "No space left on device")

    def link(staging: Path) -> None:
        (staging / "l").symlink_to("/etc/hostname")

    with pytest.raises(ValueError, match="bug"):
        publish_folder(bug, target)
    with pytest.raises(DiskError, match=r"Disk full writing .*model \(.* free\)"):
        publish_folder(full, target)
    with pytest.raises(ValueError, match="l is a link"):
        publish_folder(link, target)
    assert tree(target) == {"config.json": b"one", "sub/a.txt": b"one"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_refuses_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "model"
    publish_folder(write_model("one"), target)
    plan = faults.parse("export.between_renames:enospc")
    monkeypatch.setattr(faults, "point", faults.armed(plan))
    with pytest.raises(DiskError, match="Disk full"):
        publish_folder(write_model("two"), target)
    assert tree(target)["config.json"] == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_publishing_over_a_link_leaves_its_target_alone(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    (tmp_path / "model").symlink_to(tmp_path / "mine")
    publish_folder(write_model("one"), tmp_path / "model")
    assert not (tmp_path / "model").is_symlink()
    assert tree(tmp_path / "mine") == {"x": b"x"}


PUBLISH = """
import sys
from pathlib import Path
from ppocli.engine.publishing import publish_folder
def write(staging):
    (staging / "config.json").write_text("two")
publish_folder(write, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("point", ["export.before_rename", "export.between_renames"])
def test_kill9_while_publishing(tmp_path: Path, point: str):
    target = tmp_path / "model"
    publish_folder(write_model("one"), target)
    child = start_python(PUBLISH, target, faults=f"{point}:kill9")
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    [said] = repair_published(target)
    assert said.startswith("skipped .staging-model-")
    assert tree(target) == {"config.json": b"one", "sub/a.txt": b"one"}
    publish_folder(write_model("three"), target)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# ------------------------------------------------------------------------------- single files


def test_write_summary_has_no_nan(tmp_path: Path):
    run = RunFolder(tmp_path)
    write_summary(run, {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (1, "x")}})
    written = json.loads(run.summary.read_text())
    assert written == {"a": None, "b": [1.5, None], "c": {"d": [1, "x"]}}


def test_write_atomic_keeps_the_umask_and_replaces(tmp_path: Path):
    path = tmp_path / "ä b.json"
    old = os.umask(0o027)
    try:
        atomic.write_atomic(path, "é")
    finally:
        os.umask(old)
    assert path.read_bytes() == "é".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    atomic.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    with pytest.raises(ValueError, match="JSON"):
        atomic.write_json_atomic(path, {"x": float("inf")})
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_exception_while_writing_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "x"
    path.write_text("old")

    def half() -> None:
        with atomic.open_atomic(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert tree(tmp_path) == {"x": b"old"}


def test_a_file_size_limit_is_a_disk_error(tmp_path: Path):
    code = """
import resource, sys
from pathlib import Path
from ppocli.engine.atomic import write_atomic
from ppocli.errors import DiskError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomic(Path(sys.argv[1]), b"x" * 5000)
except DiskError as error:
    print(error)
"""
    out, err = start_python(code, tmp_path / "x").communicate(timeout=60)
    assert out.startswith(f"File size limit reached writing {tmp_path / 'x'} (needs 5 kB, "), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "ünï cödé 模型", "x" * 200])
def test_probe_accepts_odd_names(tmp_path: Path, name: str):
    probe_writable(tmp_path / name / "deeper")
    assert list((tmp_path / name / "deeper").iterdir()) == []


def test_probe_refuses_files_and_long_paths(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match="is a file"):
            probe_writable(path)
    with pytest.raises(DiskError, match="Path too long"):
        probe_writable(tmp_path / ("x" * 300))


@pytest.mark.parametrize("folder", ["/proc/ppocli-run", "/sys/ppocli-run"])
def test_probe_refuses_what_cannot_be_written(folder: str):
    with pytest.raises(DiskError, match=r"can't be written|^(Read-only disk|No permission)") as no:
        probe_writable(Path(folder))
    assert folder in str(no.value)
    assert no.value.exit_code == 6
