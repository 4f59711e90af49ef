"""`ppocli train` with trackers: asked for before anything is loaded, and never waited for."""

from pathlib import Path

import pytest
from helpers import jsonl
from runs import words
from wandb_double import calls, forget_double, installed, put_double, steps_of


@pytest.fixture(autouse=True)
def _no_double_is_left():
    yield
    forget_double()


@pytest.mark.skipif(installed("wandb"), reason="wandb is installed")
def test_a_tracker_that_is_not_installed(command, world: Path):
    (world / "wandb").mkdir()  # wandb's own folder of files is no library
    done = command(*words("run_name=a", "tracking.trackers=[wandb]"), code=3)
    assert "The tracker wandb is not installed" in done.err
    assert "pip install 'ppocli[wandb]'" in done.err
    assert not (world / "runs").exists()


@pytest.mark.slow
def test_a_run_and_its_continuation_are_one_run(command, world: Path, tmp_path: Path, monkeypatch):
    env = {**put_double(tmp_path), "WANDB_MODE": "offline"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(tmp_path / "site")
    more = ("run_name=a", "tracking.trackers=[wandb]")
    command(*words(*more, "ppo.num_steps=2"), code=0)
    assert not (world / "runs/a/events").exists()
    command("resume=runs/a", "ppo.num_steps=3", code=0)
    logged = steps_of(tmp_path)
    rows = jsonl(world / "runs/a/metrics.jsonl")
    assert [*logged] == [row["step"] for row in rows] == [0, 1, 2, 3]
    for figures, row in zip(logged.values(), rows, strict=True):
        table = figures.pop("eval/samples", None)
        assert (table is not None) == ("eval/reward_mean" in row)
        assert figures == {k: v for k, v in row.items() if k != "step" and v is not None}
    assert len({row["id"] for row in calls(tmp_path, "init")}) == 1
