"""Trackers get every figure once, and can fail in any way without a run noticing."""

import logging
import math
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest
from accelerate import PartialState
from wandb_double import calls, forget_double, installed, put_double, steps_of

from ppocli.config.schema import TrackingConfig
from ppocli.errors import StoppedError
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


@pytest.mark.parametrize(("trouble", "cause"), [
    ("init raises online", "RuntimeError: no init today: HF_TOKEN=***; the run is logged to "
     "files; to upload it later: wandb sync there"),
    ("log raises", "step 0 could not be logged: RuntimeError: no log today: HF_TOKEN=***"),
    ("finish hangs", "it did not finish in time; what was not sent by now is missing there")])
def test_whatever_fails_is_said_once(trouble, cause, folder, tmp_path, monkeypatch, caplog):
    set_up(monkeypatch, put_double(tmp_path, trouble))
    seconds = 0.3 if "hangs" in trouble else 10.0
    monkeypatch.setattr(trackers, "FINISH_SECONDS", seconds)
    start = time.monotonic()
    longest = log_steps(folder, range(5))
    assert longest < 1
    assert time.monotonic() - start < seconds + 5
    (said,) = warnings_of(caplog)
    assert said.startswith(f"wandb: {cause}"), said
    assert said.endswith("The run does not depend on it; metrics.jsonl has everything.")


def test_how_a_run_ended_is_told(folder, tmp_path, monkeypatch):
    set_up(monkeypatch, put_double(tmp_path))
    with pytest.raises(StoppedError), trackers.open_trackers(TrackingConfig(["wandb"]), folder):
        raise StoppedError("stopped", signal_number=15)
    assert [row["code"] for row in calls(tmp_path, "finish")] == [255]


@pytest.mark.skipif(not installed("wandb"), reason="wandb is not installed")
def test_the_real_wandb_offline(folder, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(folder, range(3))
    log_steps(folder, range(1, 4))
    assert warnings_of(caplog) == []
    assert len(list((folder.path / "wandb").glob("offline-run-*/run-*.wandb"))) == 2


@pytest.mark.skipif(not installed("trackio"), reason="trackio is not installed")
def test_the_real_trackio_on_this_machine(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    cfg = TrackingConfig(["trackio"], project="films")
    log_steps(folder, range(3), cfg)
    log_steps(folder, range(1, 4), cfg)
    assert warnings_of(caplog) == []
    with sqlite3.connect(tmp_path / "trackio/films.db") as data:
        rows = data.execute("select run_name, step from metrics order by id").fetchall()
    assert rows == [("walk", step) for step in range(4)]


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


def test_one_s_own_tracker_can_fail_and_others_go_on(folder, tmp_path, monkeypatch, caplog):
    set_up(monkeypatch, put_double(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert log_steps(folder, range(5), TrackingConfig([own(tmp_path, "raises"), "wandb"])) < 1
    (warning,) = warnings_of(caplog)
    assert warning.startswith(
        "mine.py:Notes: step 1 could not be logged: ValueError: no figures of ***")
    assert [*steps_of(tmp_path)] == [0, 1, 2, 3, 4]
