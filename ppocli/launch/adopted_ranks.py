"""Ranks that torchrun, accelerate, DeepSpeed or srun has started: how they begin and end together.

Rank 0 composes and checks the configuration and makes the run folder; the others wait for it. They
communicate through one store, at the launcher's address. An error that ends one of them is printed
once, and all leave with its exit code.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ppocli.config import command_words, schema, secrets
from ppocli.distributed.launchers import Launched, RankOutcome
from ppocli.errors import ConfigError, PpocliError
from ppocli.launch.child_process import Start

if TYPE_CHECKING:
    from ppocli.config.compose import Checked

# keys that a launcher provides, so that a command may leave them out
PROVIDED = frozenset({"hardware.rdzv_endpoint", "run_name"})
# how long ranks wait for each other at the end, in order to leave with the same exit code
_PARTING_SECONDS = 5.0
_OF_ACCELERATE = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_")
_GROUP = re.compile(r"(^|/)hardware/[^/]+\.yaml")


@dataclass(frozen=True)
class Meeting:
    """The store at which the ranks of a launcher meet. Opened when it is first used."""

    launched: Launched
    environ: Mapping[str, str]
    """the launcher's environment, before :func:`open_meeting` removed variables from it"""
    topic: str = ""
    """tells several meetings of the same ranks apart"""

    @cached_property
    def store(self) -> Any:
        """A store of torch, whose keys belong to this meeting alone."""
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        # torch's own group finds the same server later
        wait = timedelta(seconds=schema.HardwareConfig().timeout_seconds)
        store, _, _ = next(iter(rendezvous("env://", timeout=wait)))
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"ppocli-{count}{self.topic}", store)

    def tell(self, start: Start | None) -> None:
        """Rank 0: publish which run to take part in; None if there is nothing to do."""
        self.store.set("start", json.dumps(None if start is None else start.argv()))

    def wait(self) -> Start | None:
        """The run that rank 0 published; None if there is nothing to do, or if rank 0 failed.

        Raises:
            PpocliError: rank 0 published nothing within the default of
                ``hardware.timeout_seconds``.
        """
        deadline = time.monotonic() + schema.HardwareConfig().timeout_seconds
        while not self.store.check(["start"]):
            if self.store.check(["first"]):
                return None
            if time.monotonic() > deadline:
                raise PpocliError("Rank 0 has not started the run.", where="RANK=0",
                                  fix="see what it says")
            time.sleep(0.05)
        argv = json.loads(self.store.get("start"))
        return None if argv is None else Start.read(argv)

    def conclude(self, outcome: RankOutcome) -> int:
        """Leave together: return the exit code of the rank that failed first, once its message is
        printed.

        Rank 0 prints it; if rank 0 is stuck or dead, the rank that failed does.
        """
        for number in (signal.SIGTERM, signal.SIGINT):  # from launchers that see one rank leave
            with suppress(ValueError):
                signal.signal(number, signal.SIG_IGN)
        outcome_json, code = json.dumps(asdict(outcome)), 0
        try:
            if outcome.code and not outcome.lost:
                self.store.compare_set("first", "", outcome_json)
            if self.launched.first:
                self._speak()
            self._all_come("arrived")
            if outcome.code and outcome.lost:  # a consequence: the rank that failed comes first
                self.store.compare_set("first", "", outcome_json)
            if self.store.check(["first"]):
                self._speak()
                code = int(json.loads(self.store.get("first"))["code"])
            # the store may be in rank 0's process, which has to go last
            if self.launched.first:
                self._all_come("left")
            else:
                self.store.set(f"left-{self.launched.rank}", "1")  # without an answer, unlike add
            return code
        except RuntimeError:  # torch's: the store went away with rank 0, which said why
            return outcome.code or 1

    def _all_come(self, where: str) -> None:
        """Wait until all ranks have arrived, but not for ever: one may be dead or stuck."""
        self.store.set(f"{where}-{self.launched.rank}", "1")
        names = [f"{where}-{rank}" for rank in range(self.launched.world)]
        deadline = time.monotonic() + _PARTING_SECONDS
        while not self.store.check(names) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _speak(self) -> None:
        if not self.store.check(["first"]) or self.store.add("speakers", 1) > 1:
            return
        first = RankOutcome(**json.loads(self.store.get("first")))
        with suppress(OSError, ValueError):
            sys.stderr.write(_ending_message(first))
            sys.stderr.flush()


def _ending_message(first: RankOutcome) -> str:
    """The message for the outcome that ended the run."""
    if first.lost:
        return secrets.safe_text(f"Error: rank {first.rank} lost the connection to another rank: "
                       f"{first.message.splitlines()[0]}\n  fix:   the launcher's output says how "
                       "that rank ended; start again with the same words and resume=auto\n")
    if not first.message:  # ranks that a node has started have printed it
        return ""
    label = "Stopped" if first.code > 128 else "Error"
    where = f"rank {first.rank}: " if first.trace else ""
    return secrets.safe_text(f"{first.trace}{label}: {where}{first.message}\n")


def placed(checked: "Checked", launched: Launched, environ: Mapping[str, str]) -> "Checked":
    """The configuration with the number of processes and the device that the launcher decides.

    Raises:
        ConfigError: a key that the user has set contradicts the launcher.
    """
    config, world = checked.config, launched.world
    hardware = config.hardware
    # settings of a hardware group, or of a resumed run, give way to the launcher
    set_keys = frozenset(key for key, source in checked.sources.items()
                         if source == command_words.COMMAND_LINE
                         or (checked.resume_from is None and not _GROUP.search(source)))
    as_nodes = launched.on_each_node and hardware.num_processes > 1
    each = hardware.num_processes if as_nodes else launched.local_world or 0
    nodes = world if as_nodes else world // each if each and world % each == 0 else 0
    if nodes == 0:  # the launcher doesn't tell, or machines differ
        num_nodes = hardware.num_nodes if "hardware.num_nodes" in set_keys else 1
        nodes = num_nodes if world % num_nodes == 0 else 1
        each = world // nodes
    settled = {"num_processes": each, "num_nodes": nodes}
    wrong = [name for name, value in settled.items()
             if f"hardware.{name}" in set_keys and getattr(hardware, name) != value]
    if wrong:
        raise ConfigError(
            "\n".join(f"hardware.{name} is {getattr(hardware, name)}, but {launched.by} has "
                      f"started {world} processes on "
                      f"{'one machine' if nodes == 1 else f'{nodes} machines'}, which makes it "
                      f"{settled[name]}." for name in wrong),
            where=", ".join(f"hardware.{name}" for name in wrong),
            fix=f"leave it out: what {launched.by} has started counts; or start one process, and "
                "ppocli starts the ranks")
    endpoint = (hardware.rdzv_endpoint or f"{launched.address}:{launched.port + 1}"
                if as_nodes else None)
    return replace(checked, config=replace(config, hardware=replace(
        hardware, num_processes=each, num_nodes=nodes, node_rank=0, rdzv_endpoint=endpoint,
        device=_accelerate_device(config, environ))))


def _accelerate_device(config: schema.TrainConfig, environ: Mapping[str, str]) -> str:
    """The device, once nothing that ``accelerate launch`` was told contradicts the configuration.

    Names: ``huggingface/accelerate:src/accelerate/utils/launch.py``.
    """
    hardware = config.hardware
    on = {name for name, value in environ.items() if value.lower() in ("1", "true", "yes", "y")}
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    compiler = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    cpu = "ACCELERATE_USE_CPU" in on
    conflicts = [text for wrong, text in (
        (precision not in ("no", hardware.precision),
         f"mixed precision {precision}, but hardware.precision is {hardware.precision} "
         "(fp32 or bf16)"),
        ("ACCELERATE_USE_DEEPSPEED" in on and hardware.zero_stage == 0,
         "DeepSpeed, but hardware.zero_stage is 0 (hardware=zero2)"),
        ("ACCELERATE_USE_FSDP" in on,
         "FSDP, which ppocli does not use (hardware=zero3 shards weights)"),
        ("ACCELERATE_USE_MEGATRON_LM" in on,
         "Megatron, which ppocli does not use (hardware=zero3 shards weights)"),
        (compiler != "no", "a dynamo backend, which ppocli does not use"),
        (cpu and hardware.device == "cuda", "the CPU, but hardware.device is cuda")) if wrong]
    if conflicts:
        raise ConfigError("\n".join(f"accelerate was told to use {text}." for text in conflicts),
                          where="accelerate launch", fix="make both say the same")
    return "cpu" if cpu else hardware.device


def open_meeting(launched: Launched, topic: str = "") -> Meeting:
    """Set this process's environment as for one of our own ranks.

    Variables of ``accelerate launch`` that would override the configuration are removed:
    :func:`placed` compares them with it.
    """
    os.environ.update(launched.variables())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
    environ = dict(os.environ)
    for name in environ:
        if name.startswith(_OF_ACCELERATE) and name != "ACCELERATE_DEBUG_MODE":
            del os.environ[name]
    return Meeting(launched, environ, topic)
