"""Start small jobs of several ranks from tests, and read what they left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from helpers import environment

SCRIPT = Path(__file__).with_name("one_update.py")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_job(folder: Path, name: str, config: dict, *words: str, world: int, **env: str
            ) -> dict:
    """Run one_update.py on ``world`` ranks; returns the tensors it wrote.

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
        processes.append(subprocess.Popen(
            [sys.executable, str(SCRIPT), str(file), str(out), *words], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(**variables, **env)))
    outputs = [process.communicate(timeout=240)[0] for process in processes]
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
