"""Ranks that torchrun, accelerate, DeepSpeed or srun has started: how they begin and end together.

Rank 0 composes and checks the configuration and makes the run folder; the others wait for it at
the launcher's store. The first error that ends one of them is printed once, and all leave with its
exit code.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ppocli.config import command_words, schema, secrets
from ppocli.distributed.launchers import Launched
from ppocli.distributed.ranks import RankOutcome, outcome_of
from ppocli.errors import ConfigError
from ppocli.launch.local_ranks import Start

if TYPE_CHECKING:
    from ppocli.config.compose import Checked

_WAIT = timedelta(seconds=schema.HardwareConfig().timeout_seconds)
# how long ranks wait for each other at the end, in order to leave with the same exit code
_PARTING_SECONDS = 5.0


def open_store(launched: Launched, topic: str = "") -> Any:
    """torch's store of this launcher, for one run; the environment is set as torchrun does.

    Args:
        topic: distinguishes several runs of the same ranks.
    """
    os.environ.update(launched.variables)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    # torch's own group finds the same server later
    store, _, _ = next(iter(rendezvous("env://", timeout=_WAIT)))
    return PrefixStore(f"ppocli-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}{topic}", store)


def publish_start(store: Any, start: Start | None) -> None:
    """Rank 0: publish which run to take part in; None if there is nothing to do."""
    store.set("start", json.dumps(None if start is None else start.argv()))


def wait_for_start(store: Any) -> Start | None:
    """The run that rank 0 published; None if there is nothing to do, or if rank 0 failed.

    Raises:
        DistError: torch's; rank 0 published nothing within the default of
            ``hardware.timeout_seconds``.
    """
    argv = json.loads(store.get("start"))
    return None if argv is None else Start.read(argv)


def run_together(store: Any, launched: Launched, work: Callable[[], object]) -> int:
    """Run ``work`` as one of the ranks, which then leave together: return the exit code of the
    rank that failed first, which prints its message."""
    outcome = outcome_of(launched.rank, work)
    for number in (signal.SIGTERM, signal.SIGINT):  # from launchers that see one rank leave
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)
    try:
        if outcome.lost:  # a consequence: the rank that failed comes first
            time.sleep(_PARTING_SECONDS)
        first = outcome
        if outcome.code:
            first = RankOutcome(**json.loads(
                store.compare_set("first", "", json.dumps(asdict(outcome)))))
        if launched.first and not store.check(["start"]):
            publish_start(store, None)
        if not outcome.code and store.check(["first"]):
            first = RankOutcome(**json.loads(store.get("first")))
    except RuntimeError:  # torch's: the store went away with the process of rank 0
        first = outcome
    if first.code and first.rank == launched.rank:
        sys.stderr.write(_message(first))
        sys.stderr.flush()
    with suppress(RuntimeError):  # somebody is stuck or dead
        store.set(f"left-{launched.rank}", "1")
        if launched.first:  # the store may be in this process, which has to go last
            store.wait([f"left-{rank}" for rank in range(launched.world)],
                       timedelta(seconds=2 * _PARTING_SECONDS))
    return first.code


def _message(outcome: RankOutcome) -> str:
    """The message for the outcome that ended the run."""
    if outcome.lost:
        return secrets.safe_text(
            f"Error: rank {outcome.rank} lost the connection to another rank: "
            f"{outcome.message.splitlines()[0]}\n  fix:   see the launcher's output for how that "
            "rank ended; start again with the same words and resume=auto\n")
    label = "Stopped" if outcome.code > 128 else "Error"
    where = f"rank {outcome.rank}: " if outcome.trace else ""
    return secrets.safe_text(f"{outcome.trace}{label}: {where}{outcome.message}\n")


def placed(checked: "Checked", launched: Launched) -> "Checked":
    """The configuration with the number of processes and the device that the launcher decides.

    Raises:
        ConfigError: a key on the command line contradicts the launcher.
    """
    hardware, world = checked.config.hardware, launched.world
    # settings of a file, such as a hardware group, give way to the launcher
    set_keys = {key for key, source in checked.sources.items()
                if source == command_words.COMMAND_LINE}
    each = launched.local_world
    if not each or world % each:  # the launcher doesn't say, or machines differ
        nodes = hardware.num_nodes if "hardware.num_nodes" in set_keys else 1
        each = world // nodes if world % nodes == 0 else world
    decided = {"num_processes": each, "num_nodes": world // each}
    wrong = [name for name, value in decided.items()
             if f"hardware.{name}" in set_keys and getattr(hardware, name) != value]
    if wrong:
        raise ConfigError(
            "\n".join(f"hardware.{name} is {getattr(hardware, name)}, but {launched.by} has "
                      f"started {world} processes, {each} on each machine, which makes it "
                      f"{decided[name]}." for name in wrong),
            where=", ".join(f"hardware.{name}" for name in wrong),
            fix="leave it out; or start one process, and ppocli starts the ranks")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return replace(checked, config=replace(checked.config, hardware=replace(
        hardware, num_processes=each, num_nodes=world // each,
        device="cpu" if on_cpu else hardware.device)))
