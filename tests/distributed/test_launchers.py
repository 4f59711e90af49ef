"""Runs whose ranks somebody else starts: torchrun, accelerate, DeepSpeed, and srun, whose variables
are set here, for there is no Slurm where tests run."""

import base64
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import environment, stable_rows
from ranks import free_port
from runs import assert_tidy, run, spawn, wait_for, words

pytestmark = pytest.mark.timeout(300)
ONE = ("ppo.num_steps=1", "eval.every_steps=null", "eval.at_start=false")
BROKEN = '''\
import os


def broken_on_one_rank(outputs, **columns):
    if os.environ.get("RANK") == "1":
        raise ValueError("no reward today")
    return [float(len(text)) for text in outputs]


def a_bug(outputs, **columns):
    import torch

    if os.environ.get("RANK") == "1":
        torch.distributed.all_gather_object = None
    return [1.0 for _ in outputs]


def dies_on_one_rank(outputs, **columns):
    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), 9)
    return [1.0 for _ in outputs]
'''


def task(rank: int, *, nodes: int = 1, world: int = 2) -> dict[str, str]:
    """The variables of a task of ``srun --ntasks=2`` on this machine."""
    each = world // nodes
    return {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8",
            "SLURM_STEP_NUM_TASKS": str(world), "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each),
            "SLURM_NODEID": str(rank // each)}


def start(given: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *given], cwd=cwd, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=environment(**env), process_group=0)


def srun(*given: str, cwd: Path, nodes: int = 1) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each of two tasks."""
    port = str(free_port())
    tasks = [spawn(*given, cwd=cwd, **{**task(rank, nodes=nodes), "MASTER_PORT": port})
             for rank in (1, 0)]
    ended = [(*process.communicate(timeout=200), process.returncode) for process in tasks]
    return [(code, out, err) for out, err, code in reversed(ended)]


def launch(*given: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    """A launcher as a module, to its end."""
    process = start(list(given), cwd, **env)
    out, err = process.communicate(timeout=250)
    return process.returncode, out, err


def torchrun(*given: str, cwd: Path) -> tuple[int, str, str]:
    return launch("torch.distributed.run", "--nproc-per-node=2", "--master-port",
                  str(free_port()), "-m", "ppocli", *given, cwd=cwd)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("Error:", "Stopped:"))]


def assert_same_as_alone(world: Path, name: str, *more: str) -> None:
    run("train", *words("run_name=alone", *ONE, *more), cwd=world, code=0)
    rows, others = (stable_rows(world / f"runs/{run_name}/metrics.jsonl")
                    for run_name in ("alone", name))
    assert len(rows) == len(others) == 1
    assert rows[0].keys() == others[0].keys()
    for key, value in rows[0].items():
        assert others[0][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    assert_tidy(world / "runs" / name)


def test_two_tasks_of_srun_are_the_ranks_of_one_run(world):
    first, second = srun("train", *words(*ONE), cwd=world)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    [folder] = (world / "runs").iterdir()
    assert first[1].splitlines()[-1] == str(folder / "model")
    assert second[1] == ""
    assert "Error" not in second[2]
    settings = (folder / "config.yaml").read_text()
    assert "num_processes: 2\n" in settings
    checkpoint = folder / "checkpoints/step-000001"
    assert len(list(checkpoint.glob("optimizer-*-of-00002.safetensors"))) == 2
    folder.rename(world / "runs/tasks")
    assert_same_as_alone(world, "tasks")


def test_a_batch_script_is_one_process(world, command, monkeypatch):
    for name, value in {**task(0), "SLURM_STEP_ID": ""}.items():
        monkeypatch.setenv(name, value)
    command(*words("run_name=one", *ONE), code=0)
    assert "num_processes: 1\n" in Path("runs/one/config.yaml").read_text()


def test_wrong_words_are_told_once_and_end_all_tasks_alike(world):
    first, second = srun("train", *words(*ONE, "hardware.num_processes=3", "run_name=x"), cwd=world)
    assert (first[0], second[0]) == (2, 2)
    assert "hardware.num_processes is 3, but srun has started 2 processes" in first[2]
    assert len(errors(first[2] + second[2])) == 1
    assert not (world / "runs").exists()


@pytest.mark.slow
def test_one_task_a_node_starts_ranks_of_its_own(world):
    first, second = srun("train", *words(*ONE, "hardware=ddp", "hardware.num_processes=1"),
                         cwd=world, nodes=2)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    first, second = srun("train", *words(*ONE, "hardware=zero2", "ppo.num_rollouts=16"), cwd=world,
                         nodes=2)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    folder = max((world / "runs").iterdir())
    settings = (folder / "config.yaml").read_text()
    assert "num_processes: 2\n  num_nodes: 2\n" in settings
    assert len(list(folder.glob("checkpoints/step-000001/optimizer-*-of-00004.*"))) == 4
    assert len([line for line in (first[1] + second[1]).splitlines()
                if line.endswith("/model")]) == 1


@pytest.mark.slow
def test_what_needs_one_process_says_so_once(world):
    run("train", *words("run_name=done", *ONE), cwd=world, code=0)
    for given, text in ((["eval", "runs/done"], "This command works in one process"),
                        (["train", "-m", *words(*ONE), "seed=1,2"], "A sweep works in one"),
                        (["train", *words(*ONE), "--dry-run"], "This command works in one")):
        first, second = srun(*given, cwd=world)
        assert (first[0], second[0]) == (2, 2), first[2]
        assert text in first[2]
        assert len(errors(first[2] + second[2])) == 1
    first, second = srun("train", *words(*ONE), "--cfg", "job", "-p", "seed", cwd=world)
    assert (first[0], second[0], second[1]) == (0, 0, "")
    assert first[1] == "0\n"
    assert [path.name for path in (world / "runs").iterdir()] == ["done"]


@pytest.mark.slow
def test_python_in_a_launcher_is_sent_to_the_command(world):
    code = f"import ppocli; ppocli.train({words(*ONE)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=world, text=True, capture_output=True,
                          timeout=120, check=False, env=environment(**task(0)))
    assert "srun has started 2 processes, and this starts its own" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero3"])
def test_torchrun(world, hardware):
    code, out, err = torchrun("train", *words("run_name=run", *ONE, f"hardware={hardware}"),
                              cwd=world)
    assert code == 0, err
    assert out.splitlines()[-1] == str(world / "runs/run/model")
    assert out.count("model        ") == 1
    assert_same_as_alone(world, "run")
    code, out, err = torchrun("resume", "run", "ppo.num_steps=2", cwd=world)
    assert code == 0, err
    assert [row["step"] for row in stable_rows(world / "runs/run/metrics.jsonl")] == [1, 2]


@pytest.mark.slow
def test_torchrun_with_one_process(world):
    code, out, err = launch("torch.distributed.run", "--nproc-per-node=1", "-m", "ppocli", "train",
                            *words("run_name=run", *ONE, "hardware=zero2"), cwd=world)
    assert code == 0, err
    assert out.splitlines()[-1] == str(world / "runs/run/model")


@pytest.mark.slow
def test_accelerate_launch(world):
    """On a CPU accelerate starts several processes only if told that there are GPUs."""
    code, out, err = launch(
        "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
        "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}", "-m",
        "ppocli", "train", *words("run_name=run", *ONE), cwd=world)
    assert code == 0, err
    assert str(world / "runs/run/model") in out.splitlines()
    assert_same_as_alone(world, "run")


@pytest.mark.slow
def test_deepspeeds_launcher(world):
    """The part of it that runs on each machine, as the part that reads a hostfile starts it."""
    info = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    code, out, err = launch(
        "deepspeed.launcher.launch", f"--world_info={info}", "--master_addr=127.0.0.1",
        f"--master_port={free_port()}", "--module", "ppocli", "train",
        *words("run_name=run", *ONE, "hardware=zero2"), cwd=world)
    assert code == 0, err
    assert str(world / "runs/run/model") in out.splitlines()
    assert_same_as_alone(world, "run")


@pytest.mark.slow
@pytest.mark.parametrize(("function", "codes", "text"), [
    ("broken_on_one_rank", (7, 7), "no reward today"),
    ("a_bug", (1, 1), "Error: rank 1: TypeError"),
    ("dies_on_one_rank", (1, -9), "rank 0 lost the connection to another rank")])
def test_a_failure_on_one_rank_is_told_once(world, function, codes, text):
    (world / "odd.py").write_text(BROKEN)
    started = time.monotonic()
    first, second = srun("train", *words("run_name=bad", *ONE, f"reward.fn=odd.py:{function}"),
                         cwd=world)
    assert (first[0], second[0]) == codes, first[2] + second[2]
    assert text in first[2] + second[2]
    assert len(errors(first[2] + second[2])) == 1
    assert time.monotonic() - started < 120


@pytest.mark.slow
def test_memory_that_runs_out_under_torchrun_ends_all_with_the_command_to_go_on(world):
    code, out, err = launch(
        "torch.distributed.run", "--nproc-per-node=2", "--master-port", str(free_port()), "-m",
        "ppocli", "train", *words("run_name=r", "ppo.num_steps=2"), cwd=world,
        PPOCLI_FAULTS="optimize.forward>1@6+#1:oom")
    assert code != 0
    [message] = errors(err)
    assert message.startswith("Error: rank 1, step 2: out of memory with 3 rows a pass; last "
                              "healthy: step 1 in "), err
    assert f"ppocli resume {world}/runs/r ppo.micro_batch_size=1 (the result stays" in err
    assert "exitcode  : 8" in out + err
    done = run("resume", "runs/r", "hardware.num_processes=1", "ppo.micro_batch_size=1", cwd=world)
    assert done.code == 0, done.err


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_once(world):
    process = start(["torch.distributed.run", "--nproc-per-node=2", "--master-port",
                     str(free_port()), "-m", "ppocli", "train",
                     *words("run_name=cut", "ppo.num_steps=400", "eval.every_steps=100",
                            "checkpoint.every_steps=100")], world)
    metrics = world / "runs/cut/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert len(errors(err)) == 1, err
    assert "Stopped: stopped by SIGTERM at step" in err
    assert len(list((world / "runs/cut/checkpoints").glob("step-*"))) == 1
    done = run("resume", "runs/cut", "ppo.num_steps=5", cwd=world)
    assert done.code in (0, 2), done.err
