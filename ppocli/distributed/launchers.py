"""How this process was launched: torchrun, accelerate, DeepSpeed, srun or our own launcher may have
started it as one of several. Also the network interface over which our own ranks meet, and the
files through which they report to the process that started them.

Only this module reads the variables of launchers. Nothing heavy is imported.
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ppocli.errors import ConfigError

OUTCOMES = "PPOCLI_OUTCOMES"
"""environment variable: the folder into which each rank writes its outcome"""
NODE_FAILED = ".node-failed"
"""file in the run folder, which all nodes share, that says that a node has failed"""
_LIFELINE = "lifeline"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# numbers that Slurm gives to what is no step of srun: the batch script, an interactive shell
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
    local_rank: int
    local_world: int | None
    """processes on this machine; None if the launcher doesn't say, or machines differ"""
    address: str
    port: int
    on_each_node: bool = False
    """srun, one task on each of several nodes: the task may be a node rather than a rank"""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which composes and checks the configuration and prints for
        all."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """The environment that torch, accelerate and DeepSpeed read, as torchrun sets it."""
        variables = {"RANK": self.rank, "WORLD_SIZE": self.world, "LOCAL_RANK": self.local_rank,
                     "MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        if self.local_world is not None:
            variables["LOCAL_WORLD_SIZE"] = self.local_world
        return {name: str(value) for name, value in variables.items()}


def find_launch(environ: Mapping[str, str]) -> Launched | None:
    """This process's place among those that were started together; None if it was started alone.

    torchrun, ``accelerate launch`` and DeepSpeed's launcher set RANK and its like. Of Slurm's
    variables only those of a step are taken: a batch script and an interactive shell have SLURM_*
    set, too, and are one process.

    Raises:
        ConfigError: variables are missing or are no numbers.
    """
    if ("RANK" in environ and _int_of(environ, "WORLD_SIZE", 1) > 1) or all(
            name in environ for name in _NAMES):
        return _from_variables(environ)
    return _from_slurm(environ)


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
        raise ConfigError(f"The environment variable {name} is {text!r}, no whole number.",
                          where=name, fix="start the run through torchrun, accelerate launch, "
                          f"deepspeed or srun, which set it; or unset {name} for one process")
    return int(text)


def _from_variables(environ: Mapping[str, str]) -> Launched:
    if missing := [name for name in _NAMES if not environ.get(name)]:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set in the environment, {' and '.join(missing)} not.",
            where=", ".join(missing), fix="start the run through torchrun, accelerate launch or "
            "deepspeed, which set all of them; or, for one process: unset RANK WORLD_SIZE")
    rank, world, local = (_int_of(environ, name) for name in _NAMES[:3])
    each = _int_of(environ, "LOCAL_WORLD_SIZE", _int_of(environ, "LOCAL_SIZE", 0)) or None
    if rank >= world or (each is not None and local >= each):
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local} and "
                          f"LOCAL_WORLD_SIZE={each or 'unset'} contradict each other.",
                          where="RANK, LOCAL_RANK", fix="ranks count from 0")
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else \
        "deepspeed" if "CROSS_SIZE" in environ else "the launcher"
    return Launched(by, rank, world, local, each, environ["MASTER_ADDR"],
                    _int_of(environ, "MASTER_PORT"))


def _from_slurm(environ: Mapping[str, str]) -> Launched | None:
    """The place among the tasks of a step of srun.

    Names: https://slurm.schedmd.com/srun.html, "output environment variables". A shell within an
    allocation keeps the job's SLURM_NTASKS, so the step's own number counts.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _NO_STEP or "SLURM_PROCID" not in environ:
        return None
    world = _int_of(environ, "SLURM_STEP_NUM_TASKS", _int_of(environ, "SLURM_NTASKS", 1))
    if world < 2:
        return None
    nodes = _int_of(environ, "SLURM_STEP_NUM_NODES", _int_of(environ, "SLURM_NNODES", 1))
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    address = environ.get("MASTER_ADDR") or first_host(hosts) or "127.0.0.1"
    job = _int_of(environ, "SLURM_JOB_ID", _int_of(environ, "SLURM_JOBID", 0))
    # every second port: the next one is for ranks that nodes start themselves
    port = _PORTS.start + 2 * ((16 * job + int(step)) % (len(_PORTS) // 2))
    even = re.fullmatch(r"(\d+)(\(x\d+\))?", layout)
    return Launched("srun", _int_of(environ, "SLURM_PROCID"), world,
                    _int_of(environ, "SLURM_LOCALID"), int(even[1]) if even else None, address,
                    _int_of(environ, "MASTER_PORT", port),
                    on_each_node=nodes > 1 and nodes == world)


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: node01 of ``node[01-03,07],gpu2``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])*", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")


def interface_towards(host: str) -> str | None:
    """Name of the network interface from which this machine reaches ``host``, or is reached as
    ``host``; None if that can't be determined (IPv6, several candidates)."""
    import psutil

    names = {entry.address: name for name, entries in psutil.net_if_addrs().items()
             for entry in entries if entry.family == socket.AF_INET}
    try:
        addresses = socket.getaddrinfo(host, 9, family=socket.AF_INET, type=socket.SOCK_DGRAM)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(addresses[0][4])  # chooses a route; sends nothing
            local_address = str(probe.getsockname()[0])
    except OSError:
        return None
    if not local_address.startswith("127."):
        return names.get(local_address)
    if host == "localhost" or host.startswith("127."):
        return names.get("127.0.0.1")
    # this machine's own name, which stands for a loopback address only here
    others = {name for address, name in names.items() if not address.startswith("127.")}
    return others.pop() if len(others) == 1 else None


def let_gloo_use(host: str) -> None:
    """Have the processes that this one starts meet at the interface that leads to ``host``, unless
    ``GLOO_SOCKET_IFNAME`` names one already.

    gloo listens at the address that the machine's own name stands for. On many machines that is a
    loopback address (Debian writes ``127.0.1.1 NAME`` into /etc/hosts), where no other finds it.
    """
    if (name := interface_towards(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


# Ranks that our own launcher has started ----------------------------------------------------------

@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a rank ended. The worker writes it, and the process that started it reads it."""

    rank: int
    code: int
    """the exit code the command should end with"""
    message: str = ""
    """of the error, empty if there was none"""
    trace: str = ""
    """traceback of an unexpected exception"""
    at: float = field(default_factory=time.time)
    """seconds since the epoch, to find the first failure"""
    phase: str = ""
    """where it was, as ``step 3, optimize``"""
    lost: bool = False
    """whether it only reports that another rank is gone or doesn't answer"""
    retry: dict[str, int] = field(default_factory=dict)
    """settings with which all ranks can start again after memory ran out"""


def _folder() -> Path | None:
    """The folder for reports to the process that started this rank; None if none did."""
    folder = os.environ.get(OUTCOMES)
    return Path(folder) if folder else None


def announce() -> int | None:
    """Report this rank's pid to the process that started it; return the number of a signal that
    arrived earlier."""
    if (folder := _folder()) is None:
        return None
    (folder / f"pid-{my_rank()}").write_text(str(os.getpid()), encoding="utf-8")
    with suppress(OSError, ValueError):
        return int((folder / "signal").read_text(encoding="utf-8"))
    return None


def open_lifelines(folder: Path) -> int:
    """Make a pipe that each rank can hold, and that closes when this process ends in any way.

    Returns:
        a file descriptor that has to stay open.
    """
    os.mkfifo(folder / _LIFELINE)
    return os.open(folder / _LIFELINE, os.O_RDWR | os.O_CLOEXEC)


def hold_lifeline() -> int:
    """This rank's end of that pipe, for ``stop_when_closed``: it closes when the process that
    started this rank ends, and is closed from the beginning if that has ended already."""
    held = os.open(Path(os.environ[OUTCOMES]) / _LIFELINE,
                   os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else it waits for a writer
    os.set_blocking(held, True)
    return held


def note_phase(phase: str) -> None:
    """Record what this rank is doing, in case it never reports again."""
    if (folder := _folder()) is not None:
        with suppress(OSError):  # a full disk for temporary files is no reason to end
            (folder / f"phase-{my_rank()}").write_text(phase, encoding="utf-8")


def read_phase(folder: Path, rank: int) -> str:
    """The last recorded phase of a rank; empty if there is none."""
    with suppress(OSError, ValueError):
        return (folder / f"phase-{rank}").read_text(encoding="utf-8")
    return ""


def my_phase() -> str:
    """The current phase of this process; empty if it wasn't started as a rank, so that no phases
    are recorded."""
    folder = _folder()
    return "" if folder is None else read_phase(folder, my_rank())


def hand_on(folder: Path, number: int) -> None:
    """Forward a signal to all ranks that have announced themselves, and record it for the
    others."""
    (folder / "signal").write_text(str(number), encoding="utf-8")
    for path in folder.glob("pid-*"):
        send(folder, int(path.name.removeprefix("pid-")), number)


def asked_to_stop(folder: Path) -> bool:
    """Whether a signal has come for the ranks."""
    return (folder / "signal").exists()


def send(folder: Path, rank: int, number: int) -> bool:
    """Send a signal to one rank; false if it isn't there."""
    with suppress(OSError, ValueError):
        os.kill(int((folder / f"pid-{rank}").read_text(encoding="utf-8")), number)
        return True
    return False


def write_outcome(outcome: RankOutcome) -> None:
    """Leave a rank's outcome for the process that started it."""
    from ppocli.config.secrets import safe_text  # the command line starts without OmegaConf

    path = Path(os.environ[OUTCOMES]) / f"rank-{outcome.rank}.json"
    redacted = replace(outcome, message=safe_text(outcome.message), trace=safe_text(outcome.trace))
    try:
        path.write_text(json.dumps(asdict(redacted)), encoding="utf-8")
    except OSError:  # the disk is full: print it instead
        sys.stderr.write(f"{redacted.trace}rank {redacted.rank}: {redacted.message}\n")


def read_outcomes(folder: Path) -> list[RankOutcome]:
    """The outcomes of the ranks, the earliest first."""
    outcomes = []
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError, TypeError):
            outcomes.append(RankOutcome(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(outcomes, key=lambda outcome: outcome.at)
