"""The first update of a training on a data set, up to its gradient and no further."""

import math
from dataclasses import dataclass

from ppocli.config.schema import TrainConfig
from ppocli.errors import DivergedError
from ppocli.parallel.backend import open_backend
from ppocli.parallel.stop import StopFlag
from ppocli.tasks.select import build_task
from ppocli.training import loop, optimize, optimizers
from ppocli.training.clock import PhaseClock
from ppocli.training.state import seed_generators
from ppocli.training.task import PythonObjects, TaskSetup


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What came of it. Seconds are by phase; memory is the device's peak, or the process's."""

    device: str
    precision: str
    parameters: int
    trainable: int
    examples: int
    """to train on; of a reward model: pairs"""
    rows: int
    """of them in the first update"""
    tokens: int
    terms: dict[str, float]
    """of the loss, and the norm of the gradient"""
    seconds: dict[str, float]
    peak_memory_mib: float


def rehearse(cfg: TrainConfig, stop: StopFlag) -> Rehearsal:
    """Load everything that a run loads and find the gradient of its first update.

    Raises:
        PpocliError: whatever would end the run at its first step, with the same exit code.
        StopRequested: before the gradient.
    """
    with open_backend(cfg.hardware) as backend:
        seed_generators(cfg.seed)
        clock = PhaseClock(backend.device)
        task = build_task(TaskSetup(cfg, backend, PythonObjects()))
        clock.mark("load")
        stop.check()
        state = loop.initial_state(task)
        plan = task.plan(state, task.collect(state, stop, clock))
        group, module = plan.groups[0], task.trained.module
        terms = optimize.probe_gradient(task, plan, group)
        clock.mark("optimize")
        wrong = [name for name, value in terms.items() if not math.isfinite(value)]
        if wrong:
            raise DivergedError(f"Before any update {', '.join(wrong)} is not finite.",
                                where="model.path", fix="check the model's weights, or use "
                                "hardware.precision=fp32")
        return Rehearsal(
            device=str(backend.device), precision=backend.precision,
            parameters=sum(p.numel() for p in module.parameters()),
            trainable=sum(p.numel() for p in optimizers.named_trainable(module).values()),
            examples=task.examples or 0, rows=len(group.rows), tokens=int(group.tokens.sum()),
            terms=terms, seconds=dict(clock.seconds), peak_memory_mib=backend.peak_memory_mib())
