"""Where a run's time goes: nothing is lost between the phases."""

import json
import math
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers import checked, jsonl
from runs import make_world, words

from ppocli.errors import StoppedError
from ppocli.launch.open_run_folder import open_folder
from ppocli.launch.worker import run_worker
from ppocli.runs.run_logs import finite_or_null
from ppocli.training.state import Moment, PhaseClock, TrainState
from ppocli.training.task import PythonObjects

CPU = torch.device("cpu")


def test_marks_add_up_to_the_time_between_first_and_last_and_are_told():
    heard: list[str] = []
    clock = PhaseClock(CPU, began := Moment.now(), heard.append)
    for name in ("a", "b", "a"):
        time.sleep(0.01)
        clock.mark(name)
    first = clock.take()
    time.sleep(0.01)
    clock.mark("b")
    second = clock.take()
    total = sum(first.seconds.values()) + sum(second.seconds.values())
    assert total == pytest.approx(clock.last.wall - began.wall)
    assert set(first.seconds) == {"a", "b"}
    assert set(second.seconds) == {"b"}
    assert clock.take().seconds == {}
    assert heard == ["a", "b", "a", "b"]


def test_time_and_tokens_are_booked_and_survive_json():
    clock = PhaseClock(CPU)
    clock.mark("rollout")
    spent = clock.take()
    state = TrainState(digests={}, judged_by="", task={"kl_coef": 0.1})
    twice = state.book(spent, {"rollout": 5}).book(spent, {"rollout": 7})
    assert twice.seconds == {"rollout": 2 * spent.seconds["rollout"]}
    assert twice.cpu_seconds == {"rollout": 2 * spent.cpu_seconds["rollout"]}
    assert twice.tokens == {"rollout": 12}
    data = json.loads(json.dumps(twice.to_json()))
    assert TrainState.from_json(data) == twice
    unknown = replace(twice, eval_before={"kl_mean": math.nan, "reward_mean": 1.0})
    saved = json.loads(json.dumps(finite_or_null(unknown.to_json()), allow_nan=False))
    assert math.isnan(TrainState.from_json(saved).eval_before["kl_mean"])
    del data["cpu_seconds"]  # a checkpoint of an earlier version
    assert TrainState.from_json(data).cpu_seconds == {}


@pytest.mark.slow
def test_the_phases_of_a_run_add_up_to_its_wall_time_also_when_stopped_and_resumed(
        tmp_path, monkeypatch, inject):
    world = make_world(tmp_path / "world")
    monkeypatch.chdir(world)

    def seconds(*more: str, stop_at: int = 0) -> float:
        """From the start of a run in this process until its summary was written."""
        inject(f"score.before@{stop_at}:term" if stop_at else "")
        with open_folder(checked(*words(*more)), PythonObjects(), lambda text: None) as start:
            began = time.time()
            with pytest.raises(StoppedError) if stop_at else nullcontext():
                run_worker(replace(start, display="quiet"))
        return (start.run_dir / "summary.json").stat().st_mtime - began

    def told() -> dict:
        return json.loads((world / "runs/r/summary.json").read_text())

    first = seconds("run_name=r", stop_at=9)
    summary = told()
    assert summary["status"] == "stopped"
    assert summary["profile"]["seconds"] == pytest.approx(first, rel=0.03, abs=0.05)
    saved = json.loads(max((world / "runs/r/checkpoints").glob("step-*/state.json")).read_text())

    second = seconds("resume=runs/r")
    summary = told()
    assert summary["status"] == "finished"
    whole, phases = summary["profile"]["seconds"], summary["profile"]["phases"]
    carried = sum(saved["seconds"].values())
    assert 0 < carried < first
    assert whole - carried == pytest.approx(second, rel=0.03, abs=0.05)
    assert {"startup", "rollout", "reward", "scoring", "optimize", "other", "eval", "between",
            "saving"} == set(phases)
    assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(whole)
    assert sum(phase["share"] for phase in phases.values()) == pytest.approx(1)
    assert sum(phase["cpu_seconds"] for phase in phases.values()) == pytest.approx(
        summary["profile"]["cpu_seconds"])
    rows = jsonl(world / "runs/r/metrics.jsonl")
    assert sum(summary["seconds"].values()) == pytest.approx(
        sum(row.get(name, 0.0) for row in rows for name in ("time/step", "time/eval")))
