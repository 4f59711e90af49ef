"""Folders that appear whole, or not at all."""

import os
import signal
from pathlib import Path

import pytest
from checkpoint_samples import save, start_python, tree, write_files

from ppocli.errors import DiskError
from ppocli.runs.atomic import publish_folder, repair_published


def write_model(text: str):
    def write(staging: Path) -> None:
        (staging / "sub").mkdir()
        (staging / "config.json").write_text(text)
        (staging / "sub" / "a.txt").write_text(text)
    return write


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
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


def test_a_failed_publish_keeps_the_old_folder(tmp_path: Path):
    target = tmp_path / "model"
    publish_folder(write_model("one"), target)

    def bug(staging: Path) -> None:
        (staging / "config.json").write_text("two")
        raise ValueError("bug")

    def full(staging: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="bug"):
        publish_folder(bug, target)
    with pytest.raises(DiskError, match=r"Disk full writing .*model \(.* free\)"):
        publish_folder(full, target)
    assert tree(target) == {"config.json": b"one", "sub/a.txt": b"one"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


PUBLISH = """
import sys
from pathlib import Path
from ppocli.runs.atomic import publish_folder
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
