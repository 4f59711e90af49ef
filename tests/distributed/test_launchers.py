"""Runs whose ranks somebody else starts: torchrun, accelerate, DeepSpeed, and srun, whose variables
are set here, for there is no Slurm where tests run."""

import base64
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment, stable_rows
from ranks import LONG, close_to, errors_in, rows_of
from runs import Ended, assert_tidy, free_port, run, spawn, wait_for, words

pytestmark = pytest.mark.timeout(300)
ONE = ("ppo.num_steps=1", "eval.every_steps=null", "eval.at_start=false")


def task(rank: int, *, nodes: int = 1, world: int = 2) -> dict[str, str]:
    """The variables of a task of ``srun --ntasks=2`` on this machine."""
    each = world // nodes
    return {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8",
            "SLURM_STEP_NUM_TASKS": str(world), "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each),
            "SLURM_NODEID": str(rank // each)}


def srun(*given: str, cwd: Path, nodes: int = 1, codes: tuple[int, int] = (0, 0)) -> list[Ended]:
    """What each of two tasks came to, which have to end with these codes."""
    port = str(free_port())
    tasks = [spawn(*given, cwd=cwd, **{**task(rank, nodes=nodes), "MASTER_PORT": port})
             for rank in (1, 0)]
    said = [process.communicate(timeout=200) for process in tasks]
    assert tuple(process.returncode for process in reversed(tasks)) == codes, said
    return [Ended(process.returncode, *each)
            for process, each in zip(reversed(tasks), reversed(said), strict=True)]


def start(*given: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """A launcher as a module."""
    return subprocess.Popen([sys.executable, "-m", *given], cwd=cwd, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=environment(**env), process_group=0)


def launch(*given: str, cwd: Path, code: int | None = 0, **env: str) -> Ended:
    """A launcher to its end."""
    process = start(*given, cwd=cwd, **env)
    out, err = process.communicate(timeout=250)
    ended = Ended(process.returncode, out, err)
    assert code is None or ended.code == code, err
    return ended


def torchrun(ranks: int = 2) -> tuple[str, ...]:
    return ("torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port",
            str(free_port()), "-m", "ppocli")


def accelerate() -> tuple[str, ...]:
    """On a CPU it starts several processes only if told that there are GPUs."""
    return ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
            "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}",
            "-m", "ppocli")


def deepspeed() -> tuple[str, ...]:
    """The part of it that runs on each machine, as the part that reads a hostfile starts it."""
    info = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    return ("deepspeed.launcher.launch", f"--world_info={info}", "--master_addr=127.0.0.1",
            f"--master_port={free_port()}", "--module", "ppocli")


def assert_same_as_alone(world: Path, name: str) -> None:
    run("train", *words("run_name=alone", *ONE), cwd=world, code=0)
    rows, others = (stable_rows(world / f"runs/{run_name}/metrics.jsonl")
                    for run_name in ("alone", name))
    assert len(rows) == 1
    assert close_to(others, rows)
    assert_tidy(world / "runs" / name)


@pytest.mark.slow
def test_two_tasks_of_srun_are_the_ranks_of_one_run(world):
    first, second = srun("train", *words(*ONE), cwd=world)
    [folder] = (world / "runs").iterdir()
    assert first.out.splitlines()[-1] == str(folder / "model")
    assert second.out == ""
    assert "Error" not in second.err
    settings = (folder / "config.yaml").read_text()
    assert "num_processes: 2\n" in settings
    checkpoint = folder / "checkpoints/step-000001"
    assert len(list(checkpoint.glob("optimizer-*-of-00002.safetensors"))) == 2
    assert_tidy(folder)


def test_wrong_words_are_told_once_and_end_all_tasks_alike(world):
    first, second = srun("train", *words(*ONE, "hardware.num_processes=3", "run_name=x"), cwd=world,
                         codes=(2, 2))
    assert "hardware.num_processes is 3, but srun has started 2 processes" in first.err
    assert len(errors_in(first.err + second.err)) == 1
    assert not (world / "runs").exists()


@pytest.mark.slow
def test_torchrun(world):
    done = launch(*torchrun(), "train", *words("run_name=run", *ONE, "hardware=zero3"), cwd=world)
    assert done.out.splitlines()[-1] == str(world / "runs/run/model")
    assert done.out.count("run folder   ") == 1
    assert_same_as_alone(world, "run")
    launch(*torchrun(), "resume", "run", "ppo.num_steps=2", cwd=world)
    assert [row["step"] for row in stable_rows(world / "runs/run/metrics.jsonl")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "more"), [
    (accelerate, []), (deepspeed, ["hardware=zero2"])])
def test_other_launchers(world, launcher, more):
    done = launch(*launcher(), "train", *words("run_name=run", *ONE, *more), cwd=world)
    assert str(world / "runs/run/model") in done.out.splitlines()
    assert_same_as_alone(world, "run")


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_once(world):
    process = start(*torchrun(), "train", *words("run_name=cut", *LONG), cwd=world)
    wait_for(lambda: rows_of(world / "runs/cut") > 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert len(errors_in(err)) == 1, err
    assert "Stopped: stopped by SIGTERM at step" in err
    assert len(list((world / "runs/cut/checkpoints").glob("step-*"))) == 1
    done = run("resume", "runs/cut", "ppo.num_steps=5", cwd=world)
    assert done.code in (0, 2), done.err
