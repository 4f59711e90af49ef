"""Devices, precision and other processes, through accelerate; copies between host and device that
make the host wait as little as possible; and how many rows a pass takes at once: as configured,
until memory runs out."""

import gc
import logging
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch

from ppocli.config.schema import HardwareConfig, TrainConfig
from ppocli.config.text import counted, format_memory
from ppocli.distributed import deepspeed_internals, host_memory, launchers
from ppocli.distributed.onednn import TORCH, choose_gemm
from ppocli.distributed.ranks import Ranks, is_out_of_memory
from ppocli.distributed.torch_settings import settle_threads
from ppocli.errors import ConfigError, OutOfMemoryError
from ppocli.runs.environment import PRODUCTS, THREADS, Arithmetic, arithmetic_of, cpu_model

T = TypeVar("T")
log = logging.getLogger("ppocli")
_OF_ACCELERATE = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_")
"""how its variables begin"""


@dataclass(frozen=True, slots=True)
class Backend:
    """Where and how precisely to compute, and with how many others."""

    accelerator: Any
    device: torch.device
    precision: str
    ranks: Ranks
    zero_stage: int = 0
    products: str = TORCH
    """which library multiplies matrices in linear layers, see :mod:`ppocli.distributed.onednn`"""
    cuda_graphs: bool = True
    """as in ``hardware``"""

    def autocast(self) -> Any:
        """Context in which raw modules compute in the run's precision."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16,
                              enabled=self.precision == "bf16")

    def peak_memory_mib(self) -> float:
        """Peak of the device's allocator, or of the process on a CPU, in MiB."""
        if self.device.type != "cpu":
            return torch.get_device_module(self.device).max_memory_allocated(self.device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def made_on(backend: Backend) -> dict[str, str]:
    """Facts about the hardware that a checkpoint records. A run can resume on other hardware, but
    not bit for bit."""
    facts: dict[str, Any] = {"device": backend.device.type, "processes": backend.ranks.world}
    if backend.device.type == "cpu":
        facts |= {"processor": cpu_model(), THREADS: torch.get_num_threads(),
                  PRODUCTS: backend.products}
    return {name: str(value) for name, value in facts.items()}


@contextmanager
def open_backend(hardware: HardwareConfig, run_dir: Path | None = None) -> Iterator[Backend]:
    """The backend of a command that runs in one process, even if its configuration asks for
    several. Process-wide state is restored at the end.

    Args:
        run_dir: a run to be continued, which decides how many threads compute and which library
            multiplies.

    Raises:
        ConfigError: the configuration asks for a CUDA device or bf16, and this machine has none.
    """
    from accelerate import Accelerator

    recorded = arithmetic_of(run_dir)
    with _process_state(hardware, recorded) as use_cuda:
        accelerator = Accelerator(cpu=not use_cuda, mixed_precision=_mixed(hardware))
        yield Backend(accelerator, _numbered(accelerator.device), hardware.precision, Ranks(),
                      products=TORCH if use_cuda else choose_gemm(hardware, recorded.products),
                      cuda_graphs=hardware.cuda_graphs)


@contextmanager
def open_ranks(cfg: TrainConfig, run_dir: Path | None = None, store: Any = None
               ) -> Iterator[Backend]:
    """As :func:`open_backend`, for the training of ``cfg``, of which this process is one rank.

    Args:
        store: where the ranks meet, for processes that form a group more than once: the launcher's
            store still holds the addresses of the first group.

    Raises:
        ConfigError: also if DeepSpeed's file contradicts the configuration.
    """
    if launchers.launched_world() == 1 and cfg.hardware.zero_stage == 0:
        with open_backend(cfg.hardware, run_dir) as backend:
            yield backend
        return
    recorded = arithmetic_of(run_dir)
    with _process_state(cfg.hardware, recorded) as use_cuda, \
            _patience_of_groups(cfg.hardware) as timeout:
        if store is not None:
            torch.distributed.init_process_group(
                "nccl" if use_cuda else "gloo", store=store, rank=launchers.my_rank(),
                world_size=launchers.launched_world(), timeout=timeout)
        accelerator = _accelerator(cfg, use_cuda, timeout)
        ranks = _ranks(timeout)
        # ranks on different processors must still compute alike
        products = TORCH if use_cuda else ranks.broadcast(
            choose_gemm(cfg.hardware, recorded.products))
        yield Backend(accelerator, _numbered(accelerator.device), cfg.hardware.precision, ranks,
                      cfg.hardware.zero_stage, products, cfg.hardware.cuda_graphs)


@contextmanager
def _process_state(hardware: HardwareConfig, recorded: Arithmetic) -> Iterator[bool]:
    """Set threads and torch's global state for a run, yield whether it computes on a GPU, and
    restore everything at the end."""
    from accelerate.state import AcceleratorState

    present = torch.cuda.is_available()
    if not present:
        # transformers imports deepspeed when it saves, which would guess the device and print that
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    use_cuda = host_memory.on_cuda(hardware)
    if use_cuda and not present:
        raise ConfigError("No CUDA device was found.", where="hardware.device=cuda",
                          fix="set hardware.device=cpu, or install a torch build with CUDA")
    if use_cuda and hardware.precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise ConfigError("This GPU does not compute in bf16.", where="hardware.precision=bf16",
                          fix="set hardware.precision=fp32")
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    settle_threads(hardware.num_threads, recorded.threads)
    # cuDNN builds a graph for every shape, and every decoded token has a new one
    torch.backends.cuda.enable_cudnn_sdp(False)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield use_cuda
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def _patience_of_groups(hardware: HardwareConfig) -> Iterator[timedelta]:
    """Apply ``hardware.timeout_seconds`` to every process group made in the block, and yield it.
    DeepSpeed makes a group for gradients without a timeout; torch's default is half an hour on
    CPUs."""
    from torch.distributed import distributed_c10d

    timeout = timedelta(seconds=hardware.timeout_seconds)
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    try:
        vars(distributed_c10d).update(dict.fromkeys(names, timeout))
        yield timeout
    finally:
        vars(distributed_c10d).update(before)


def _numbered(device: torch.device) -> torch.device:
    """The device with its index, which accelerate leaves out in a single process; another thread
    can select a device only by its index."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _mixed(hardware: HardwareConfig) -> str:
    return "bf16" if hardware.precision == "bf16" else "no"


def _accelerator(cfg: TrainConfig, use_cuda: bool, timeout: timedelta) -> Any:
    """accelerate's object for several ranks: DDP, or with DeepSpeed behind it."""
    from accelerate import Accelerator, utils
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from ppocli.config.deepspeed import deepspeed_config

    for name in [name for name in os.environ if name.startswith(_OF_ACCELERATE)]:
        del os.environ[name]  # set by `accelerate launch`: they would override the configuration
    group = utils.InitProcessGroupKwargs(backend="nccl" if use_cuda else "gloo", timeout=timeout)
    if cfg.hardware.zero_stage == 0:
        # updates of the critic alone leave the trunk without gradients. Without unused parameters,
        # DDP also rebuilds its buckets after the first update of a process, which changes the order
        # of sums over three or more ranks: a resumed run would round differently
        ddp = utils.DistributedDataParallelKwargs(find_unused_parameters=bool(
            cfg.ppo.critic_warmup_steps or cfg.ppo.value_pretrain_steps or cfg.ppo.critic_epochs
            or (not use_cuda and launchers.launched_world() > 2)))
        return Accelerator(cpu=not use_cuda, mixed_precision=_mixed(cfg.hardware),
                           kwargs_handlers=[group, ddp])
    if not use_cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed_internals.silence_deprecations()
    if not use_cuda:
        deepspeed_internals.skip_compiled_kernel()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # with cpu=True accelerate would take plain DDP; weights stay fp32, DeepSpeed autocasts
    plugin = utils.DeepSpeedPlugin(hf_ds_config=deepspeed_config(cfg, launchers.launched_world()))
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="no",
                              kwargs_handlers=[group])
    # accelerate has told transformers to shard under ZeRO 3 whatever is loaded from now on. Here
    # models are loaded whole and the policy is sharded when it is prepared: neither a reference nor
    # a reward's classifier must be sharded because the policy is
    unset_hf_deepspeed_config()
    return accelerator


def _ranks(timeout: timedelta) -> Ranks:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return Ranks()
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(),
                 torch.distributed.new_group(backend="gloo", timeout=timeout))


def without_autocast_cache(work: Callable[[], T]) -> T:
    """Run ``work`` in a side thread without touching autocast's cache of rounded weights. All
    threads share it, any thread that leaves autocast frees it, and a recorded graph still reads
    it."""
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(False)
    return work()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor.to(device)``, from the host by pinned memory: other copies wait for earlier work."""
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors of one device to the CPU with a single wait: the last copy ends last."""
    copies = list(map(methodcaller("to", "cpu", non_blocking=True), tensors[:-1]))
    return [*copies, tensors[-1].cpu()]


# Out of memory ------------------------------------------------------------------------------------
#
# A pass that doesn't fit is repeated with half the rows. Results don't depend on it, up to
# rounding: random numbers of a sample are a function of its place in the run, and an update's
# gradient is summed over its micro-batches.

def _memory_text(error: Exception) -> str:
    """What an error says of memory that ran out on all ranks alike; raises any other."""
    if isinstance(error, OutOfMemoryError) and not error.alone:
        return error.what
    if not isinstance(error, OutOfMemoryError) and is_out_of_memory(error):
        return ""
    raise error


@dataclass(slots=True)
class PassRows:
    """The most rows that fit into one pass, by phase, where the configured number was too much.

    The same on all ranks. It only shrinks. A resumed run starts from the configured number again,
    since it may run where there is more memory.
    """

    backend: Backend
    keys: Mapping[str, str]
    """phase -> the key that decides how many rows one of its passes has"""
    reduced: dict[str, int] = field(default_factory=dict)
    shorter: str = "generation.max_new_tokens, prompts.max_length"
    """keys that limit the tokens of a sample"""

    def limit(self, phase: str, configured: int) -> int:
        """Rows of a pass that is configured to have ``configured``."""
        return min(configured, self.reduced.get(phase, configured))

    def figures(self) -> dict[str, float]:
        """For the row of a step: ``memory/rows/PHASE`` where memory has run out."""
        return {f"memory/rows/{phase.replace(' ', '_')}": float(count)
                for phase, count in self.reduced.items()}

    def retry(self, phase: str, configured: int, tokens: int, work: Callable[[], T], *,
              in_step: bool = False) -> T:
        """What ``work`` returns, run again with half of the ``configured`` rows (:meth:`limit`)
        whenever memory runs out on any rank; an OutOfMemoryError, which names the ``tokens`` of the
        longest sample, where that is one. ``in_step``: passes gather weights of all ranks and can't
        be repeated."""
        while True:
            rows = self.limit(phase, configured)
            try:
                return self.backend.ranks.all_do(
                    partial(self.once, phase, rows, tokens, work) if in_step else work,
                    f"{phase} of {counted(rows, 'row')} at once")
            except (OutOfMemoryError, RuntimeError) as error:
                text = _memory_text(error)
            # out of the handler, or the exception would keep the tensors of the pass
            self.shrink(phase, rows, tokens, text)

    def shrink(self, phase: str, rows: int, tokens: int, text: str = "") -> None:
        """Halve the rows from now on, after a pass of ``rows`` ran out of memory.

        Raises:
            OutOfMemoryError: it was one row.
        """
        text = text or f"{phase} of {counted(rows, 'row')} at once: out of memory"
        if rows == 1:
            raise self._too_much(text, tokens)
        self.reduced[phase], key = rows // 2, self.keys[phase]
        log.warning("%s; going on with %d (%s=%d starts so)", text, rows // 2, key, rows // 2)
        gc.collect()
        if self.backend.device.type != "cpu":
            torch.get_device_module(self.backend.device).empty_cache()

    def once(self, phase: str, configured: int, tokens: int, work: Callable[[], T]) -> T:
        """Run ``work``, whose passes all ranks make together, and return its result. A rank that
        runs out of memory leaves the others inside a pass, so that all ranks have to start again.

        Raises:
            OutOfMemoryError: on this rank alone, with the setting to restart with.
        """
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        rows = self.limit(phase, configured)
        if rows == 1:
            raise self._too_much("out of memory with 1 row a pass", tokens, alone=True)
        key = self.keys[phase]
        raise OutOfMemoryError(f"out of memory with {rows} rows a pass", where=key, alone=True,
                               retry={key: rows // 2})

    def _too_much(self, text: str, tokens: int, *, alone: bool = False) -> OutOfMemoryError:
        """The error for a pass that can't be made smaller, with sizes."""
        left = host_memory.host_room() if self.backend.device.type == "cpu" else None
        free = "" if left is None else (
            f", and {format_memory(left)} of the machine's memory are free")
        return OutOfMemoryError(
            f"{text}, and a pass can't be smaller: its longest sample has {tokens} tokens; this "
            f"process held up to {self.backend.peak_memory_mib():.0f} MiB{free}", alone=alone,
            where=f"{self.shorter}, model.path",
            fix="fewer tokens, model.gradient_checkpointing=true, or several processes "
            "(hardware=zero3); ppocli estimate tells what each takes")
