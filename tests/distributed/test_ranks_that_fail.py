"""One of several ranks dies, raises or hangs: the others end in time, one message names rank, phase
and cause, nothing is left running, and the run goes on later."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import read_json, stable_rows
from ranks import LONG, REWARD, close_to, errors_in, ranks_of, rows_of, wait_for_no_ranks
from runs import assert_tidy, last_checkpoint, make_world, run, spawn, wait_for, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


FAILURES = [
    # what nobody expected keeps its traceback
    ("optimize.forward@6#1:raise", "ddp", 1, "rank 1, step 2, optimize: RuntimeError: injected "
     "fault at optimize.forward"),
    ("save.open@1#0:raise", "zero3", 1, "rank 0, saving step 1: RuntimeError: injected"),
    # killed from outside, as the kernel does when memory is short
    ("optimize.backward@6#1:kill9", "ddp", 1, "rank 1, step 2, optimize: killed by SIGKILL (exit "
     "-9): probably out of memory"),
    ("rollout.token@30#0:kill9", "zero3", 1, "rank 0, step 2, rollout: killed by SIGKILL (exit "
     "-9)"),
    # a disk that refuses rank 0 stops all of them
    ("save.before_manifest@2+#0:enospc", "zero1", 6, "Disk full writing step 2"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Rows of one process that nothing happened to."""
    folder = make_world(tmp_path_factory.mktemp("alone"))
    run("train", *words("run_name=alone", "ppo.num_steps=6"), cwd=folder, code=0)
    return stable_rows(folder / "runs/alone/metrics.jsonl")


@pytest.mark.parametrize(("fault", "hardware", "code", "text"), FAILURES)
def test_a_failing_rank_is_named_once_and_the_run_goes_on(world, alone, fault, hardware, code,
                                                          text):
    common = words("run_name=r", f"hardware={hardware}", "hardware.timeout_seconds=60",
                   "ppo.num_steps=6")
    started = time.monotonic()
    done = run("train", *common, cwd=world, PPOCLI_FAULTS=fault, code=code)
    [message] = errors_in(done.err)
    assert text in message
    assert ("Traceback" in done.err) == ("injected" in text)
    assert "terminate called" not in done.err
    assert time.monotonic() - started < 150
    wait_for_no_ranks(world / "runs/r")
    run("train", *words("run_name=r", f"hardware={hardware}", "resume=auto", "ppo.num_steps=6",
                        "ppo.micro_batch_size=2"), cwd=world, code=0)
    # half the micro-batch, the same effective batch: what it comes to is as if nothing had been
    assert close_to(stable_rows(world / "runs/r/metrics.jsonl"), alone)
    assert_tidy(world / "runs/r")


@pytest.mark.parametrize(("hardware", "fault", "phase"), [
    ("ddp", "rollout.token@30#1:sleep=900", "step 2, rollout"),
    # the other one waits in a group that DeepSpeed has made
    ("zero2", "optimize.backward@6#1:sleep=900", "step 2, optimize")])
def test_a_rank_that_hangs_in_python_is_named(world, hardware, fault, phase):
    process = spawn("train", *words("run_name=hung", f"hardware={hardware}",
                                    "hardware.timeout_seconds=8"), cwd=world, PPOCLI_FAULTS=fault)
    wait_for(lambda: rows_of(world / "runs/hung") >= 2, process)
    started = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    # what is left of the step, the timeout, and as long again for the one that hangs
    assert time.monotonic() - started < 45
    rank = fault.partition("#")[2][0]
    assert errors_in(err) == [f"Error: rank {rank}, {phase}: no answer within 8 seconds "
                             "(hardware.timeout_seconds); all ranks were ended."]
    wait_for_no_ranks(world / "runs/hung")


def kill_all_of(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """End the command and all ranks at once, as a machine that loses its power."""
    for pid in [process.pid, *ranks_of(run_dir)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for_no_ranks(run_dir)


@pytest.mark.parametrize("hardware", ["ddp", "zero3"])
def test_all_killed_at_once_and_resumed_comes_to_the_same_bytes(world, hardware):
    """Also from another place: the folder is moved in between."""
    (world / "odd.py").write_text(REWARD)
    given = ["reward.fn=odd.py:unlike", f"hardware={hardware}", "ppo.num_steps=6"]
    run("train", *words("run_name=whole", *given), cwd=world, code=0)
    process = spawn("train", *words("run_name=cut", *given), cwd=world)
    wait_for(lambda: rows_of(world / "runs/cut") >= 3, process)
    kill_all_of(world / "runs/cut", process)
    assert rows_of(world / "runs/cut") < 7
    (world / "elsewhere").mkdir()
    moved = (world / "runs/cut").rename(world / "elsewhere/moved")
    assert "not bit-exact" not in run("resume", "elsewhere/moved", cwd=world, code=0).err
    assert stable_rows(moved / "metrics.jsonl") == stable_rows(world / "runs/whole/metrics.jsonl")
    saved = last_checkpoint(world / "runs/whole")
    pairs = [(last_checkpoint(moved) / path.relative_to(saved), path)
             for path in saved.rglob("*.safetensors")]
    assert len(pairs) >= 5
    for own, other in [*pairs, (moved / "model/model.safetensors",
                                world / "runs/whole/model/model.safetensors")]:
        assert own.read_bytes() == other.read_bytes(), own
    assert_tidy(moved)


def test_killing_what_started_the_ranks_leaves_none(world):
    process = spawn("train", *words("run_name=orphan", "hardware=ddp", *LONG), cwd=world)
    wait_for(lambda: rows_of(world / "runs/orphan") >= 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for_no_ranks(world / "runs/orphan", seconds=60)
    summary = read_json(world / "runs/orphan/summary.json")
    assert summary["status"] == "stopped"
    run("resume", "runs/orphan", f"ppo.num_steps={summary['steps'] + 1}", cwd=world, code=0)


@pytest.mark.parametrize(("before", "after"), [
    (["hardware=ddp"], ["hardware.num_processes=1"]),
    (["hardware=zero3"], ["hardware.num_processes=1", "hardware.zero_stage=0"]),
    ([], ["hardware.num_processes=2", "hardware.zero_stage=1"])])
def test_another_number_of_processes_goes_on_and_says_so(world, alone, before, after):
    run("train", *words("run_name=moved", *before), cwd=world, code=0)
    done = run("resume", "runs/moved", "ppo.num_steps=6", *after, cwd=world, code=0)
    processes = after[0].rpartition("=")[2]
    assert f"changed on resume: hardware.num_processes: {2 if before else 1} -> {processes}" in (
        done.err)
    assert (f"(processes: {2 if before else 1} -> {processes}): equal up to rounding, not "
            "bit-exact") in done.err
    rows = {row["step"]: row for row in stable_rows(Path("runs/moved/metrics.jsonl"))}
    # the row of step 4 has an evaluation more: it was the last one
    others = {row["step"]: row for row in alone}
    assert close_to([rows[5], rows[6]], [others[5], others[6]])
