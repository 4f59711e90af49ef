"""How gradients are accumulated and applied: in one process, under DDP, or by DeepSpeed ZeRO.

An update is a number of micro-batches, equal on all ranks. Its loss is normalised by the tokens of
all ranks, so the only scaling here is the number of ranks, which averaging reducers divide by.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import get_scheduler

from ppocli.config.schema_training import SchedulerConfig
from ppocli.distributed.backend import Backend
from ppocli.distributed.deepspeed_internals import local_part


@dataclass(frozen=True, slots=True)
class Trained:
    """What trains, and how: in one process, or in several that hold everything and average
    gradients (DDP). The parameters and the optimizer's state change; nothing else does."""

    module: Any
    """the bare module; parameters that require gradients train"""
    engine: Any
    """what accelerate or DeepSpeed wraps it in: forward passes that are to be differentiated"""
    optimizer: Any
    """each of its groups has a ``base_lr`` and a ``role``"""
    backend: Backend
    max_norm: float | None
    """gradient norm to clip at"""
    decides_first = False
    """whether an update must be accepted or refused before its last backward pass"""

    def clear(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def accumulating(self, *, last: bool) -> Any:
        """Context of one micro-batch; gradients are reduced over ranks in the last one."""
        return nullcontext() if last else self.backend.accelerator.no_sync(self.engine)

    def backward(self, loss: torch.Tensor, *, accepted: bool = True) -> None:
        """Add the gradient of a loss that is normalised over all ranks. A last loss that is not
        ``accepted`` makes the update one that is skipped."""
        world = self.backend.ranks.world
        scaled = loss * world if world > 1 else loss
        self.backend.accelerator.backward(scaled if accepted else scaled * float("nan"))

    def attempt(self, factors: Mapping[str, float]) -> torch.Tensor:
        """End an update after its last micro-batch, up to the question whether it is made: clip.

        Args:
            factors: what each role's schedule makes of its groups' rates.

        Returns:
            the gradient norm over all ranks before clipping, in fp32 also where gradients are bf16.
        """
        parameters, gradients, all_fp32 = list[torch.Tensor](), list[torch.Tensor](), True
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameters.append(parameter)
                gradients.append(parameter.grad)
                all_fp32 = all_fp32 and parameter.grad.dtype == torch.float32
        if all_fp32:
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = torch.linalg.vector_norm(torch.stack([
                torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients]))
        if self.max_norm is None or (norm.device.type == "cpu" and norm <= self.max_norm):
            return norm  # on a GPU the question would wait for it
        torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        return norm

    def complete(self, factors: Mapping[str, float]) -> float:
        """Make the update that was attempted, which DeepSpeed must not have refused; returns the
        first group's rate."""
        lr = set_learning_rate(self.optimizer, factors)
        self.optimizer.step()
        return lr

    def close(self) -> None:
        """Tear down what would outlive the run."""

    def is_finite(self) -> bool:
        """Whether every trainable weight is finite; asked before anything is saved."""
        flags = list[torch.Tensor]()
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                weight = local_part(parameter) if self.backend.zero_stage == 3 else parameter
                flags.append(torch.isfinite(weight.detach()).all())
        return not self.backend.ranks.any(not bool(torch.stack(flags).all()))


class ZeroTrained(Trained):
    """DeepSpeed ZeRO 1 to 3. Its accumulation boundary is set explicitly for each micro-batch.

    DeepSpeed leaves weights and optimizer state alone when a gradient is not finite, on all ranks
    and under every stage, and cleans its buffers up; an update that is refused for other reasons
    gets such a gradient.
    """

    decides_first = True
    """DeepSpeed has reduced, and in part sharded, the gradients as soon as that pass has run"""

    def clear(self) -> None:
        """As :class:`Trained`; DeepSpeed clears after each update itself."""

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """As :class:`Trained`."""
        self.engine.set_gradient_accumulation_boundary(last)
        yield
        if not last:
            self.engine.step()  # counts the micro-batch; nothing is applied

    def backward(self, loss: torch.Tensor, *, accepted: bool = True) -> None:
        """As :class:`Trained`."""
        scaled = loss * self.backend.ranks.world
        self.engine.backward(scaled if accepted else scaled * float("nan"))

    def attempt(self, factors: Mapping[str, float]) -> torch.Tensor:
        """As :class:`Trained`: DeepSpeed steps now and then knows the norm; a gradient that is not
        finite changes nothing."""
        set_learning_rate(self.optimizer, factors)
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32).detach()

    def complete(self, factors: Mapping[str, float]) -> float:
        """As :class:`Trained`; the step is made already."""
        return set_learning_rate(self.optimizer, factors)

    def close(self) -> None:
        """As :class:`Trained`: an engine that is left to the interpreter's exit can abort it."""
        self.engine.destroy()


def prepare(backend: Backend, module: torch.nn.Module, optimizer: torch.optim.Optimizer,
            max_norm: float | None) -> Trained:
    """The module and its optimizer, ready for training on all ranks.

    Args:
        optimizer: each group has a ``base_lr`` (its rate before any schedule) and a ``role``.
        max_norm: gradient norm to clip at.
    """
    engine, prepared = backend.accelerator.prepare(module, optimizer)
    module.eval()
    if backend.zero_stage > 0:
        return ZeroTrained(module, engine, engine.optimizer, backend, max_norm)
    return Trained(module, engine, prepared, backend, max_norm)


def lr_factor(schedule: SchedulerConfig, update: int, total_updates: int) -> float:
    """Factor on the learning rate for the ``update``-th optimizer update (counted from 0): a pure
    function of that number, so that resuming can't get it wrong.

    Linear warm-up over ``warmup_updates`` (the first update already moves), then ``constant``,
    ``linear`` or ``cosine`` decay to ``min_lr_ratio`` at ``total_updates``, or what follows the
    warm-up in transformers' schedule of another name, put between ``min_lr_ratio`` and 1.
    """
    warmup, lowest = schedule.warmup_updates, schedule.min_lr_ratio
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if schedule.name == "constant":
        return 1.0
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if schedule.name == "linear":
        shape = 1.0 - progress
    elif schedule.name == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        of_none = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        ends = {"lr_end": 0.0} if schedule.name == "polynomial" else {}
        made = get_scheduler(schedule.name, of_none, warmup, total_updates,
                             {**ends, **schedule.kwargs})
        shape = float(made.lr_lambdas[0](update))
    return lowest + (1.0 - lowest) * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, factors: Mapping[str, float]) -> float:
    """Set every group's rate to ``base_lr`` times the factor of its role; returns the first
    group's."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factors[group["role"]]
    return float(optimizer.param_groups[0]["lr"])
