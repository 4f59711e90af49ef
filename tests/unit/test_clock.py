"""Where a run's time goes: nothing is lost between the phases."""

import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from threading import Thread

import pytest
import torch
from helpers import checked, environment, jsonl
from runs import make_world, words

from ppocli.errors import StoppedError
from ppocli.launch.open_run_folder import open_folder
from ppocli.launch.worker import run_worker
from ppocli.runs.run_logs import finite_or_null
from ppocli.training.state import Moment, PhaseClock, TrainState, profile
from ppocli.training.task import PythonObjects

CPU = torch.device("cpu")


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


def test_waiting_takes_wall_time_and_computing_takes_both():
    clock = PhaseClock(CPU)
    time.sleep(0.1)
    clock.mark("waiting")
    burn(0.1)
    clock.mark("computing")
    assert clock.seconds["waiting"] >= 0.1
    assert clock.cpu_seconds["waiting"] < 0.05
    assert clock.cpu_seconds["computing"] == pytest.approx(0.1, abs=0.05)
    assert clock.seconds["computing"] >= 0.09
    thread = Thread(target=burn, args=(0.1,))
    thread.start()
    thread.join()
    clock.mark("aside")
    assert clock.cpu_seconds["aside"] >= 0.09


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells when a process was started")
def test_the_start_of_a_process_lies_before_its_imports():
    code = ("import time; time.sleep(0.5); from ppocli.training.state import Moment; "
            "began = Moment.of_process_start(); print(Moment.now().wall - began.wall, began.cpu)")
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True,
                          env=environment())
    whole = time.perf_counter() - before
    age, cpu = map(float, done.stdout.split())
    assert 0.5 <= age <= whole + 0.02  # the system counts in hundredths
    assert cpu == 0.0


def test_a_profile_has_shares_and_throughput():
    found = profile({"optimize": 3.0, "rollout": 1.0}, {"optimize": 6.0, "rollout": 0.5},
                    {"rollout": 50, "optimize": 0})
    assert (found["seconds"], found["cpu_seconds"]) == (4.0, 6.5)
    assert list(found["phases"]) == ["rollout", "optimize"]
    assert found["phases"]["rollout"] == {"seconds": 1.0, "cpu_seconds": 0.5, "share": 0.25,
                                          "tokens": 50, "tokens_per_second": 50.0}
    assert found["phases"]["optimize"]["tokens_per_second"] is None
    assert profile({}, {}, {}) == {"seconds": 0, "cpu_seconds": 0, "phases": {}}


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
    for name in ("rollout", "reward", "scoring", "optimize", "eval", "other"):
        for kind, told_as in (("time", "seconds"), ("cpu", "cpu_seconds")):
            rest = phases[name][told_as] - sum(row.get(f"{kind}/{name}", 0.0) for row in rows)
            assert rest == pytest.approx(0, abs=1e-9), (kind, name)
    for row in [row for row in rows if "time/step" in row]:
        for kind in ("time", "cpu"):
            parts = {name: row[name] for name in row if name.startswith(f"{kind}/")}
            step = parts.pop(f"{kind}/step")
            parts.pop(f"{kind}/eval", None)
            assert set(parts) == {f"{kind}/{phase}" for phase in (
                "rollout", "reward", "scoring", "optimize", "other")}
            assert step == pytest.approx(sum(parts.values()))
