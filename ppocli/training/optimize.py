"""Phase 2 of a step: the updates that a task has planned."""

import logging
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from ppocli.config import tasks
from ppocli.distributed.backend import to_device
from ppocli.distributed.stop import StopFlag
from ppocli.errors import DivergedError
from ppocli.models.passes import in_groups, longest_first
from ppocli.runs import faults
from ppocli.training.state import TrainState
from ppocli.training.task import OptimizeResult, Plan, Task, UpdateGroup, Verdict

log = logging.getLogger("ppocli")

GRACE_SECONDS = 20.0
"""SIGTERM lets the phase finish if that takes no longer than this; Ctrl-C always does (whoever
presses it twice leaves at once)"""


def optimize(task: Task, plan: Plan, state: TrainState, stop: StopFlag,
             tell: Callable[[int, int], None] = lambda done, total: None) -> OptimizeResult:
    """Make the planned updates; what is trained and its optimizer change in place.

    Args:
        tell: called before each update with the number done and the total.

    Raises:
        DivergedError: ``ppo.max_nonfinite`` non-finite updates in a row.
        StopRequested: a stop was asked for and the phase would outlast the grace time; the weights
            are then between two steps and must not be saved.
    """
    progress, groups = _Progress(nonfinite=state.nonfinite), plan.groups
    ranks, module, started = task.backend.ranks, task.trained.module, perf_counter()
    module.train(task.cfg.model.gradient_checkpointing)
    for done, group in enumerate(groups):
        left = (perf_counter() - started) / max(done, 1) * (len(groups) - done)
        if ranks.any(stop.requested == signal.SIGTERM and left > GRACE_SECONDS):
            stop.meet()
        tell(done, len(groups))
        verdict, terms = _update(task, plan, group, state, progress)
        finite = all(map(math.isfinite, terms.values()))
        if finite:
            progress.first.setdefault(group.part, terms)
        if verdict is Verdict.STOP:
            break
        if finite:
            progress.terms.append(terms)
    task.trained.clear()
    module.eval()
    counts = progress.verdicts
    return OptimizeResult(
        counts[Verdict.STEP], counts[Verdict.SKIP] + counts[Verdict.NONFINITE], progress.nonfinite,
        Verdict.STOP in counts, progress.lr, progress.means(task.maxima),
        int(ranks.sum(torch.tensor(progress.tokens))), progress.first)


@dataclass(slots=True)
class _Progress:
    """What an optimize phase has done so far."""

    nonfinite: int
    """in a row"""
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    lr: float = 0.0
    tokens: int = 0
    terms: list[dict[str, float]] = field(default_factory=list)
    """of the updates whose terms are finite"""
    first: dict[str, dict[str, float]] = field(default_factory=dict)

    def count(self, task: Task, verdict: Verdict, terms: dict[str, float], step: int) -> None:
        """Book a verdict and speak of a skipped update.

        Raises:
            DivergedError: ``max_nonfinite`` in a row were not finite.
        """
        most, section = task.settings.max_nonfinite, tasks.updates_section(task.cfg)
        self.nonfinite = self.nonfinite + 1 if verdict is Verdict.NONFINITE else 0
        self.verdicts[verdict] += 1
        if verdict is Verdict.NONFINITE:
            names = ", ".join(name for name, value in terms.items() if not math.isfinite(value))
            log.warning("A loss or gradient is not finite (%s); the update is skipped (%d in a "
                        "row, the run stops at %s.max_nonfinite=%d).", names or "grad_norm",
                        self.nonfinite, section, most)
        elif verdict is Verdict.SKIP:
            log.warning("%s; the update is skipped.", task.why_skipped(terms))
        if self.nonfinite >= most:
            raise DivergedError(
                f"{self.nonfinite} updates in a row had a non-finite loss or gradient "
                f"(step {step}).", fix=task.remedy())

    def means(self, maxima: frozenset[str]) -> dict[str, float]:
        """The terms' means over the updates; of maxima the largest."""
        columns = {name: [terms[name] for terms in self.terms]
                   for name in (self.terms[0] if self.terms else ())}
        return {name: max(column) if name in maxima else reduce(add, column, 0.0) / len(column)
                for name, column in columns.items()}


class _Gradient(NamedTuple):
    """What the micro-batches of an update gave, beside the gradient itself."""

    verdict: Verdict
    """:attr:`Verdict.STEP` unless it had to be known before the last backward pass"""
    terms: torch.Tensor
    """[len(Task.terms)] of the whole update; with one rank still on their device"""
    tokens: int
    """computed on this rank"""


def _whole(task: Task, terms: list[torch.Tensor]) -> torch.Tensor:
    """Terms of the whole update, from those of this rank's micro-batches and of other ranks."""
    ranks, total = task.backend.ranks, terms[0] if terms else torch.zeros(len(task.terms))
    is_max = torch.tensor([name in task.maxima for name in task.terms])
    on_device = to_device(is_max, total.device)
    for more in terms[1:]:
        total = torch.where(on_device, torch.maximum(total, more), total + more)
    return total if ranks.world == 1 else torch.where(is_max, ranks.max(total), ranks.sum(total))


def _figures(task: Task, terms: torch.Tensor, norm: torch.Tensor) -> dict[str, float]:
    """One synchronisation per update: the guards must decide before the weights change."""
    figures = torch.cat([terms, norm.reshape(1).to(terms)]).tolist()
    return dict(zip((*task.terms, "grad_norm"), figures, strict=True))


def _update(task: Task, plan: Plan, group: UpdateGroup, state: TrainState, progress: _Progress
            ) -> tuple[Verdict, dict[str, float]]:
    """Gradient, guards, and (unless a guard objects) one optimizer step."""
    factors = task.rate_factors(state, state.updates + progress.verdicts[Verdict.STEP])
    verdict, update_terms, tokens = _gradient(
        task, plan, group, (state.step, progress.verdicts.total()),
        poisoned=faults.point("optimize.minibatch"))
    progress.tokens += tokens
    norm = task.trained.attempt(factors)
    refused = verdict is not Verdict.STEP  # its gradient was made one that DeepSpeed refuses
    terms = _figures(task, update_terms, torch.zeros(()) if refused else norm)
    verdict = verdict if refused else task.judge(terms)
    if verdict is Verdict.STEP:
        progress.lr = task.trained.complete(factors)
    progress.count(task, verdict, terms, state.step + 1)
    return verdict, terms


@contextmanager
def _dropout(task: Task, number: tuple[int, int]) -> Iterator[None]:
    """A context with the dropout of LoRA on, where there is any: everywhere else it is off.

    What is dropped depends on the seed, the ``number`` of the update and the rank alone, so that a
    resumed run drops the same; the global generators belong to the reward and stay as they are.
    """
    dropouts = [module for name, module in task.trained.module.named_modules()
                if "lora_dropout" in name and isinstance(module, torch.nn.Dropout)]
    if not dropouts:
        yield
        return
    device = task.backend.device
    key = np.random.SeedSequence([task.cfg.seed, *number, task.backend.ranks.rank])
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        try:
            for module in dropouts:
                module.train()
            yield
        finally:
            for module in dropouts:
                module.eval()


def _gradient(task: Task, plan: Plan, group: UpdateGroup, number: tuple[int, int], *,
              poisoned: bool) -> _Gradient:
    """The gradient of one update in place of any before; made anew in smaller passes where memory
    doesn't suffice.

    Args:
        number: of the step, and of the update within it.

    Raises:
        OutOfMemoryError: there is no room for one row; of several ranks ``alone`` on this one.
    """
    def work() -> _Gradient:
        task.trained.clear()
        with _dropout(task, number):
            return _backward(task, plan, group, poisoned=poisoned)

    share = math.ceil(len(group.rows) / task.backend.ranks.world)
    rows = min(tasks.rows_per_pass(task.settings), share)
    longest, passes = int(group.tokens.max()), task.passes
    # no other process waits for a part of the gradient, and nothing of it is kept elsewhere
    if task.backend.ranks.world == 1 and task.backend.zero_stage == 0:
        return passes.retry("optimize", rows, longest, work)
    return passes.once("optimize", passes.limit("optimize", rows), longest, work)


def _backward(task: Task, plan: Plan, group: UpdateGroup, *, poisoned: bool) -> _Gradient:
    """Accumulate the gradient of one update."""
    ranks, trained = task.backend.ranks, task.trained
    parts = _micro_batches(task, group)
    if ranks.world == 1 and not trained.decides_first:
        parts = [(part, spare) for part, spare in parts if int(group.counts[part].sum())]
    verdict, tokens, part_terms = Verdict.STEP, 0, list[torch.Tensor]()
    terms: torch.Tensor | None = None
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
                terms = _whole(task, part_terms)
                verdict = task.judge(dict(zip(task.terms, terms.tolist(), strict=True)))
            faults.point("optimize.backward", len(part))
            trained.backward(loss.total, accepted=verdict is Verdict.STEP and not poisoned)
    return _Gradient(verdict, _whole(task, part_terms) if terms is None else terms, tokens)


def _micro_batches(task: Task, group: UpdateGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of an update's atoms in micro-batches, kind by kind, and with each of them a
    spare atom of the same kind."""
    kinds = torch.zeros_like(group.rows) if group.kinds is None else group.kinds
    parts = list[tuple[torch.Tensor, torch.Tensor]]()
    for kind in kinds.unique().tolist():
        places = kinds.eq(kind).nonzero().squeeze(1)
        spare = places[torch.argmax(group.counts[places])].reshape(1)
        parts += [(places[part], spare)
                  for part in shard_by_length(task, group.tokens[places], "optimize")]
    return parts


def shard_by_length(task: Task, lengths: torch.Tensor, phase: str) -> list[torch.Tensor]:
    """This rank's part of some atoms, longest first, in groups of one forward pass.

    Ranks take atoms in turn in the order of their lengths, so that all have like work. Every rank
    has the same number of groups; one that has fewer atoms fills up with empty ones.

    Args:
        lengths: [A] tokens that a pass over each atom reads.
        phase: whose passes these are.
    """
    ranks, tokens = task.backend.ranks, task.settings.micro_batch_tokens
    size = task.passes.limit(phase, tasks.rows_per_pass(task.settings))
    order = longest_first(lengths)
    shards = [in_groups(order[rank::ranks.world], lengths, size, tokens)
              for rank in range(ranks.world)]
    passes = max(map(len, shards))
    return [*shards[ranks.rank], *[order[:0]] * (passes - len(shards[ranks.rank]))]
