"""Real processes killed while saving, and real disks that run full."""

import random
import signal
import time
from pathlib import Path

import pytest
from checkpoint_samples import RUN, save, start_python, tree

from ppocli.errors import DiskError
from ppocli.storage import atomic, faults
from ppocli.storage.checkpoints import find_latest
from ppocli.storage.retention import clean_staging, prune, supersede

SAVE_TWO = """
import sys
from pathlib import Path
from checkpoint_samples import save
from ppocli.storage import faults
from ppocli.storage.retention import prune
folder = Path(sys.argv[1])
save(folder, 2)
prune(folder, 1, None)
print("survived")
"""

# save.open is passed once before the files are written and once for each of the four files
POINTS = [("save.open@1", 1), ("save.open@2", 1), ("save.open@5", 1), ("save.before_manifest", 1),
          ("save.before_rename", 1), ("save.after_rename", 2), ("prune.before", 2)]


@pytest.mark.parametrize(("point", "newest"), POINTS)
def test_kill9_at_every_point_of_a_save(tmp_path: Path, point: str, newest: int):
    first = tree(save(tmp_path, 1))
    child = start_python(SAVE_TWO, tmp_path, faults=f"{point}:kill9")
    out, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err
    assert "survived" not in out
    search = find_latest(tmp_path, run_id=RUN)
    assert (search.found.step, search.skipped) == (newest, ())
    assert tree(tmp_path / "step-000001") == first
    said = clean_staging(tmp_path)
    assert len(said) == (1 if newest == 1 else 0)
    assert all(line.startswith("skipped .staging-000002-") for line in said)
    save(tmp_path, 2)  # the resumed run gets there again
    prune(tmp_path, 1, None)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


REPLACE = """
import sys
from pathlib import Path
from checkpoint_samples import RUN, write_files
from ppocli.storage.checkpoints import save_checkpoint
save_checkpoint(Path(sys.argv[1]), 1, run_id=RUN, write=write_files(5), state={"new": 1},
                config_digest="", versions={})
"""


@pytest.mark.parametrize(("point", "new"), [
    ("save.before_rename", False), ("save.between_renames", False), ("save.after_rename", True)])
def test_kill9_while_a_step_is_replaced(tmp_path: Path, point: str, new: bool):
    save(tmp_path, 1)
    child = start_python(REPLACE, tmp_path, faults=f"{point}:kill9")
    _, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err
    clean_staging(tmp_path)
    found = find_latest(tmp_path, run_id=RUN).found
    assert (found.state == {"new": 1}) == new
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


SAVE_ON = """
import sys
from pathlib import Path
from checkpoint_samples import save
from ppocli.storage.retention import clean_staging, prune, update_pointers
folder, first = Path(sys.argv[1]), int(sys.argv[2])
clean_staging(folder)
for step in range(first, 100000):
    save(folder, step, floats=200000)
    update_pointers(folder, latest=step, best=None)
    prune(folder, 2, None)
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow)
                                          for seed in range(2, 27))])
def test_kill9_at_a_random_moment(tmp_path: Path, seed: int):
    folder = tmp_path / "checkpoints"
    draw = random.Random(seed)
    last_said = 0
    for _ in range(3):
        child = start_python(SAVE_ON, folder, last_said + 1)
        first = int(child.stdout.readline())  # it is up and saving
        time.sleep(draw.uniform(0, 0.25))
        child.kill()
        out, _ = child.communicate(timeout=60)
        steps = [first, *map(int, out.split("\n")[:-1])]
        search = find_latest(folder, run_id=RUN)
        assert search.skipped == (), f"seed {seed}"
        assert search.found.step - steps[-1] in (0, 1), f"seed {seed}: a save that returned is lost"
        expected = folder.parent / f"expected-{search.found.step}"
        assert tree(search.found.path) == tree(save(expected, search.found.step, floats=200000))
        assert len([p for p in folder.iterdir() if p.name.startswith("step-")]) <= 4
        last_said = search.found.step


# ---------------------------------------------------------------- full disks


def test_one_full_disk_is_retried_after_making_room(tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    supersede(tmp_path, 2)
    monkeypatch.setattr(faults, "point", faults.Point(faults.parse("save.open@2:enospc")))
    save(tmp_path, 3)
    assert find_latest(tmp_path, run_id=RUN).found.step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002",
                                                          "step-000003"]


def test_a_disk_that_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(faults, "point", faults.Point(faults.parse("save.open:enospc")))
        with pytest.raises(DiskError, match="No earlier step is on the disk"):
            save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path, 120)
    before = tree(tmp_path)
    monkeypatch.setattr(faults, "point", faults.Point(faults.parse("save.before_manifest:enospc")))
    with pytest.raises(DiskError, match=r"^Disk full writing step 130 \(needs \d+ \w+, "
                                        r"[\d.]+ \w+ free\)\. Kept step 120\.") as stop:
        save(tmp_path, 130)
    assert stop.value.exit_code == 6
    assert "ppocli resume" in stop.value.fix
    assert tree(tmp_path) == before


LIMITED = """
import resource, sys
from pathlib import Path
from checkpoint_samples import RUN, write_files
from ppocli.storage.checkpoints import save_checkpoint
from ppocli.errors import DiskError
if sys.argv[2] == "torch":
    import torch
    def write(staging):
        torch.save({"w": torch.zeros(200000)}, staging / "w.weights")
else:
    write = write_files(2, floats=200000)
resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
try:
    save_checkpoint(Path(sys.argv[1]), 2, run_id=RUN, write=write, state={}, config_digest="",
                    versions={})
except DiskError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.long
@pytest.mark.parametrize(("library", "said"), [("safetensors", "File size limit reached writing"),
                                               ("torch", "Disk full writing step 2")])
def test_a_file_size_limit(tmp_path: Path, library: str, said: str):
    save(tmp_path, 1)
    before = tree(tmp_path)
    child = start_python(LIMITED, tmp_path, library)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 6, err
    assert said in out
    assert "Kept step 1." in out
    assert tree(tmp_path) == before


# ----------------------------------------------------------------- which errors are the disk's


@pytest.mark.parametrize(("error", "reason"), [
    (OSError(28, "No space left on device"), "Disk full"),
    (OSError(122, "Disk quota exceeded"), "Disk quota exceeded"),
    (OSError(30, "Read-only file system"), "Read-only disk"),
    (OSError(13, "Permission denied"), "No permission"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
     "Disk full"),
    (RuntimeError("I/O error: No space left on device (os error 28)"), "Disk full"),
    (RuntimeError("I/O error: File too large (os error 27)"), "File size limit reached"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    (FileNotFoundError(2, "No such file"), None), (ValueError("x"), None)])
def test_disk_reason(tmp_path: Path, error: Exception, reason: str | None):
    assert atomic.disk_reason(error, tmp_path) == reason


def test_an_unexplained_io_error_on_a_full_disk_is_the_disks(tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    assert atomic.disk_reason(RuntimeError("write failed"), tmp_path) == "Disk full"
    assert atomic.disk_reason(ValueError("a bug"), tmp_path) is None
