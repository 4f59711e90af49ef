import json
import os
from pathlib import Path

import pytest
from checkpoint_samples import start_python

from ppocli.runs.run_logs import JsonlWriter, truncate_events, truncate_jsonl


def test_rows_are_strict_json_on_the_disk_at_once(tmp_path: Path):
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.append([{"step": 1, "loss": float("nan"), "x": [float("inf"), 2.0]}])
        assert path.read_text() == '{"step": 1, "loss": null, "x": [null, 2.0]}\n'
        writer.append([{"step": 2, "text": "grüße 模型\n"}, {"step": 3, "text": "\ud800"}])
        writer.append([])
    lines = path.read_bytes().split(b"\n")
    assert "grüße 模型" in lines[1].decode()
    assert json.loads(lines[1])["text"] == "grüße 模型\n"
    assert json.loads(lines[2])["text"] == "\ud800"
    assert lines[3:] == [b""]


@pytest.mark.parametrize("torn", [b'{"step": 2, "te', b"x" * 200_000])
def test_opening_cuts_a_torn_line(tmp_path: Path, torn: bytes):
    path, whole = tmp_path / "m", b'{"step": 1}\n'
    path.write_bytes(whole + torn)
    with JsonlWriter(path) as writer:
        writer.append([{"step": 2}])
    assert path.read_bytes() == whole + b'{"step": 2}\n'


def test_a_write_that_fails_leaves_no_part_of_itself(tmp_path: Path):
    code = """
import resource, sys
from pathlib import Path
from ppocli.runs.run_logs import JsonlWriter
from ppocli.errors import DiskError
writer = JsonlWriter(Path(sys.argv[1]))
writer.append([{"step": 1}])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    writer.append([{"text": "x" * 5000}])
except DiskError as error:
    print(error)
writer.append([{"step": 2}])
"""
    out, err = start_python(code, tmp_path / "m").communicate(timeout=60)
    assert out.startswith("File size limit reached writing "), err
    assert (tmp_path / "m").read_text() == '{"step": 1}\n{"step": 2}\n'


ODD = (b'{"step":1,  "a": 1}\n'
       b'{"note": "no step"}\n'
       b'{"step": 3}\n'
       b'not json, not last\n'
       b'{"step": 2, "late": true}\n'
       b'{"step": 4}\n')


def test_truncate_keeps_the_rest_byte_for_byte(tmp_path: Path):
    path = tmp_path / "m"
    path.write_bytes(ODD)
    truncate_jsonl(path, 2)
    assert path.read_bytes() == ODD.replace(b'{"step": 3}\n', b"").replace(b'{"step": 4}\n', b"")
    inode = path.stat().st_ino
    truncate_jsonl(path, 2)
    assert path.stat().st_ino == inode, "an untouched file isn't rewritten"
    truncate_jsonl(tmp_path / "absent", 2)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("torn", [b'{"step": 2}', b"\0" * 50 + b"\n", b'{"x": "\xc3\n'])
def test_truncate_drops_a_torn_last_line(tmp_path: Path, torn: bytes):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    truncate_jsonl(path, 9)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


# ---------------------------------------------------------------------------------- TensorBoard


def write_events(folder: Path, steps: range) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in steps:
            writer.add_scalar("reward", step / 10, step)
            writer.add_text("sample", f"text of {step}", step)


def scalars(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard itself shows; files of one second and process come in no order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), purge_orphaned_data=False)
    shown.Reload()
    return sorted((event.step, round(event.value, 6)) for event in shown.Scalars("reward"))


def test_no_step_is_shown_twice_after_going_on(tmp_path: Path):
    write_events(tmp_path, range(1, 9))
    [path] = tmp_path.iterdir()
    before = path.read_bytes()
    truncate_events(tmp_path, 5)
    after = path.read_bytes()
    assert before.startswith(after), "records that stay are not encoded again"
    assert 0 < len(after) < len(before)
    write_events(tmp_path, range(6, 11))
    assert scalars(tmp_path) == [(step, step / 10) for step in range(1, 11)]
    truncate_events(tmp_path, 3)
    assert scalars(tmp_path) == [(step, step / 10) for step in (1, 2, 3)]
    inodes = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    truncate_events(tmp_path, 3)
    truncate_events(tmp_path / "absent", 3)
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == inodes, "not rewritten"


@pytest.mark.parametrize("cut", [1, 17])
def test_a_torn_tail_is_cut_off(tmp_path: Path, cut: int):
    write_events(tmp_path, range(1, 9))
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    truncate_events(tmp_path, 8)
    assert scalars(tmp_path)[:7] == [(step, step / 10) for step in range(1, 8)]
    inode = path.stat().st_ino
    truncate_events(tmp_path, 8)
    assert path.stat().st_ino == inode, "what is whole isn't rewritten"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
