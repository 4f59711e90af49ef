"""Start small jobs of several ranks from tests, and read what they left."""

import json
import os
from pathlib import Path

import pytest
from helpers import environment
from runs import free_port, wait_for
from sessions import FIXED, small_config
from warm import begin

REWARD = '''\
def unlike(outputs, **columns):
    """Draws random numbers: each rank has its own, and they go on exactly."""
    import random

    return [len(text) + random.random() for text in outputs]
'''
LONG = ("ppo.num_steps=400", "eval.every_steps=100", "checkpoint.every_steps=100")
SCRIPT = Path(__file__).with_name("one_update.py")
ODD = {**FIXED, "ppo.num_steps": 3, "ppo.num_rollouts": 13, "ppo.mini_batch_size": 7,
       "ppo.micro_batch_size": 2, "ppo.chunk_size": 3, "generation.max_new_tokens": 10,
       "hardware.device": "cpu", "hardware.num_threads": 1, "ppo.optimizer.name": "sgd",
       "ppo.optimizer.lr": 1e-2, "ppo.scheduler.name": "constant", "prompts.eval.limit": 5,
       # each job would measure for itself which products are faster, and they round differently
       "hardware.gemm": "default"}
"""counts that don't divide: 13 samples, minibatches of 7, micro-batches of 2, chunks of 3"""


def odd_config(world: Path, **more: object) -> dict[str, object]:
    """A configuration of :data:`ODD` counts on a tiny model below ``world``."""
    small_config(world)
    return {"model.path": str(world / "lm"), "prompts.path": str(world / "prompts.jsonl"), **ODD,
            **more}


def under(stage: int, folder: Path) -> dict[str, object]:
    """The settings of a stage. DeepSpeed would leave all parameters of so small a model whole."""
    if stage < 3:
        return {"hardware.zero_stage": stage}
    file = folder / "deepspeed.json"
    file.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}')
    return {"hardware.zero_stage": 3, "hardware.deepspeed_config": str(file)}


def run_job(folder: Path, name: str, config: dict, *words: str, world: int, script: Path = SCRIPT,
            timeout: float = 240, **env: str) -> dict:
    """Run one_update.py, or another script, on ``world`` ranks; returns the tensors it wrote.

    Each rank is a process with the variables that torchrun sets: fewer processes to start than with
    torchrun itself, which the tests of the command go through.
    """
    from safetensors.torch import load_file

    file, out = folder / f"{name}.json", folder / f"{name}.safetensors"
    file.write_text(json.dumps(config))
    port = str(free_port())
    processes = []
    for rank in range(world):
        variables = {} if world == 1 and not config.get("hardware.zero_stage") else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(begin([str(script), str(file), str(out), *words], cwd=folder,
                               env=environment(**variables, **env)))
    outputs = ["".join(process.communicate(timeout=timeout)) for process in processes]
    for process, said in zip(processes, outputs, strict=True):
        assert process.returncode == 0, said[-4000:]
    return load_file(out)


def largest_difference(one: dict, other: dict, prefix: str) -> float:
    """Over all tensors whose names begin so, which both must have."""
    names = [name for name in one if name.startswith(prefix)]
    assert names
    assert set(names) == {name for name in other if name.startswith(prefix)}
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in names
               if one[name].numel())


def assert_same_update(one: dict, other: dict, tolerance: float = 1e-6) -> None:
    """Two results of one_update.py. The KL of an evaluation is a sum over the tokens of a response,
    so that as many roundings as these may add up; on a processor without AVX-512 they come to 1.1
    times the tolerance of one."""
    assert other["counts"].tolist() == one["counts"].tolist()
    for prefix in ("experience/", "terms", "weight/"):
        difference = largest_difference(one, other, prefix)
        assert difference < tolerance, (prefix, difference)
    tokens = ODD["generation.max_new_tokens"]
    assert largest_difference(one, other, "eval") < tolerance * tokens


def errors_in(said: str) -> list[str]:
    """The first lines of all that ended the command."""
    return [line for line in said.splitlines() if line.startswith(("Error:", "Stopped:"))]


def ranks_of(run_dir: Path) -> list[int]:
    """Pids of the ranks of a run, by their command lines, which name this very folder: other tests,
    and whoever else works here, have runs of the same name."""
    found, wanted = [], os.fsencode(run_dir.resolve())
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"ppocli.launch.worker" in line and wanted in line:
                found.append(int(folder.name))
    return sorted(found)


def rows_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_no_ranks(run_dir: Path, seconds: float = 10) -> None:
    wait_for(lambda: not ranks_of(run_dir), seconds=seconds)


def close_to(rows: list[dict], others: list[dict], rel: float = 1e-3, abs: float = 1e-4) -> bool:
    return len(rows) == len(others) and all(
        row.keys() == other.keys() and all(
            row[name] == pytest.approx(other[name], rel=rel, abs=abs) for name in row)
        for row, other in zip(rows, others, strict=True))
