"""A simulated power cut between any two changes of the disk: only what was synced is sure."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from checkpoint_samples import RUN, save, write_files

from ppocli.storage.checkpoints import find_latest, save_checkpoint
from ppocli.storage.retention import clean_staging, prune, supersede, update_pointers


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
        for kind, pick in (("synced", only_synced), ("names", all_names), ("mix", mixed(draw)),
                           ("mix", mixed(draw))):
            image = fast_folder / f"image-{len(images)}"
            disk.crash_image(image, pick)
            clean_staging(image)  # as a run does at its start
            search = find_latest(image, run_id=RUN)
            images.append((returned, kind, search.found.step if search.found else 0))
            shutil.rmtree(image)
        busy = False

    record_crashes(monkeypatch, disk, on_event)
    for step in (1, 2, 3, 4):
        save(folder, step, floats=20)
        returned = step
        update_pointers(folder, latest=step, best=None)
        prune(folder, 2, None)
    (folder / "step-000004" / "state.json").write_bytes(b"")
    returned = 3
    assert supersede(folder, 3) == [4]
    save(folder, 4, floats=20)
    returned = 4
    save_checkpoint(folder, 4, run_id=RUN, write=write_files(4, 20), state={"evaluated": True},
                    config_digest="", versions={})
    prune(folder, 1, None)
    monkeypatch.undo()
    disk.close()
    assert len(images) > 400
    lost = [image for image in images if image[2] < image[0]]
    assert lost == [], "(save that had returned, kind of image, step found)"
    assert {step for _, _, step in images} == {0, 1, 2, 3, 4}
