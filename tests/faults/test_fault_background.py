"""A checkpoint that is written while training goes on: stops, kills, errors, one at a time."""

import os
import signal
import time
from pathlib import Path

from helpers import jsonl
from runs import assert_equal_runs, run, spawn, wait_for, words

WORDS = words("run_name=r", "checkpoint.background=always", stateful=True)


def rows(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return jsonl(path) if path.exists() else []


def names(run_dir: Path) -> set[str]:
    folder = run_dir / "checkpoints"
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def while_writing(world: Path, seconds: float):
    """A run whose first checkpoint takes long, at the moment when the second step has ended."""
    process = spawn("train", *WORDS, cwd=world,
                    PPOCLI_FAULTS=f"save.before_rename@1:sleep={seconds}")
    wait_for(lambda: len(rows(world / "runs/r")) > 2, process)
    found = names(world / "runs/r")
    assert "step-000001" not in found
    assert "latest" not in found
    assert any(name.startswith(".staging-000001-") for name in found)
    return process


def test_checkpoints_that_training_waits_for_are_the_same(command, reference, world):
    command(*words("run_name=r", "checkpoint.background=never", stateful=True), code=0)
    assert_equal_runs(reference, world / "runs/r")
    assert os.readlink(world / "runs/r/checkpoints/latest") == "step-000004"


def test_one_is_written_at_a_time_and_the_next_save_waits(reference, world):
    """With a slow disk nothing is lost, and training is never more than one checkpoint ahead."""
    process = spawn("train", *WORDS, cwd=world, PPOCLI_FAULTS="save.before_manifest:sleep=1")
    folder, most, ahead = world / "runs/r", 0, 0
    while process.poll() is None:
        there = names(folder)
        saved = max((int(name[-6:]) for name in there if name.startswith("step-")), default=0)
        most = max(most, sum(name.startswith(".staging") for name in there))
        ahead = max(ahead, max((row["step"] for row in rows(folder)), default=0) - saved)
        time.sleep(0.02)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert most == 1
    assert ahead in (1, 2), "where a step takes longer than a save, it is 1"
    assert_equal_runs(reference, folder)


def test_a_stop_while_one_is_written_waits_saves_and_names_what_goes_on_exactly(reference, world):
    process = while_writing(world, 3)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    folder = world / "runs/r"
    assert process.returncode == 143, out + err
    assert "; saved step 2" in err
    assert {name for name in names(folder) if name[0] not in "lb"} == {"step-000001", "step-000002"}
    command = err[err.index("resume with: ppocli ") + len("resume with: ppocli "):].split()
    done = run(*command[:2], cwd=world, code=0)
    assert done.out.splitlines()[-1] == str(folder / "model")
    assert_equal_runs(reference, folder)


def test_a_second_stop_does_not_wait_for_the_writing(command, reference, world):
    process = while_writing(world, 120)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert "step-000001" not in names(world / "runs/r")
    assert command(*words("run_name=r", "resume=auto", stateful=True)).code == 0
    assert_equal_runs(reference, world / "runs/r")


def test_kill9_while_one_is_written_and_training_goes_on(command, reference, world):
    process = while_writing(world, 120)
    process.kill()
    process.communicate()
    ended = command(*words("run_name=r", "resume=auto", stateful=True), code=0)
    assert "skipped .staging-000001-" in ended.said
    assert_equal_runs(reference, world / "runs/r")


def test_a_policy_that_diverges_names_the_checkpoint_that_was_being_written(command, inject, world):
    inject("save.before_rename@2:sleep=2,optimize.minibatch@9+:nan")
    ended = command(*words("run_name=r", "checkpoint.background=always"), code=4)
    assert "last healthy: step 2 in " in ended.err


def test_a_bug_in_the_thread_ends_the_run_with_its_traceback(command, inject, world):
    inject("save.before_manifest@2:raise")
    ended = command(*WORDS, code=1)
    assert "Traceback" in ended.err
    assert "injected fault at save.before_manifest" in ended.err
    assert "step-000001" in names(world / "runs/r")
    assert not [name for name in names(world / "runs/r") if name.startswith(".")]
