"""Trackers get every figure once, and can fail in any way without a run noticing."""

import logging
import math
import os
import sqlite3
import struct
import sys
import time
from pathlib import Path

import pytest
from accelerate import PartialState
from helpers import refused
from wandb_double import calls, forget_double, installed, put_double, steps_of

from ppocli.config.schema import TrackingConfig
from ppocli.errors import InputError, StoppedError
from ppocli.publish import trackers
from ppocli.runs.run_folder import RunFolder

SAMPLES = [{"prompt": "the film", "response": "was good", "score": 1.5, "kl": None,
            "response_tokens": 2, "finished": True}]
CONFIG = "seed: 3\nrun_name: walk\nreward:\n  kwargs:\n    header: hf_abcdefghijklmnopqrstuvwxyz\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "walk")
    folder.path.mkdir()
    folder.config.write_text(CONFIG)
    return folder


@pytest.fixture(autouse=True)
def _no_settings_of_a_person(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    PartialState(cpu=True)  # as a run has it by then
    yield
    forget_double()


def set_up(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Make the double the wandb that is imported."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(environment["PYTHONPATH"].split(os.pathsep)[0])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def log_steps(folder: RunFolder, steps: range, cfg: TrackingConfig | None = None) -> float:
    """Log rows as a run does; the longest that one took, in seconds."""
    longest = 0.0
    with trackers.open_trackers(cfg or TrackingConfig(["wandb"]), folder) as opened:
        for step in steps:
            start = time.monotonic()
            for tracker in opened:
                tracker.samples(step, SAMPLES)
                tracker.row({"step": step, "reward/mean": step / 2, "objective/kl": math.nan})
            longest = max(longest, time.monotonic() - start)
    return longest


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_run_with_its_settings_figures_and_samples(folder, tmp_path, monkeypatch, caplog):
    set_up(monkeypatch, put_double(tmp_path))
    caplog.set_level(logging.INFO, "ppocli")
    log_steps(folder, range(2), TrackingConfig(["wandb"], project="films"))
    (init,) = calls(tmp_path, "init")
    assert (init["name"], init["project"], init["resume"]) == ("walk", "films", "allow")
    assert init["dir"] == str(folder.path)
    assert calls(tmp_path, "config")[0]["values"] == {"seed": 3, "run_name": "walk", "reward": {
        "kwargs": {"header": "***"}}}
    assert steps_of(tmp_path) == {step: {"reward/mean": step / 2, "eval/samples": [
        list(SAMPLES[0]), [list(SAMPLES[0].values())]]} for step in range(2)}
    assert [row["code"] for row in calls(tmp_path, "finish")] == [0]
    assert warnings_of(caplog) == []
    assert "https://wandb.invalid/run" in caplog.text


def test_names_from_the_environment_win_over_ours(folder, tmp_path, monkeypatch):
    set_up(monkeypatch, {**put_double(tmp_path), "WANDB_NAME": "mine", "WANDB_PROJECT": "theirs",
                         "WANDB_DIR": str(tmp_path)})
    log_steps(folder, range(1))
    (init,) = calls(tmp_path, "init")
    assert (init["name"], init["project"], init["dir"]) == (None, "theirs", None)


def test_a_resumed_run_goes_on_after_the_last_step_that_was_logged(folder, tmp_path, monkeypatch):
    set_up(monkeypatch, put_double(tmp_path))
    log_steps(folder, range(3))
    log_steps(folder, range(1, 5))
    first, second = calls(tmp_path, "init")
    assert first["id"] == second["id"]
    assert [*steps_of(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("trouble", "cause"), [
    ("init raises", "RuntimeError: no init today: HF_TOKEN=***; nothing is logged there"),
    ("init raises online", "RuntimeError: no init today: HF_TOKEN=***; the run is logged to "
     "files; to upload it later: wandb sync there"),
    ("log raises", "step 0 could not be logged: RuntimeError: no log today: HF_TOKEN=***"),
    ("finish raises", "RuntimeError: no finish today: HF_TOKEN=***"),
    ("init hangs", "it did not finish in time; what was not sent by now is missing there"),
    ("log hangs", "it did not finish in time; what was not sent by now is missing there"),
    ("finish hangs", "it did not finish in time; what was not sent by now is missing there")])
def test_whatever_fails_is_said_once(trouble, cause, folder, tmp_path, monkeypatch, caplog):
    set_up(monkeypatch, put_double(tmp_path, trouble))
    seconds = 1.0 if "hangs" in trouble else 10.0
    monkeypatch.setattr(trackers, "FINISH_SECONDS", seconds)
    start = time.monotonic()
    longest = log_steps(folder, range(5))
    assert longest < 1
    assert time.monotonic() - start < seconds + 5
    (said,) = warnings_of(caplog)
    assert said.startswith(f"wandb: {cause}"), said
    assert said.endswith("The run does not depend on it; metrics.jsonl has everything.")


def test_what_does_not_keep_up_is_left_behind(folder, tmp_path, monkeypatch, caplog):
    set_up(monkeypatch, put_double(tmp_path, "init hangs"))
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "QUEUE_ROWS", 10)
    assert log_steps(folder, range(20)) < 1
    assert warnings_of(caplog)[0].startswith("wandb: it is 10 rows behind")


@pytest.mark.parametrize(("error", "code"), [
    (StoppedError("stopped", signal_number=15), 255), (RuntimeError("a bug"), 1)])
def test_how_a_run_ended_is_told(error, code, folder, tmp_path, monkeypatch):
    set_up(monkeypatch, put_double(tmp_path))
    with pytest.raises(type(error)), \
            trackers.open_trackers(TrackingConfig(["wandb"]), folder):
        raise error
    assert [row["code"] for row in calls(tmp_path, "finish")] == [code]


def test_tensorboard_that_can_not_write_is_left_out(folder, caplog):
    folder.events.write_text("a file where the folder goes")
    log_steps(folder, range(2), TrackingConfig(["tensorboard"]))
    (said,) = warnings_of(caplog)
    assert said.startswith("tensorboard: FileExistsError")


def wandb_records(path: Path) -> list:
    """The records of a .wandb file: LevelDB's log format after seven bytes."""
    from wandb.proto import wandb_internal_pb2

    raw, at, part, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", raw[at + 4:at + 7])
        piece = raw[at + 7:at + 7 + length]
        at += 7 + length
        part = piece if kind in (1, 2) else part + piece
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(part))
    return found


@pytest.mark.skipif(not installed("wandb"), reason="wandb is not installed")
def test_the_real_wandb_offline(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_TAGS", "short,films")
    monkeypatch.setenv("WANDB_RUN_GROUP", "walks")
    log_steps(folder, range(3))
    log_steps(folder, range(1, 4))
    assert warnings_of(caplog) == []
    files = sorted((folder.path / "wandb").glob("offline-run-*/run-*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    runs = {(r.run.run_id, r.run.display_name, r.run.project, r.run.run_group, tuple(r.run.tags))
            for r in records if r.WhichOneof("record_type") == "run"}
    assert len(runs) == 1
    assert runs.pop()[1:] == ("walk", "ppocli", "walks", ("short", "films"))
    history = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    assert [row.step.num for row in history] == [0, 1, 2, 3]
    for row in history:
        values = {"/".join(i.nested_key) or i.key: i.value_json for i in row.item}
        assert float(values["reward/mean"]) == row.step.num / 2
        assert values["eval/samples/_type"] == '"table-file"'
        assert "objective/kl" not in values


@pytest.mark.skipif(not installed("trackio"), reason="trackio is not installed")
def test_the_real_trackio_on_this_machine(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    cfg = TrackingConfig(["trackio"], project="films")
    log_steps(folder, range(3), cfg)
    log_steps(folder, range(1, 4), cfg)
    other = RunFolder(tmp_path / "elsewhere/walk")
    other.path.mkdir(parents=True)
    other.config.write_text(CONFIG)
    log_steps(other, range(1), cfg)  # another run of the same name
    log_steps(folder, range(4, 5), cfg)
    assert warnings_of(caplog) == []
    with sqlite3.connect(tmp_path / "trackio/films.db") as data:
        rows = data.execute("select run_id, run_name, step from metrics order by id").fetchall()
    assert [row[1:] for row in rows] == [("walk", step) for step in (0, 1, 2, 3, 0, 4)]
    assert len({row[0] for row in rows[:4]}) == 1
    assert len({row[0] for row in rows}) == 3


OWN = """
class Notes:
    def __init__(self, run_dir, config):
        self.path = run_dir / "notes"
        self.note("open", config["seed"])

    def note(self, *words):
        with self.path.open("a") as file:
            print(*words, file=file)

    def row(self, figures):
        if TROUBLE == "raises" and figures["step"] == 1:
            raise ValueError("no figures of hf_abcdefghijklmnopqrstuvwxyz")
        if TROUBLE == "exits":
            raise SystemExit(3)
        self.note("row", figures)

    def samples(self, step, rows):
        self.note("samples", step, len(rows))

    def close(self):
        self.note("close")

TROUBLE = ""
"""


def own(tmp_path: Path, trouble: str = "") -> str:
    """The path of a tracker of a user's own."""
    (tmp_path / "mine.py").write_text(f"{OWN}TROUBLE = {trouble!r}\n")
    return f"{tmp_path}/mine.py:Notes"


def test_a_tracker_of_one_s_own_gets_each_step_once(folder, tmp_path, caplog):
    cfg = TrackingConfig([own(tmp_path)])
    log_steps(folder, range(2), cfg)
    log_steps(folder, range(1, 3), cfg)
    rows = [line for step in range(3) for line in (
        f"samples {step} 1", f"row {{'step': {step}, 'reward/mean': {step / 2}}}")]
    assert (folder.path / "notes").read_text().splitlines() == [
        "open 3", *rows[:4], "close", "open 3", *rows[4:], "close"]
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(("trouble", "cause"), [
    ("raises", "step 1 could not be logged: ValueError: no figures of ***"),
    ("exits", "step 0 could not be logged: SystemExit: 3")])
def test_one_s_own_tracker_can_fail_and_others_go_on(trouble, cause, folder, tmp_path, monkeypatch,
                                                     caplog):
    set_up(monkeypatch, put_double(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert log_steps(folder, range(5), TrackingConfig([own(tmp_path, trouble), "wandb"])) < 1
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"mine.py:Notes: {cause}")
    assert [*steps_of(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("spec", "text"), [
    ("mine.py", "'mine.py' names a module or file, but no class in it."),
    ("mine:Bare", "Bare lacks row."),
    ("mine:Needy", "mine:Needy (mine.py:2) can't be made from a folder and a configuration: "
     "missing a required argument: 'more'.")])
def test_a_path_to_no_tracker_is_refused(spec, text, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "class Bare: pass\nclass Needy:\n    def __init__(self, run_dir, config, more): pass\n"
        "    def row(self, figures): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with refused(InputError, text, "tracking.trackers"):
        trackers.check_trackers(TrackingConfig(["wandb", spec]))
    sys.modules.pop("mine", None)
