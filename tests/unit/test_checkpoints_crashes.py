"""Real processes killed while saving, power cuts between any two changes of a simulated disk, and
real disks that run full or can't be written."""

import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from checkpoint_samples import RUN, names, save, start_python, tree

from ppocli.errors import DiskError
from ppocli.runs import atomic
from ppocli.runs.checkpoints import find_latest
from ppocli.runs.retention import clean_staging, prune, update_pointers
from ppocli.runs.run_folder import probe_writable
from ppocli.runs.run_logs import finite_or_null

SAVE_TWO = """
import sys
from pathlib import Path
from checkpoint_samples import save
from ppocli.runs.retention import prune
folder = Path(sys.argv[1])
save(folder, 2)
prune(folder, 1, None)
print("survived")
"""

# save.open is passed once before the files are written and once for each of the four files
POINTS = [("save.open@2", 1), ("save.after_rename", 2), *(
    pytest.param(*point, marks=pytest.mark.slow) for point in (
        ("save.open@1", 1), ("save.open@5", 1), ("save.before_manifest", 1),
        ("save.before_rename", 1), ("prune.before", 2)))]


@pytest.mark.parametrize(("point", "newest"), POINTS)
def test_kill9_at_every_point_of_a_save(tmp_path: Path, point: str, newest: int):
    first = tree(save(tmp_path, 1))
    child = start_python(SAVE_TWO, tmp_path, faults=f"{point}:kill9")
    out, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err
    assert "survived" not in out
    search = find_latest(tmp_path, run_id=RUN)
    assert (search.checkpoint.step, search.skipped) == (newest, ())
    assert tree(tmp_path / "step-000001") == first
    said = clean_staging(tmp_path)
    assert len(said) == (1 if newest == 1 else 0)
    assert all(line.startswith("skipped .staging-step-000002-") for line in said)
    save(tmp_path, 2)  # the resumed run gets there again
    prune(tmp_path, 1, None)
    assert names(tmp_path) == ["step-000002"]


# Power cuts: only what was synced is sure ---------------------------------------------------------

class Disk:
    """What a disk would hold after a power cut: the content a file had when it was last synced and
    the names a folder had when it was last synced. Everything else may be lost or kept.

    Inodes are held open, so that their numbers can't be used again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.descriptors: dict[int, int] = {}
        self.content: dict[int, bytes] = {}  # of files, as of their last fsync
        self.names: dict[int, dict[str, int]] = {}  # of folders, as of their last fsync
        self.now: dict[int, dict[str, int]] = {}  # of folders, as they are
        self.scan()
        self.names = {inode: dict(names) for inode, names in self.now.items()}

    def scan(self) -> None:
        self.now = {}
        for base, folders, files in os.walk(self.root):
            here = self._hold(Path(base))
            self.now[here] = {name: self._hold(Path(base, name)) for name in (*folders, *files)
                              if not Path(base, name).is_symlink()}

    def _hold(self, path: Path) -> int:
        inode = path.lstat().st_ino
        if inode not in self.descriptors:
            self.descriptors[inode] = os.open(path, os.O_RDONLY)
        return inode

    def synced(self, descriptor: int) -> None:
        self.scan()
        inode = os.fstat(descriptor).st_ino
        if inode in self.now:
            self.names[inode] = dict(self.now[inode])
        elif inode in self.descriptors:
            held = self.descriptors[inode]
            self.content[inode] = os.pread(held, os.fstat(held).st_size, 0)

    def crash_image(self, target: Path, pick) -> None:
        """Write what is left to ``target``; ``pick(synced, current)`` chooses a folder's names."""
        target.mkdir(parents=True)
        self._restore(self.root.lstat().st_ino, target, pick)

    def _restore(self, inode: int, target: Path, pick) -> None:
        for name, child in pick(self.names.get(inode, {}), self.now.get(inode, {})).items():
            if child in self.names or child in self.now:
                (target / name).mkdir()
                self._restore(child, target / name, pick)
            else:
                (target / name).write_bytes(self.content.get(child, b""))

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def only_synced(synced: dict, current: dict) -> dict:
    return synced


def all_names(synced: dict, current: dict) -> dict:
    """The file system wrote its metadata in time, but no data that wasn't synced."""
    return current


def mixed(draw: random.Random):
    """Each file or folder is, independently, where it was at the last sync or where it is now: a
    rename is done or not done, but unsynced changes reach the disk in any order."""
    def pick(synced: dict, current: dict) -> dict:
        chosen = {}
        children = {inode: name for name, inode in (*synced.items(), *current.items())}
        for inode in sorted(children, key=children.__getitem__):
            source = synced if draw.random() < 0.5 else current
            chosen |= {name: child for name, child in source.items() if child == inode}
        return chosen
    return pick


def record_crashes(monkeypatch: pytest.MonkeyPatch, disk: Disk, on_event) -> None:
    """Call ``on_event`` before every call that changes the disk's durable state."""
    real = {name: getattr(os, name) for name in
            ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")}

    def wrap(name):
        def call(*arguments, **options):
            on_event()
            result = real[name](*arguments, **options)
            if name == "fsync":
                disk.synced(arguments[0])
            return result
        return call

    for name in real:
        monkeypatch.setattr(os, name, wrap(name))


@pytest.fixture
def fast_folder(tmp_path: Path):
    """In memory where the system has such a place: what is tested is the order of calls."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


def test_a_power_cut_at_any_point_leaves_a_valid_step(fast_folder: Path,
                                                      monkeypatch: pytest.MonkeyPatch):
    folder = fast_folder / "run" / "checkpoints"
    folder.mkdir(parents=True)
    disk = Disk(folder)
    draw = random.Random(0)
    images = []
    returned = 0
    busy = False

    def on_event() -> None:
        nonlocal busy
        if busy:
            return
        busy = True  # what is done here is not the program's doing
        disk.scan()
        for kind, pick in (("synced", only_synced), ("names", all_names), ("mix", mixed(draw))):
            image = fast_folder / f"image-{len(images)}"
            disk.crash_image(image, pick)
            clean_staging(image)  # as a run does at its start
            search = find_latest(image, run_id=RUN)
            images.append((returned, kind, search.checkpoint.step if search.checkpoint else 0))
            shutil.rmtree(image)
        busy = False

    record_crashes(monkeypatch, disk, on_event)
    for step in (1, 2, 3):
        save(folder, step, floats=20)
        returned = step
        update_pointers(folder, latest=step, best=None)
        prune(folder, 2, None)
    (folder / "step-000003" / "state.json").write_bytes(b"")
    returned = 2
    save(folder, 3, floats=20)
    returned = 3
    save(folder, 3, floats=20, state={"evaluated": True})
    prune(folder, 1, None)
    monkeypatch.undo()
    disk.close()
    assert len(images) > 150
    lost = [image for image in images if image[2] < image[0]]
    assert lost == [], "(save that had returned, kind of image, step found)"
    assert {step for _, _, step in images} == {0, 1, 2, 3}


# Full disks ---------------------------------------------------------------------------------------

def test_a_disk_that_stays_full(tmp_path: Path, inject):
    inject("save.open:enospc")
    with pytest.raises(DiskError, match="No earlier step is on the disk"):
        save(tmp_path, 1)
    inject("")
    assert names(tmp_path) == []
    save(tmp_path, 120)
    before = tree(tmp_path)
    inject("save.before_manifest:enospc")
    with pytest.raises(DiskError, match=r"^Disk full writing step 130 \(needs \d+ \w+, "
                                        r"[\d.]+ \w+ free\)\. Kept step 120\.") as stop:
        save(tmp_path, 130)
    assert stop.value.exit_code == 6
    assert "ppocli resume" in stop.value.fix
    assert tree(tmp_path) == before


# Which errors are the disk's ----------------------------------------------------------------------

@pytest.mark.parametrize(("error", "reason"), [
    (OSError(28, "No space left on device"), "Disk full"),
    (OSError(122, "Disk quota exceeded"), "Disk quota exceeded"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
     "Disk full"),
    (RuntimeError("I/O error: No space left on device (os error 28)"), "Disk full"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    (FileNotFoundError(2, "No such file"), None), (ValueError("x"), None)])
def test_disk_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception,
                     reason: str | None):
    assert atomic.disk_reason(error, tmp_path) == reason
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    on_full_disk = None if isinstance(error, ValueError) else reason or "Disk full"
    assert atomic.disk_reason(error, tmp_path) == on_full_disk


# Single files that are replaced whole, and folders that can't be written --------------------------

def test_there_is_no_nan_in_json():
    found = finite_or_null({"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (1, "x")}})
    assert found == {"a": None, "b": [1.5, None], "c": {"d": [1, "x"]}}


def test_what_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for path, said in (
            (Path("/proc/ppocli-run"), r"can't be written|^(Read-only disk|No permission)"),
            (tmp_path / "file", "is a file"), (tmp_path / ("x" * 300), "Path too long")):
        with pytest.raises(DiskError, match=said) as no:
            probe_writable(path)
        assert no.value.exit_code == 6
    probe_writable(tmp_path / "ünï cödé 模型" / "deeper")
