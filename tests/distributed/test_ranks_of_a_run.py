"""Whole runs of several processes through the command: results, stops, deaths, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ppocli, stable_rows
from ranks import free_port
from runs import assert_tidy, run, spawn, wait_for, words

REWARD = '''\
import os
import time


def broken_on_one_rank(outputs, **columns):
    if os.environ.get("RANK") == "1":
        raise ValueError("no reward today")
    return [float(len(text)) for text in outputs]


def unlike(outputs, **columns):
    """Draws random numbers: each rank has its own, and they go on exactly."""
    import random

    return [len(text) + random.random() for text in outputs]
'''
LONG = ("ppo.num_steps=400", "eval.every_steps=100", "checkpoint.every_steps=100")
pytestmark = pytest.mark.timeout(400)


def ranks_of(run_name: str) -> list[int]:
    """Pids of the ranks of a run, by their command lines."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"ppocli.worker" in line and any(part.endswith(f"/{run_name}".encode())
                                                for part in line):
                found.append(int(folder.name))
    return sorted(found)


def rows_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_no_ranks(run_name: str) -> None:
    deadline = time.monotonic() + 10
    while ranks_of(run_name):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.1)


def close_to(rows: list[dict], others: list[dict]) -> bool:
    return len(rows) == len(others) and all(
        row.keys() == other.keys() and all(
            row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4) for name in row)
        for row, other in zip(rows, others, strict=True))


@pytest.mark.parametrize("hardware", [
    "zero2", *(pytest.param(name, marks=pytest.mark.slow)
               for name in ("ddp", "zero1", "zero3", "zero3_offload"))])
def test_a_run_on_two_processes_comes_to_what_one_comes_to(world, hardware):
    one = run("train", *words("run_name=one"), cwd=world)
    two = run("train", *words("run_name=two", f"hardware={hardware}"), cwd=world)
    assert (one.code, two.code) == (0, 0), two.err
    assert two.out == f"{world / 'runs/two/model'}\n"
    assert close_to(stable_rows(world / "runs/one/metrics.jsonl"),
                    stable_rows(world / "runs/two/metrics.jsonl"))
    assert_tidy(world / "runs/two")
    checkpoint = world / "runs/two/checkpoints/step-000004"
    assert len(list(checkpoint.glob("optimizer-*-of-00002.safetensors"))) == 2
    # what follows a training needs one process, whatever the training had
    judged = ppocli("eval", "runs/two", "--json", cwd=world)
    assert judged.returncode == 0, judged.stderr
    summary = json.loads((world / "runs/two/summary.json").read_text())
    found = json.loads(judged.stdout)["figures"]["reward_mean"]
    assert found == pytest.approx(summary["eval_after"]["reward_mean"], abs=1e-4)
    exported = ppocli("export", "runs/two", "--step", "3", cwd=world)
    assert exported.returncode == 0, exported.stderr


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero1", "zero2", "zero3"])
def test_sigterm_saves_once_and_the_resume_is_exact(world, hardware):
    (world / "odd.py").write_text(REWARD)
    given = ["reward.fn=odd.py:unlike", f"hardware={hardware}", "ppo.num_steps=6",
             "checkpoint.every_steps=100", "eval.every_steps=2"]
    whole = run("train", *words("run_name=whole", *given), cwd=world)
    assert whole.code == 0, whole.err
    process = spawn("train", *words("run_name=cut", *given), cwd=world,
                    PPOCLI_FAULTS="optimize.minibatch@7:sleep")
    wait_for(lambda: rows_of(world / "runs/cut") >= 3, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "Stopped: stopped by SIGTERM at step" in err
    assert err.count("Stopped:") == 1
    wait_for_no_ranks("cut")
    [checkpoint] = (world / "runs/cut/checkpoints").glob("step-*")
    done = run("resume", "runs/cut", cwd=world)
    assert done.code == 0, done.err
    assert stable_rows(world / "runs/cut/metrics.jsonl") == stable_rows(
        world / "runs/whole/metrics.jsonl")
    one, other = (world / f"runs/{name}/model/model.safetensors" for name in ("whole", "cut"))
    assert one.read_bytes() == other.read_bytes()
    assert checkpoint.name.startswith("step-")


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero3"])
def test_a_reward_that_fails_on_one_rank_ends_all_with_one_message(world, hardware):
    (world / "odd.py").write_text(REWARD)
    started = time.monotonic()
    done = run("train", *words("run_name=bad", "reward.fn=odd.py:broken_on_one_rank",
                               f"hardware={hardware}"), cwd=world)
    assert done.code == 7
    assert "rank 1, reward" in done.err
    assert "no reward today" in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("Error:")]) == 1
    assert "terminate called" not in done.err
    assert time.monotonic() - started < 120
    wait_for_no_ranks("bad")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_goes_on_later(world, number):
    process = spawn("train", *words("run_name=killed", "hardware=zero2", *LONG[:2],
                                    "checkpoint.every_steps=1"), cwd=world)
    wait_for(lambda: rows_of(world / "runs/killed") >= 3, process)
    os.kill(ranks_of("killed")[number], signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert f"rank {number} was killed by SIGKILL" in err, err
    wait_for_no_ranks("killed")
    done = run("resume", "runs/killed", "ppo.num_steps=8", cwd=world)
    assert done.code == 0, done.err
    steps = [row["step"] for row in stable_rows(world / "runs/killed/metrics.jsonl")]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_within_the_timeout(world):
    process = spawn("train", *words("run_name=hung", "hardware=ddp", *LONG,
                                    "hardware.timeout_seconds=8"), cwd=world)
    wait_for(lambda: rows_of(world / "runs/hung") >= 2, process)
    hung = ranks_of("hung")[1]
    os.kill(hung, signal.SIGSTOP)
    started = time.monotonic()
    try:
        process.communicate(timeout=90)
    finally:
        for pid in ranks_of("hung"):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1
    assert time.monotonic() - started < 60
    wait_for_no_ranks("hung")


@pytest.mark.slow
def test_the_command_killed_outright_leaves_no_ranks(world):
    process = spawn("train", *words("run_name=orphan", "hardware=ddp", *LONG), cwd=world)
    wait_for(lambda: rows_of(world / "runs/orphan") >= 2, process)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while ranks_of("orphan"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    summary = json.loads((world / "runs/orphan/summary.json").read_text())
    assert summary["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("more", [["hardware=ddp"], ["hardware=zero3"]])
def test_another_number_of_processes_goes_on(world, more):
    done = run("train", *words("run_name=moved", *more), cwd=world)
    assert done.code == 0, done.err
    done = run("resume", "runs/moved", "ppo.num_steps=6", "hardware.num_processes=1",
               "hardware.zero_stage=0", cwd=world)
    assert done.code == 0, done.err
    assert "changed on resume: hardware.num_processes: 2 -> 1" in done.err
    assert json.loads((world / "runs/moved/summary.json").read_text())["steps"] == 6


@pytest.mark.slow
def test_two_nodes_make_one_run(world):
    """Two launchers with an address to meet at, as two machines have that share a file system."""
    common = words("run_name=nodes", "hardware=multi_node",
                   f"hardware.rdzv_endpoint=127.0.0.1:{free_port()}")
    processes = [spawn("train", *common, f"hardware.node_rank={rank}", cwd=world)
                 for rank in (1, 0)]
    ended = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    alone = run("train", *words("run_name=alone"), cwd=world)
    assert alone.code == 0
    assert close_to(stable_rows(world / "runs/alone/metrics.jsonl"),
                    stable_rows(world / "runs/nodes/metrics.jsonl"))
    summary = json.loads((world / "runs/nodes/summary.json").read_text())
    assert summary["status"] == "finished"


CONTRADICTIONS = [
    (["hardware.offload_param=true", "hardware.zero_stage=2"], "offload_param needs zero_stage 3"),
    (["hardware.offload_optimizer=true"], "offload_optimizer needs zero_stage 1"),
    (["hardware.num_nodes=2", "run_name=x"], "2 nodes need a place to meet"),
    (["hardware.node_rank=1"], "node_rank 1 must be below num_nodes 1"),
    (["hardware.deepspeed_config=ds.json"], "DeepSpeed is used with zero_stage 1 to 3 only"),
    (["hardware.deepspeed_config=ds.json", "hardware.zero_stage=1"],
     "sets gradient_accumulation_steps to 4"),
    (["hardware.deepspeed_config=none.json", "hardware.zero_stage=1"], "can't be read as JSON")]


@pytest.mark.parametrize(("more", "text"), CONTRADICTIONS)
def test_contradictions_are_told_before_anything_starts(world, command, more, text):
    Path("ds.json").write_text('{"gradient_accumulation_steps": 4}')
    done = command(*words(*more))
    assert done.code == 2
    assert text in done.said
    assert not Path("runs").exists()


def test_python_objects_need_one_process(world):
    code = ("import ppocli\n"
            "try:\n"
            f"    ppocli.train({words('hardware=ddp')!r}, reward_fn=lambda outputs, **_: [0.0])\n"
            "except ppocli_error as error:\n"
            "    print(error.exit_code, error)\n")
    code = "from ppocli.errors import ConfigError as ppocli_error\n" + code
    done = subprocess.run([sys.executable, "-c", code], cwd=world, text=True, capture_output=True,
                          timeout=120, check=False)
    assert done.stdout.startswith("2 Python objects can't be handed to several processes."), \
        done.stderr
