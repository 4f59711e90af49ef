"""Phase 2 of a step: the updates that a task has planned, and how gradients are accumulated and
applied: in one process, under DDP, or by DeepSpeed ZeRO. A loss is normalised by the tokens of all
ranks: the only scaling here is the number of ranks, which averaging reducers divide by.
"""

import logging
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import add, attrgetter
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import get_scheduler

from ppocli.config import tasks
from ppocli.config.schema_training import SchedulerConfig
from ppocli.distributed.backend import Backend, to_device
from ppocli.distributed.deepspeed_internals import local_part
from ppocli.distributed.ranks import Ranks, StopFlag
from ppocli.errors import DivergedError
from ppocli.models.layout import in_groups
from ppocli.runs import faults
from ppocli.training.state import TrainState
from ppocli.training.task import OptimizeResult, Plan, Task, UpdateGroup, Verdict

log = logging.getLogger("ppocli")

GRACE_SECONDS = 20.0
"""SIGTERM lets the phase finish if that takes no longer; Ctrl-C, pressed once, always does"""
T = TypeVar("T")


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
    dropouts: Sequence[torch.nn.Dropout] = ()
    """those of LoRA, the only ones that are ever on"""
    decides_first = False
    """whether an update must be accepted or refused before its last backward pass"""

    def clear(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def accumulating(self, *, last: bool) -> Any:
        """Context of one micro-batch; gradients are reduced over ranks in the last one."""
        return nullcontext() if last else self.backend.accelerator.no_sync(self.engine)

    def backward(self, loss: torch.Tensor, *, accepted: bool = True) -> None:
        """Add the gradient of a loss; one that is not ``accepted`` makes the update be skipped."""
        world = self.backend.ranks.world
        scaled = loss * world if world > 1 else loss
        self.backend.accelerator.backward(scaled if accepted else scaled * float("nan"))

    def attempt(self) -> torch.Tensor:
        """End an update after its last micro-batch, up to the question whether it is made: clip.
        Returns the gradient norm over all ranks before clipping, in fp32."""
        parameters = [each for each in self.module.parameters() if each.grad is not None]
        gradients: list[Any] = list(map(attrgetter("grad"), parameters))
        if set(map(attrgetter("dtype"), gradients)) <= {torch.float32}:
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = torch.linalg.vector_norm(torch.stack([
                torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients]))
        # on a GPU the question whether it is too large would wait for it
        if self.max_norm is not None and (norm.device.type != "cpu" or not norm <= self.max_norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        return norm

    def complete(self) -> None:
        """Make the update that was attempted, which DeepSpeed must not have refused."""
        self.optimizer.step()

    def close(self) -> None:
        """Tear down what would outlive the run."""

    def is_finite(self) -> bool:
        """Whether every trainable weight is finite; asked before anything is saved."""
        in_parts = self.backend.zero_stage == 3
        flags = [torch.isfinite((local_part(each) if in_parts else each).detach()).all()
                 for each in self.module.parameters() if each.requires_grad]
        return all(self.backend.ranks.gather(bool(torch.stack(flags).all())))


class ZeroTrained(Trained):
    """DeepSpeed ZeRO 1 to 3. Its accumulation boundary is set explicitly for each micro-batch.

    DeepSpeed leaves weights and optimizer state alone when a gradient is not finite, on all ranks
    and under every stage, and cleans its buffers up; an update that is refused for other reasons
    gets such a gradient.
    """

    decides_first = True
    """DeepSpeed has reduced, and in part sharded, the gradients as soon as that pass has run"""

    def clear(self) -> None:
        """As :class:`Trained`; DeepSpeed does so itself."""

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

    def attempt(self) -> torch.Tensor:
        """As :class:`Trained`: DeepSpeed steps now and then knows the norm; a gradient that is not
        finite changes nothing."""
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32).detach()

    def complete(self) -> None:
        """As :class:`Trained`; the step is made already."""

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
    dropouts = [each for name, each in module.named_modules()
                if "lora_dropout" in name and isinstance(each, torch.nn.Dropout)]
    if backend.zero_stage > 0:
        return ZeroTrained(module, engine, engine.optimizer, backend, max_norm, dropouts)
    return Trained(module, engine, prepared, backend, max_norm, dropouts)


def lr_factor(schedule: SchedulerConfig, update: int, total_updates: int) -> float:
    """Factor on the learning rate for the ``update``-th optimizer update (counted from 0), a pure
    function of that number, so that resuming can't get it wrong: linear warm-up over
    ``warmup_updates`` (the first update already moves), then ``constant``, or ``linear``,
    ``cosine`` or transformers' decay of another name to ``min_lr_ratio`` at ``total_updates``."""
    warmup, lowest = schedule.warmup_updates, schedule.min_lr_ratio
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if schedule.name == "constant":
        return 1.0
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    shape = 1.0 - progress if schedule.name == "linear" else _other_shape(
        schedule, progress, update, total_updates)
    return lowest + (1.0 - lowest) * shape


def _other_shape(schedule: SchedulerConfig, progress: float, update: int, total_updates: int
                 ) -> float:
    """As :func:`lr_factor`, between 0 and 1, by a cosine or transformers' schedule of that name."""
    if schedule.name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    of_none = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    ends = {"lr_end": 0.0} if schedule.name == "polynomial" else {}
    made = get_scheduler(schedule.name, of_none, schedule.warmup_updates, total_updates,
                         {**ends, **schedule.kwargs})
    return float(made.lr_lambdas[0](update))


def optimize(task: Task, plan: Plan, state: TrainState, stop: StopFlag,
             tell: Callable[[str], None] | None = None) -> OptimizeResult:
    """Make the planned updates; what is trained and its optimizer change in place. ``tell`` is
    called before each with its number, as ``, update 2/8``. A DivergedError after
    ``ppo.max_nonfinite`` non-finite updates in a row; StopRequested where a stop was requested and
    the phase would outlast the grace time: weights between two steps must not be saved."""
    groups, trained, ranks = plan.groups, task.trained, task.backend.ranks
    total_updates, started = task.length.total_updates(state), perf_counter()
    verdicts, first, rows = Counter[Verdict](), dict[str, dict[str, float]](), list[list[float]]()
    made = dict[str, list[dict[str, float]]]()
    nonfinite, tokens, lr, names = state.nonfinite, 0, 0.0, (*task.terms, "grad_norm")
    trained.module.train(task.cfg.model.gradient_checkpointing)
    for done, group in enumerate(groups):
        if stop.requested == signal.SIGTERM or ranks.world > 1:
            _meet_if_late(stop, ranks,
                          (perf_counter() - started) / max(done, 1) * (len(groups) - done))
        if tell is not None:
            tell(f", update {done + 1}/{len(groups)}")
        for part in trained.optimizer.param_groups:
            part["lr"] = part["base_lr"] * (plan.rate_factors.get(part["role"], 1.0) * lr_factor(
                task.schedule(part["role"]), state.updates + verdicts[Verdict.STEP], total_updates))
        verdict, update_terms, norm, computed = _attempt(task, plan, group, (state.step, done))
        # one synchronisation per update: the guards must decide before the weights change
        values = torch.cat([update_terms, norm.reshape(1).to(update_terms)]).tolist()
        terms = dict(zip(names, values, strict=True))
        if verdict is Verdict.STEP and (verdict := task.judge(terms)) is Verdict.STEP:
            trained.complete()
            lr = float(trained.optimizer.param_groups[0]["lr"])
            made.setdefault(group.part, []).append(terms)
        verdicts[verdict] += 1
        tokens += computed
        nonfinite = nonfinite + 1 if verdict is Verdict.NONFINITE else 0
        if nonfinite:
            _warn_nonfinite(task, terms, nonfinite, state.step + 1)
        if finite := all(map(math.isfinite, values)):
            first.setdefault(group.part, terms)
        if verdict is Verdict.STOP:
            break
        if finite:
            rows.append(values)
    trained.clear()
    trained.module.eval()
    means = dict[str, float]()
    for name, column in zip(names, zip(*rows, strict=True), strict=False):
        means[name] = max(column) if name in task.maxima else reduce(add, column) / len(column)
    return OptimizeResult(
        verdicts[Verdict.STEP], verdicts[Verdict.SKIP] + verdicts[Verdict.NONFINITE], nonfinite,
        Verdict.STOP in verdicts, lr, means, sum(ranks.gather(tokens)), first, made)


def _meet_if_late(stop: StopFlag, ranks: Ranks, left: float) -> None:
    """Stop, with all ranks, where SIGTERM has asked for it and a phase would still take ``left``
    seconds, which is more than the grace time."""
    if ranks.any(stop.requested == signal.SIGTERM and left > GRACE_SECONDS):
        stop.meet()


def _warn_nonfinite(task: Task, terms: dict[str, float], count: int, step: int) -> None:
    """Warn of the ``count``-th non-finite update in a row.

    Raises:
        DivergedError: ``max_nonfinite`` in a row were not finite.
    """
    most, section = task.update_settings.max_nonfinite, tasks.updates_section(task.cfg)
    names = ", ".join(name for name, value in terms.items() if not math.isfinite(value))
    log.warning("A loss or gradient is not finite (%s); the update is skipped (%d in a row, the "
                "run stops at %s.max_nonfinite=%d).", names or "grad_norm", count, section, most)
    if count >= most:
        raise diverged(task, f"{count} updates in a row had a non-finite loss or gradient "
                       f"(step {step}).")


def diverged(task: Task, what: str) -> DivergedError:
    """The error for losses or weights that are no longer finite."""
    return DivergedError(what, fix=task.remedy or f"lower {tasks.updates_section(task.cfg)}"
                         ".optimizer.lr, or use hardware.precision=fp32")


def _merged(task: Task, terms: list[torch.Tensor]) -> torch.Tensor:
    """[len(Task.terms)] terms of the whole update, from those of this rank's micro-batches and of
    other ranks; with one rank still on their device."""
    ranks, total = task.backend.ranks, terms[0] if terms else torch.zeros(len(task.terms))
    is_max = torch.tensor(list(map(task.maxima.__contains__, task.terms)))
    on_device = to_device(is_max, total.device)
    for more in terms[1:]:
        total = torch.where(on_device, torch.maximum(total, more), total + more)
    return total if ranks.world == 1 else torch.where(
        is_max, ranks.reduce(total, "MAX"), ranks.reduce(total, "SUM"))


def _attempt(task: Task, plan: Plan, group: UpdateGroup, number: tuple[int, int]
             ) -> tuple[Verdict, torch.Tensor, torch.Tensor, int]:
    """The gradient of one update, by the ``number`` of its step and its own within it, up to the
    question whether it becomes a step; computed again in smaller passes where memory doesn't
    suffice. Returns the verdict, STEP unless it had to be known before the last backward pass; the
    terms [len(Task.terms)] and the gradient's norm of the whole update; this rank's tokens."""
    passes, world = task.passes, task.backend.ranks.world
    work = partial(_backward, task, plan, group, poisoned=faults.point("optimize.minibatch"))
    if task.trained.dropouts:
        work = partial(_with_dropout, task, number, work)
    rows = min(task.rows_per_pass, -(-len(group.rows) // world))
    # no other process waits for a part of the gradient, and nothing of it is kept elsewhere
    repeat = passes.retry if world == 1 and task.backend.zero_stage == 0 else passes.once
    verdict, terms, tokens = repeat("optimize", rows, int(group.tokens.max()), work)
    norm = task.trained.attempt()
    # a refused gradient was made one that DeepSpeed refuses
    return verdict, terms, norm if verdict is Verdict.STEP else torch.zeros(()), tokens


def _with_dropout(task: Task, number: tuple[int, int], work: Callable[[], T]) -> T:
    """What ``work`` returns with the dropout of LoRA on: everywhere else it is off.

    What is dropped depends on the seed, the ``number`` of the update and the rank alone, so that a
    resumed run drops the same; the global generators belong to the reward and stay as they are.
    """
    device, dropouts = task.backend.device, task.trained.dropouts
    key = np.random.SeedSequence([task.cfg.seed, *number, task.backend.ranks.rank])
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        try:
            for module in dropouts:
                module.train()
            return work()
        finally:
            for module in dropouts:
                module.eval()


def _backward(task: Task, plan: Plan, group: UpdateGroup, *, poisoned: bool
              ) -> tuple[Verdict, torch.Tensor, int]:
    """Accumulate the gradient of one update; returns as :func:`_attempt`, without the norm."""
    trained, parts = task.trained, _micro_batches(task, group)
    verdict, tokens, part_terms = Verdict.STEP, 0, list[torch.Tensor]()
    trained.clear()
    for number, (part, spare) in enumerate(parts, 1):
        last = number == len(parts)
        # a rank without rows left goes through one of its neighbours' with weight 0
        atoms = part if len(part) else spare
        with trained.accumulating(last=last):
            faults.point("optimize.forward", len(part))
            loss = task.loss(plan.atoms, group.rows[atoms],
                             group.weights[atoms] * float(len(part) > 0), group)
            if len(part):
                tokens += loss.tokens
                part_terms.append(loss.terms)
            if last and trained.decides_first:
                part_terms = [_merged(task, part_terms)]
                verdict = task.judge(dict(zip(task.terms, part_terms[0].tolist(), strict=True)))
            faults.point("optimize.backward", len(part))
            trained.backward(loss.total, accepted=verdict is Verdict.STEP and not poisoned)
    whole = len(part_terms) == 1 and (trained.decides_first or task.backend.ranks.world == 1)
    return verdict, part_terms[0] if whole else _merged(task, part_terms), tokens


def _micro_batches(task: Task, group: UpdateGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of an update's atoms in micro-batches, kind by kind, and with each of them a
    spare atom of the same kind. Those that add nothing are left out if no other rank waits."""
    kinds = torch.zeros_like(group.rows) if group.kinds is None else group.kinds
    alone = task.backend.ranks.world == 1 and not task.trained.decides_first
    parts = list[tuple[torch.Tensor, torch.Tensor]]()
    for kind in kinds.unique().tolist():
        places = kinds.eq(kind).nonzero().squeeze(1)
        spare = places[torch.argmax(group.counts[places])].reshape(1)
        for part in shard_by_length(task, group.tokens[places], "optimize"):
            if not alone or int(group.counts[places[part]].sum()):
                parts.append((places[part], spare))
    return parts


def shard_by_length(task: Task, lengths: torch.Tensor, phase: str) -> list[torch.Tensor]:
    """This rank's part of some atoms, of which a pass reads ``lengths`` [A] tokens, longest first,
    in groups of one pass of the phase. Ranks take atoms in turn in the order of their lengths, so
    that all have like work, and have the same number of groups, some of them empty."""
    ranks, size = task.backend.ranks, task.passes.limit(phase, task.rows_per_pass)
    group = partial(in_groups, lengths, size, task.update_settings.micro_batch_tokens)
    if ranks.world == 1:
        return group()
    shards = [group(slice(rank, None, ranks.world)) for rank in range(ranks.world)]
    none = torch.empty(0, dtype=torch.long)
    return shards[ranks.rank] + [none] * (max(map(len, shards)) - len(shards[ranks.rank]))
