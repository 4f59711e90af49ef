"""The door to devices, precision and other processes: accelerate; and copies between the host
and the device that make the host wait no more than they must."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from ppocli.config.schema import HardwareConfig, TrainConfig
from ppocli.errors import ConfigError
from ppocli.parallel import deepspeed_internals, host_memory, launchers
from ppocli.parallel.onednn import TORCH, choose_gemm, warn_of_slow_bf16
from ppocli.parallel.ranks import Ranks
from ppocli.parallel.threads import settle_threads
from ppocli.storage.environment import (
    PRODUCTS,
    THREADS,
    Arithmetic,
    arithmetic_of,
    cpu_model,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backend:
    """Where and how precisely to compute, and with how many others."""

    accelerator: Any
    device: torch.device
    precision: str
    ranks: Ranks
    zero_stage: int = 0
    products: str = TORCH
    """whose products linear layers take, as of :mod:`ppocli.parallel.onednn`"""
    cuda_graphs: bool = True
    """as in ``hardware``"""

    def autocast(self) -> Any:
        """Context in which raw modules compute in the run's precision."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16,
                              enabled=self.precision == "bf16")

    def memory_mib(self) -> float | None:
        """What the device's allocator holds now, or on a CPU the process, in MiB; None where the
        system doesn't tell."""
        if self.device.type != "cpu":
            return torch.get_device_module(self.device).memory_allocated(self.device) / 2**20
        return host_memory.resident_mib(os.getpid())

    def peak_memory_mib(self) -> float:
        """Peak of the device's allocator, or of the process on a CPU, in MiB."""
        if self.device.type != "cpu":
            return torch.get_device_module(self.device).max_memory_allocated(self.device) / 2**20
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def made_on(backend: Backend) -> dict[str, str]:
    """What a checkpoint records of where it was made: elsewhere a run goes on, not bit for bit."""
    facts: dict[str, Any] = {"device": backend.device.type, "processes": backend.ranks.world}
    if backend.device.type == "cpu":
        facts |= {"processor": cpu_model(), THREADS: torch.get_num_threads(),
                  PRODUCTS: backend.products}
    return {name: str(value) for name, value in facts.items()}


@contextmanager
def open_backend(hardware: HardwareConfig, run_dir: Path | None = None) -> Iterator[Backend]:
    """The accelerator of a command that works in one process, whatever its configuration says of
    several; its process-wide state is cleared again afterwards.

    Args:
        run_dir: of the run whose numbers are gone on with: how it computes counts.

    Raises:
        ConfigError: a CUDA device or bf16 is asked for and not there.
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
        store: where the ranks meet, for processes that do so more than once: at the launcher's they
            would find the addresses of the first time.

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
        # their processors may differ, their numbers should not
        products = TORCH if use_cuda else ranks.broadcast(
            choose_gemm(cfg.hardware, recorded.products))
        yield Backend(accelerator, _numbered(accelerator.device), cfg.hardware.precision, ranks,
                      cfg.hardware.zero_stage, products, cfg.hardware.cuda_graphs)


@contextmanager
def _process_state(hardware: HardwareConfig, recorded: Arithmetic) -> Iterator[bool]:
    """Whether to compute on a GPU; threads and accelerate's and torch's global state are as before
    at the end."""
    from accelerate.state import AcceleratorState

    present = torch.cuda.is_available()
    if not present:
        # transformers imports deepspeed when it saves, which would guess and say so on stdout
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    use_cuda = hardware.device == "cuda" or (hardware.device == "auto" and present)
    if use_cuda and not present:
        raise ConfigError("No CUDA device was found.", where="hardware.device=cuda",
                          fix="set hardware.device=cpu, or install a torch build with CUDA")
    if use_cuda and hardware.precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise ConfigError("This GPU does not compute in bf16.", where="hardware.precision=bf16",
                          fix="set hardware.precision=fp32")
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    settle_threads(hardware.num_threads, recorded.threads)
    if hardware.precision == "bf16" and not use_cuda:
        warn_of_slow_bf16()
    # it builds a graph for every shape, and every decoded token is one
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
    """How long ranks wait for each other, also in groups that are made without a word about it:
    DeepSpeed's own, through which gradients go, would wait for as long as torch thinks fit, half an
    hour on CPUs."""
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
    """The device with its index, which accelerate leaves out in a single process: a thread of its
    own can only be told to use a device by number."""
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

    # of `accelerate launch --cpu`: it would outdo DeepSpeed, and what the device is is settled here
    os.environ.pop("ACCELERATE_USE_CPU", None)
    group = utils.InitProcessGroupKwargs(backend="nccl" if use_cuda else "gloo", timeout=timeout)
    if cfg.hardware.zero_stage == 0:
        # updates of the critic alone leave the trunk without gradients. And where none may be
        # missed, DDP lays its buckets out anew after a process's first update, which changes the
        # order that three ranks or more are summed in: a resumed run would differ in rounding
        ddp = utils.DistributedDataParallelKwargs(find_unused_parameters=bool(
            cfg.ppo.critic_warmup_steps or cfg.ppo.value_pretrain_steps or cfg.ppo.critic_epochs
            or (not use_cuda and launchers.launched_world() > 2)))
        return Accelerator(cpu=not use_cuda, mixed_precision=_mixed(cfg.hardware),
                           kwargs_handlers=[group, ddp])
    if not use_cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed_internals.probe()
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
    """``work``, in a thread of its own. It leaves alone what autocast keeps, rounded weights of all
    threads: any thread that leaves autocast frees them, and a recorded graph still reads them."""
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(False)
    return work()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor.to(device)``. From the host it goes by pinned memory: a copy from any other memory
    waits until the device has done all it was told before."""
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one device on the CPU, for one wait: the last copy ends after the others."""
    return [*(one.to("cpu", non_blocking=True) for one in tensors[:-1]), tensors[-1].cpu()]
