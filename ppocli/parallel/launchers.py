"""What a launcher says of this process: torchrun, accelerate, DeepSpeed or srun have started it as
one of several. Only the environment is read; nothing heavy is imported."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ppocli.errors import ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# numbers that Slurm gives to what is no step of srun: the batch script, an interactive shell
_NO_STEP = 0xFFFFFFF0
# below the ports that systems hand out by themselves, from 32768 on
_PORTS = range(15000, 30000)


@dataclass(frozen=True, slots=True)
class Launched:
    """This process among those that a launcher started."""

    by: str
    """for messages: the launcher, as far as it can be told"""
    rank: int
    world: int
    local_rank: int
    local_world: int | None
    """processes on this machine; None where the launcher doesn't tell, or machines differ"""
    address: str
    port: int
    on_each_node: bool = False
    """srun, one task on each of several nodes: the task may be a node rather than a rank"""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which composes, checks and speaks for all."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """The environment that torch, accelerate and DeepSpeed read, as torchrun sets it."""
        found = {"RANK": self.rank, "WORLD_SIZE": self.world, "LOCAL_RANK": self.local_rank,
                 "MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        if self.local_world is not None:
            found["LOCAL_WORLD_SIZE"] = self.local_world
        return {name: str(value) for name, value in found.items()}


def find_launch(environ: Mapping[str, str]) -> Launched | None:
    """This process's place among those that were started together; None if it was started alone.

    torchrun, ``accelerate launch`` and DeepSpeed's launcher set RANK and its like. Of Slurm's
    variables only those of a step are taken: a batch script and an interactive shell have SLURM_*
    set, too, and are one process.

    Raises:
        ConfigError: variables are missing or are no numbers.
    """
    if ("RANK" in environ and int_of(environ, "WORLD_SIZE", 1) > 1) or all(
            name in environ for name in _NAMES):
        return _from_variables(environ)
    return _from_slurm(environ)


def int_of(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that holds a whole number.

    Raises:
        ConfigError: it is missing and has no default, or holds something else.
    """
    text = environ.get(name) or ("" if default is None else str(default))
    if not re.fullmatch(r"\d{1,18}", text):
        raise ConfigError(f"The environment variable {name} is {text!r}, no whole number.",
                          where=name, fix="start the run through torchrun, accelerate launch, "
                          f"deepspeed or srun, which set it; or unset {name} for one process")
    return int(text)


def _from_variables(environ: Mapping[str, str]) -> Launched:
    missing = [name for name in _NAMES if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set in the environment, {' and '.join(missing)} not.",
            where=", ".join(missing), fix="start the run through torchrun, accelerate launch or "
            "deepspeed, which set all of them; or, for one process: unset RANK WORLD_SIZE")
    rank, world, local = (int_of(environ, name) for name in _NAMES[:3])
    each = int_of(environ, "LOCAL_WORLD_SIZE", int_of(environ, "LOCAL_SIZE", 0)) or None
    if rank >= world or (each is not None and local >= each):
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local} and "
                          f"LOCAL_WORLD_SIZE={each or 'unset'} contradict each other.",
                          where="RANK, LOCAL_RANK", fix="ranks count from 0")
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else \
        "deepspeed" if "CROSS_SIZE" in environ else "the launcher"
    return Launched(by, rank, world, local, each, environ["MASTER_ADDR"],
                    int_of(environ, "MASTER_PORT"))


def _from_slurm(environ: Mapping[str, str]) -> Launched | None:
    """The place among the tasks of a step of srun.

    Names: https://slurm.schedmd.com/srun.html, "output environment variables". A shell within an
    allocation keeps the job's SLURM_NTASKS, so the step's own number counts.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _NO_STEP or "SLURM_PROCID" not in environ:
        return None
    job_tasks = int_of(environ, "SLURM_NTASKS", 1)
    world = int_of(environ, "SLURM_STEP_NUM_TASKS", job_tasks)
    if world < 2:
        return None
    nodes = int_of(environ, "SLURM_STEP_NUM_NODES", int_of(environ, "SLURM_NNODES", 1))
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    address = environ.get("MASTER_ADDR") or next(hosts_of(hosts), "127.0.0.1")
    job = int_of(environ, "SLURM_JOB_ID", int_of(environ, "SLURM_JOBID", 0))
    # every second port: the next one is for ranks that nodes start themselves
    port = _PORTS.start + 2 * ((16 * job + int(step)) % (len(_PORTS) // 2))
    even = re.fullmatch(r"(\d+)(\(x\d+\))?", layout)
    return Launched("srun", int_of(environ, "SLURM_PROCID"), world,
                    int_of(environ, "SLURM_LOCALID"), int(even[1]) if even else None, address,
                    int_of(environ, "MASTER_PORT", port),
                    on_each_node=nodes > 1 and nodes == world)


def hosts_of(nodelist: str) -> Iterator[str]:
    """The hosts of Slurm's short form, in its order: ``node[01-03,07],gpu2`` gives node01, node02,
    node03, node07, gpu2; several brackets in one name multiply."""
    for name in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", name)
        choices = [list(_numbers(piece)) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        yield from ("".join(parts) for parts in itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    """``01-03,07`` as 01, 02, 03, 07."""
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not dash:
            yield low
            continue
        yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
