"""Single files that are replaced whole, and folders that can't be written."""

import os
from pathlib import Path

import pytest
from checkpoint_samples import start_python, tree

from ppocli.errors import DiskError
from ppocli.storage import atomic
from ppocli.storage.run_folder import finite_or_null, probe_writable


def test_there_is_no_nan_in_json():
    found = finite_or_null({"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (1, "x")}})
    assert found == {"a": None, "b": [1.5, None], "c": {"d": [1, "x"]}}


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
from ppocli.storage.atomic import write_atomic
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
