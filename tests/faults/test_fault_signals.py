"""Being told to stop: where it happens, what is said, and that the run goes on exactly."""

import json
import os
import signal
import time

import pytest
from runs import (
    assert_equal_runs,
    assert_no_process_left,
    assert_tidy,
    resumed,
    run,
    spawn,
    wait_for,
    words,
)

CODES = {"term": 143, "int": 130}
NAMES = {"term": "SIGTERM", "int": "SIGINT"}
# where in the run the signal comes; the passes are of the second step or later
PLACES = {"first evaluation": "rollout.token@3", "rollout": "rollout.token@70",
          "scoring": "score.before@7", "after scoring": "score.after@8",
          "optimize": "optimize.minibatch@6", "save": "save.open@20",
          "before the manifest": "save.before_manifest@2", "after the save": "save.after_rename@3",
          "prune": "prune.before@2"}
QUICK = {("first evaluation", "int"), ("rollout", "term"), ("after scoring", "term"),
         ("optimize", "term"), ("save", "term")}


@pytest.mark.parametrize(("place", "kind"), [
    pytest.param(place, kind, marks=() if (place, kind) in QUICK else pytest.mark.slow)
    for place in PLACES for kind in CODES])
def test_a_stop_anywhere_saves_says_how_to_go_on_and_goes_on_exactly(
        place, kind, command, inject, reference, world):
    inject(f"{PLACES[place]}:{kind}")
    ended = command(*words("run_name=r", stateful=True), code=CODES[kind])
    folder = world / "runs/r"
    step = json.loads((folder / "summary.json").read_text())["steps"]
    assert f"stopped by {NAMES[kind]} at step {step} of 4" in ended.err
    assert f"ppocli resume {folder}" in ended.err
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert not (folder / "model").exists()
    inject("")
    resumed(folder)
    assert_equal_runs(reference, folder)


def test_a_stop_during_the_closing_publication_comes_too_late(command, inject, reference, world):
    inject("export.before_rename:term")
    command(*words("run_name=r", stateful=True), code=0)
    assert_equal_runs(reference, world / "runs/r")


def test_a_second_stop_leaves_at_once_without_a_half_file(world, reference):
    """SIGINT to the process while it sleeps in a reward call, then again."""
    process = spawn("train", *words("run_name=r", stateful=True), cwd=world,
                    PPOCLI_FAULTS="score.before@5:sleep=60")
    rows = world / "runs/r/metrics.jsonl"
    wait_for(lambda: rows.exists() and rows.stat().st_size > 0
             and (world / "runs/r/checkpoints/step-000001").exists(), process)
    time.sleep(0.5)  # the reward is called right after the checkpoint
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)  # of two at once, the system may give the second to another thread
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert process.returncode in (130, 143), err
    assert "Traceback" not in out + err
    assert_no_process_left(process.pid)
    for line in rows.read_text().splitlines():
        json.loads(line)
    resumed(world / "runs/r")
    assert_equal_runs(reference, world / "runs/r")


def test_a_signal_from_outside_then_the_resume_command(world, reference):
    process = spawn("train", *words("run_name=r", stateful=True), cwd=world,
                    PPOCLI_FAULTS="score.before@6:sleep=2")
    wait_for((world / "runs/r/checkpoints/step-000001").exists, process)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "stopped by SIGTERM at step" in err
    assert "Traceback" not in out + err
    command = err[err.index("resume with: ppocli ") + len("resume with: ppocli "):].split()
    done = run(*command[:2], cwd=world, code=0)
    assert done.out.splitlines()[-1] == str(world / "runs/r/model")
    assert_equal_runs(reference, world / "runs/r")


@pytest.mark.parametrize("fault", [
    "export.before_rename:kill9", pytest.param("save.after_rename@4:kill9",
                                               marks=pytest.mark.slow)])
def test_killed_at_the_very_end_the_resume_publishes_the_model(fault, reference, world):
    killed = run("train", *words("run_name=r", stateful=True), cwd=world, PPOCLI_FAULTS=fault)
    assert killed.code == -9
    assert not (world / "runs/r/model").exists()
    resumed(world / "runs/r")
    assert_equal_runs(reference, world / "runs/r")
    assert_tidy(world / "runs/r")
