"""Phase 2 of a step: the updates that a task has planned."""

import logging
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import add
from time import perf_counter

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
from ppocli.training.updates import lr_factor

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
        StopRequested: a stop was requested and the phase would outlast the grace time; the weights
            are then between two steps and must not be saved.
    """
    groups, trained, ranks = plan.groups, task.trained, task.backend.ranks
    schedules = {group["role"]: task.schedule(group["role"])
                 for group in trained.optimizer.param_groups}
    total_updates, started = task.length.total_updates(task.cfg, state), perf_counter()
    verdicts, first, rows = Counter[Verdict](), dict[str, dict[str, float]](), list[list[float]]()
    made = dict[str, list[dict[str, float]]]()
    nonfinite, tokens, lr = state.nonfinite, 0, 0.0
    trained.module.train(task.cfg.model.gradient_checkpointing)
    for done, group in enumerate(groups):
        left = (perf_counter() - started) / max(done, 1) * (len(groups) - done)
        if ranks.any(stop.requested == signal.SIGTERM and left > GRACE_SECONDS):
            stop.meet()
        tell(done, len(groups))
        factors = {role: plan.rate_factors.get(role, 1.0) * lr_factor(
            schedule, state.updates + verdicts[Verdict.STEP], total_updates)
                   for role, schedule in schedules.items()}
        verdict, update_terms, norm, computed = _attempt(task, plan, group, (state.step, done),
                                                         factors)
        # one synchronisation per update: the guards must decide before the weights change
        values = torch.cat([update_terms, norm.reshape(1).to(update_terms)]).tolist()
        terms = dict(zip((*task.terms, "grad_norm"), values, strict=True))
        if verdict is Verdict.STEP and (verdict := task.judge(terms)) is Verdict.STEP:
            lr = trained.complete(factors)
            made.setdefault(group.part, []).append(terms)
        verdicts[verdict] += 1
        tokens += computed
        nonfinite = nonfinite + 1 if verdict is Verdict.NONFINITE else 0
        if nonfinite:
            _warn_nonfinite(task, terms, nonfinite, state.step + 1)
        finite = all(map(math.isfinite, values))
        if finite:
            first.setdefault(group.part, terms)
        if verdict is Verdict.STOP:
            break
        if finite:
            rows.append(values)
    trained.clear()
    trained.module.eval()
    columns = zip((*task.terms, "grad_norm"), zip(*rows, strict=True), strict=False)
    return OptimizeResult(
        verdicts[Verdict.STEP], verdicts[Verdict.SKIP] + verdicts[Verdict.NONFINITE], nonfinite,
        Verdict.STOP in verdicts, lr,
        {name: max(column) if name in task.maxima else reduce(add, column) / len(column)
         for name, column in columns}, int(ranks.sum(torch.tensor(tokens))), first, made)


def _warn_nonfinite(task: Task, terms: dict[str, float], count: int, step: int) -> None:
    """Warn of the ``count``-th non-finite update in a row.

    Raises:
        DivergedError: ``max_nonfinite`` in a row were not finite.
    """
    most, section = tasks.updates_of(task.cfg).max_nonfinite, tasks.updates_section(task.cfg)
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
    return total if ranks.world == 1 else torch.where(is_max, ranks.max(total), ranks.sum(total))


def _attempt(task: Task, plan: Plan, group: UpdateGroup, number: tuple[int, int],
             factors: dict[str, float]) -> tuple[Verdict, torch.Tensor, torch.Tensor, int]:
    """The gradient of one update in place of any before, up to the question whether it becomes a
    step; computed again in smaller passes where memory doesn't suffice.

    Args:
        number: of the step, and of the update within it.
        factors: on the learning rate of each role.

    Returns:
        the verdict, :attr:`Verdict.STEP` unless it had to be known before the last backward pass;
        the terms [len(Task.terms)] of the whole update; the norm of the gradient; and the tokens
        computed on this rank.

    Raises:
        OutOfMemoryError: there is no room for one row; of several ranks ``alone`` on this one.
    """
    poisoned, passes, world = faults.point("optimize.minibatch"), task.passes, \
        task.backend.ranks.world

    def work() -> tuple[Verdict, torch.Tensor, int]:
        task.trained.clear()
        with _dropout(task, number):
            return _backward(task, plan, group, poisoned=poisoned)

    rows = min(tasks.rows_per_pass(tasks.updates_of(task.cfg)), -(-len(group.rows) // world))
    longest = int(group.tokens.max())
    # no other process waits for a part of the gradient, and nothing of it is kept elsewhere
    if world == 1 and task.backend.zero_stage == 0:
        verdict, terms, tokens = passes.retry("optimize", rows, longest, work)
    else:
        verdict, terms, tokens = passes.once("optimize", passes.limit("optimize", rows), longest,
                                             work)
    norm = task.trained.attempt(factors)
    # a refused gradient was made one that DeepSpeed refuses
    return verdict, terms, norm if verdict is Verdict.STEP else torch.zeros(()), tokens


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


def _backward(task: Task, plan: Plan, group: UpdateGroup, *, poisoned: bool
              ) -> tuple[Verdict, torch.Tensor, int]:
    """Accumulate the gradient of one update; returns as :func:`_attempt`, without the norm."""
    trained, parts = task.trained, _micro_batches(task, group)
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
                terms = _merged(task, part_terms)
                verdict = task.judge(dict(zip(task.terms, terms.tolist(), strict=True)))
            faults.point("optimize.backward", len(part))
            trained.backward(loss.total, accepted=verdict is Verdict.STEP and not poisoned)
    return verdict, _merged(task, part_terms) if terms is None else terms, tokens


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
    """This rank's part of some atoms, longest first, in groups of one forward pass.

    Ranks take atoms in turn in the order of their lengths, so that all have like work. Every rank
    has the same number of groups; one that has fewer atoms fills up with empty ones.

    Args:
        lengths: [A] tokens that a pass over each atom reads.
        phase: whose passes these are.
    """
    ranks, settings = task.backend.ranks, tasks.updates_of(task.cfg)
    size = task.passes.limit(phase, tasks.rows_per_pass(settings))
    order, most = longest_first(lengths), settings.micro_batch_tokens
    shard = in_groups(order[ranks.rank::ranks.world], lengths, size, most)
    if ranks.world > 1:
        passes = max(len(in_groups(order[rank::ranks.world], lengths, size, most))
                     for rank in range(ranks.world))
        shard += [order[:0]] * (passes - len(shard))
    return shard
