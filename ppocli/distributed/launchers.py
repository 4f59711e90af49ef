"""How this process was launched: torchrun, accelerate, DeepSpeed, srun or ppocli itself may have
started it as one of several.

Only this module reads the variables of launchers. Nothing heavy is imported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ppocli.errors import ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# step numbers that Slurm gives to a batch script and to an interactive shell
_NO_STEP = 0xFFFFFFF0
# below the ports that systems hand out by themselves, from 32768 on
_PORTS = range(15000, 30000)


@dataclass(frozen=True, slots=True)
class Launched:
    """This process among those that a launcher started."""

    by: str
    """name of the launcher for messages, as far as it is recognised"""
    rank: int
    world: int
    local_world: int | None
    """processes on this machine; None if the launcher doesn't say, or machines differ"""
    variables: Mapping[str, str]
    """the environment that torch, accelerate and DeepSpeed read, as torchrun sets it"""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which composes and checks the configuration and prints for
        all."""
        return self.rank == 0


def find_launch(environ: Mapping[str, str]) -> Launched | None:
    """This process's place among those that were started together; None if it was started alone.

    torchrun, ``accelerate launch`` and DeepSpeed's launcher set RANK and its like. A step of srun
    counts as well; a batch script and an interactive shell of Slurm are one process.

    Raises:
        ConfigError: variables are missing or aren't numbers, or contradict each other.
    """
    if ("RANK" in environ and _int_of(environ, "WORLD_SIZE", 1) > 1) or all(
            name in environ for name in _NAMES):
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else \
            "deepspeed" if "CROSS_SIZE" in environ else "the launcher"
    elif _int_of(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and (
            _int_of(environ, "SLURM_STEP_ID", _NO_STEP) < _NO_STEP):
        by, environ = "srun", {**environ, **_from_slurm(environ)}
    else:
        return None
    if missing := [name for name in _NAMES if not environ.get(name)]:
        raise ConfigError(
            f"The environment variables {' and '.join(missing)} of {by} are not set.",
            where=", ".join(missing), fix="start the run through torchrun, accelerate launch, "
            "deepspeed or srun, which set all of them; or, for one process: unset RANK WORLD_SIZE")
    rank, world, local, _ = (_int_of(environ, name) for name in _NAMES if name != "MASTER_ADDR")
    each = _int_of(environ, "LOCAL_WORLD_SIZE", _int_of(environ, "LOCAL_SIZE", 0)) or None
    if rank >= world or (each is not None and local >= each):
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local} and "
                          f"LOCAL_WORLD_SIZE={each or 'unset'} contradict each other.",
                          where="RANK, LOCAL_RANK", fix="ranks count from 0")
    variables = {name: environ[name] for name in _NAMES}
    return Launched(by, rank, world, each, variables | (
        {} if each is None else {"LOCAL_WORLD_SIZE": str(each)}))


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set for a task of srun.

    Names: https://slurm.schedmd.com/srun.html, "output environment variables".
    """
    job, step = _int_of(environ, "SLURM_JOB_ID", 0), _int_of(environ, "SLURM_STEP_ID")
    even = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    variables = {
        "RANK": environ.get("SLURM_PROCID", ""), "LOCAL_RANK": environ.get("SLURM_LOCALID", ""),
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"], "LOCAL_WORLD_SIZE": even[1] if even else "",
        "MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST", "")) or "127.0.0.1",
        "MASTER_PORT": str(_PORTS[(16 * job + step) % len(_PORTS)])}
    return variables | {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")
                        if environ.get(name)}


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: node01 of ``node[01-03,07],gpu2``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])*", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")


def my_rank() -> int:
    """This process's number among those of the run; 0 if it was started alone."""
    return _int_of(os.environ, "RANK", 0)


def launched_world() -> int:
    """How many processes were started together."""
    return _int_of(os.environ, "WORLD_SIZE", 1)


def launched_here(default: int) -> int:
    """How many of these processes run on this machine; ``default`` if the launcher doesn't say."""
    return _int_of(os.environ, "LOCAL_WORLD_SIZE", default)


def _int_of(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that holds a whole number.

    Raises:
        ConfigError: it is missing and has no default, or holds something else.
    """
    text = environ.get(name) or ("" if default is None else str(default))
    if not re.fullmatch(r"\d{1,18}", text):
        raise ConfigError(f"The environment variable {name} is {text!r}, not a whole number.",
                          where=name, fix="start the run through torchrun, accelerate launch, "
                          f"deepspeed or srun, which set it; or unset {name} for one process")
    return int(text)
