"""The door to devices and precision: accelerate, and the optimizer it drives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ppocli.config.schema import HardwareConfig, OptimizerConfig
from ppocli.engine.live import resident_mib
from ppocli.errors import ConfigError
from ppocli.models.policy import Policy


@dataclass(frozen=True, slots=True)
class Backend:
    """Where and how precisely to compute."""

    accelerator: Any
    device: torch.device
    precision: str

    def autocast(self) -> Any:
        """Context in which raw modules compute in the run's precision."""
        return self.accelerator.autocast()

    def memory_mib(self) -> float | None:
        """What the device's allocator holds now, or on a CPU the process, in MiB; None where the
        system doesn't tell."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) / 2**20
        return resident_mib(os.getpid())

    def peak_memory_mib(self) -> float:
        """Peak of the device's allocator, or of the process on a CPU, in MiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def open_backend(hardware: HardwareConfig) -> Iterator[Backend]:
    """The accelerator of one run; its process-wide state is cleared again afterwards.

    Raises:
        ConfigError: a CUDA device or bf16 is asked for and not there.
    """
    from accelerate import Accelerator
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
    threads = torch.get_num_threads()
    if hardware.num_threads is not None:
        torch.set_num_threads(hardware.num_threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(cpu=not use_cuda,
                                  mixed_precision="bf16" if hardware.precision == "bf16" else "no")
        yield Backend(accelerator, accelerator.device, hardware.precision)
    finally:
        torch.set_num_threads(threads)
        AcceleratorState._reset_state(reset_partial_state=True)


def named_trainable(policy: Policy) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters by name, tied ones once; the order is the model's own."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def build_optimizer(policy: Policy, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, the value head in a group of its own."""
    trunk: list[torch.nn.Parameter] = []
    head: list[torch.nn.Parameter] = []
    for name, parameter in named_trainable(policy).items():
        (head if name.startswith("value_head.") else trunk).append(parameter)
    value_lr = cfg.lr if cfg.value_lr is None else cfg.value_lr
    groups = [{"params": trunk, "lr": cfg.lr, "base_lr": cfg.lr},
              {"params": head, "lr": value_lr, "base_lr": value_lr}]
    if cfg.name == "sgd":
        return torch.optim.SGD(groups, weight_decay=cfg.weight_decay, fused=True)
    kind = torch.optim.AdamW if cfg.name == "adamw" else torch.optim.Adam
    return kind(groups, betas=(cfg.betas[0], cfg.betas[1]), eps=cfg.eps,
                weight_decay=cfg.weight_decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group's rate to ``base_lr * factor``; returns the first group's."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])
