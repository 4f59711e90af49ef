"""Phase 2: clipped PPO updates on one rollout's experience."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from time import perf_counter

import numpy as np
import torch

from ppocli.config.algorithm import kl_estimator, value_scheduler
from ppocli.config.schema import PPOConfig, SchedulerConfig
from ppocli.errors import DivergedError
from ppocli.models.passes import in_groups
from ppocli.parallel.ranks import Ranks
from ppocli.parallel.stop import StopFlag
from ppocli.ppo.losses import LossOptions, PPOLoss, ppo_loss, token_weights
from ppocli.ppo.schedule import lr_factor
from ppocli.storage import faults
from ppocli.tasks.ppo.records import Experience, TrainState
from ppocli.tasks.ppo.replay import remembering, say_again
from ppocli.tasks.ppo.session import Session
from ppocli.train.optimizers import Factors
from ppocli.zero.oom_retry import fitting, once

log = logging.getLogger("ppocli")

GRACE_SECONDS = 20.0
"""SIGTERM lets the phase finish if that takes no longer than this; Ctrl-C always does (whoever
presses it twice leaves at once)"""
TERMS = tuple(f.name for f in fields(PPOLoss))


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """What phase 2 did. ``terms`` are means over the updates of :class:`PPOLoss` and the norm."""

    updates: int
    skipped: int
    nonfinite: int
    """non-finite updates in a row at the end"""
    early_stopped: bool
    lr: float
    terms: dict[str, float]
    tokens: int
    """tokens that went through forward and backward, on all ranks"""


def minibatches(count: int, size: int, *, seed: int, step: int, epoch: int
                ) -> Iterator[torch.Tensor]:
    """Row numbers of each minibatch of one epoch, reshuffled every epoch; the last may be smaller.

    The order is a function of (seed, step, epoch) alone.
    """
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    yield from torch.from_numpy(order).split(size)


def on_device(experience: Experience, device: torch.device) -> Experience:
    """The figures that losses are made of on ``device``, once for all updates. Tokens and masks
    stay on the CPU, where batches are laid out without waiting for the device."""
    names = ("logprobs", "values", "advantages", "returns", "ref_logprobs")
    return replace(experience, **{name: tensor.to(device) for name in names
                                  if (tensor := getattr(experience, name)) is not None})


def _micro_batches(session: Session, spans: torch.Tensor) -> list[torch.Tensor]:
    """This rank's rows of a minibatch, longest first, in groups of one forward pass.

    Rows are dealt over ranks in the order of their lengths, so that all have like work. Every rank
    has the same number of groups; one that has fewer rows fills up with empty ones.
    """
    ranks, tokens = session.backend.ranks, session.cfg.ppo.micro_batch_tokens
    size = session.fits.rows("optimize", session.forward_rows)
    order = torch.argsort(spans, descending=True, stable=True)
    dealt = [in_groups(order[rank::ranks.world], spans, size, tokens)
             for rank in range(ranks.world)]
    mine, passes = dealt[ranks.rank], max(map(len, dealt))
    return [*mine, *[order[:0]] * (passes - len(mine))]


def loss_options(ppo: PPOConfig, kl_coef: float) -> LossOptions:
    """The loss that a configuration asks for, with the coefficient of its KL term."""
    return LossOptions(
        cliprange=ppo.cliprange, cliprange_high=ppo.cliprange_high, dual_clip=ppo.dual_clip,
        cliprange_value=ppo.cliprange_value, vf_coef=ppo.vf_coef, ent_coef=ppo.ent_coef,
        kl_coef=kl_coef, kl_estimator=kl_estimator(ppo))


def _loss(session: Session, experience: Experience, chosen: torch.Tensor, weights: torch.Tensor, *,
          total_tokens: int, value_only: bool) -> tuple[PPOLoss, int]:
    """The loss of one micro-batch, and how many tokens were computed.

    Args:
        chosen: rows of ``experience``.
        weights: of each response token of these rows, laid flat.
    """
    ppo, device = session.cfg.ppo, session.backend.device
    mask = experience.response_mask[chosen]
    out, tokens = say_again(session, experience, chosen, value_only=value_only)
    row, column = mask.nonzero(as_tuple=True)
    place = (chosen[row] * mask.shape[1] + column).to(device)

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1).index_select(0, place)

    def given(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else flat(x)

    loss = ppo_loss(
        loss_options(ppo, experience.kl_coef), logprobs=out.logprobs, values=out.values,
        entropy=out.entropy, old_logprobs=flat(experience.logprobs),
        advantages=flat(experience.advantages), old_values=given(experience.values),
        returns=given(experience.returns), ref_logprobs=given(experience.ref_logprobs),
        weights=weights.to(device), total_tokens=total_tokens)
    return loss, tokens


@dataclass(slots=True)
class _Sums:
    """Terms of an update's loss, summed over micro-batches: those of this rank, or of all."""

    terms: torch.Tensor | None = None
    tokens: int = 0
    whole: torch.Tensor | None = None
    """of all ranks, once they have been asked"""

    def add(self, loss: PPOLoss, tokens: int) -> None:
        """Add a micro-batch."""
        terms = torch.stack([getattr(loss, name).detach() for name in TERMS])
        self.terms = terms if self.terms is None else _add_terms(self.terms, terms)
        self.tokens += tokens

    def over(self, ranks: Ranks) -> torch.Tensor:
        """[len(TERMS)] of the whole update; with one rank still on its device."""
        own = torch.zeros(len(TERMS)) if self.terms is None else self.terms
        if ranks.world == 1:
            return own
        if self.whole is None:
            largest = TERMS.index("max_log_ratio")
            self.whole = ranks.sum(own)
            self.whole[largest] = ranks.max(own)[largest]
        return self.whole


def _backward(session: Session, experience: Experience, rows: torch.Tensor, sums: _Sums, *,
              value_only: bool, poisoned: bool) -> str:
    """Accumulate the gradient of one minibatch.

    Returns:
        the verdict on its loss terms where it had to be found before the last backward pass; else
        ``step``.
    """
    ppo, updates = session.cfg.ppo, session.updates
    lengths = experience.response_mask[rows].sum(1)
    total_tokens = int(lengths.sum())
    weights = token_weights(lengths, aggregation=ppo.loss_aggregation, total_tokens=total_tokens,
                            total_samples=len(rows),
                            max_tokens=session.sampling.max_new_tokens)
    spans = lengths + experience.prompt_mask[rows].sum(1)
    parts = _micro_batches(session, spans)
    if session.backend.ranks.world == 1 and not updates.decides_first:
        parts = [part for part in parts if int(lengths[part].sum())]
    verdict = "step"
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        # a rank without rows left goes through one of its neighbours' with weight 0
        some = part if len(part) else torch.argmax(lengths).reshape(1)
        with updates.accumulating(last=last):
            faults.point("optimize.forward", len(part))
            loss, tokens = _loss(
                session, experience, rows[some],
                weights[some].repeat_interleave(lengths[some]) * float(len(part) > 0),
                total_tokens=total_tokens, value_only=value_only)
            if len(part):
                sums.add(loss, tokens)
            if last and updates.decides_first:
                found = dict(zip(TERMS, sums.over(session.backend.ranks).tolist(), strict=True))
                verdict = judge(session, found)
            faults.point("optimize.backward", len(part))
            updates.backward(loss.total, accepted=verdict == "step" and not poisoned)
    return verdict


def _gradient(session: Session, experience: Experience, rows: torch.Tensor, *, value_only: bool,
              poisoned: bool) -> tuple[str, _Sums]:
    """The gradient of one minibatch in place of any before, and what :func:`_backward` says of it;
    made anew in smaller passes where memory doesn't suffice.

    Raises:
        OutOfMemoryError: there is no room for one row; of several ranks ``alone`` on this one.
    """
    def work() -> tuple[str, _Sums]:
        session.updates.clear()
        sums = _Sums()
        return _backward(session, experience, rows, sums, value_only=value_only,
                         poisoned=poisoned), sums

    backend = session.backend
    asked = min(session.forward_rows, math.ceil(len(rows) / backend.ranks.world))
    longest = int((experience.response_mask[rows].sum(1) + experience.prompt_mask[rows].sum(1)
                   ).max())
    if session.updates.can_repeat:
        return fitting(session, "optimize", asked, longest, work)
    return once(backend, "optimize", session.fits.rows("optimize", asked), longest, work)


def _add_terms(sums: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    total = sums + terms
    largest = TERMS.index("max_log_ratio")
    total[largest] = torch.maximum(sums[largest], terms[largest])
    return total


def judge(session: Session, terms: dict[str, float]) -> str:
    """``step``, ``skip``, ``nonfinite`` or ``stop`` for an update with these terms, over all
    ranks."""
    ppo = session.cfg.ppo
    if not all(np.isfinite(v) for v in terms.values()):
        return "nonfinite"
    if ppo.target_kl is not None and terms["approx_kl"] > 1.5 * ppo.target_kl:
        return "stop"
    if ppo.ratio_threshold is not None and terms["ratio"] > ppo.ratio_threshold:
        return "skip"
    return "step"


@dataclass(slots=True)
class _Progress:
    """What one optimize phase has done so far."""

    updates: int = 0
    skipped: int = 0
    nonfinite: int = 0
    lr: float = 0.0
    tokens: int = 0

    def count(self, session: Session, verdict: str, terms: dict[str, float], step: int) -> None:
        """Book a verdict and speak of a skipped update.

        Raises:
            DivergedError: ``max_nonfinite`` in a row were not finite.
        """
        ppo = session.cfg.ppo
        self.nonfinite = self.nonfinite + 1 if verdict == "nonfinite" else 0
        self.updates += verdict == "step"
        self.skipped += verdict in ("skip", "nonfinite")
        if verdict == "nonfinite":
            log.warning("A loss or gradient is not finite; the update is skipped (%d in a row, "
                        "the run stops at ppo.max_nonfinite=%d).", self.nonfinite,
                        ppo.max_nonfinite)
        elif verdict == "skip":
            log.warning("Mean ratio %.3g exceeds ppo.ratio_threshold=%g; the update is skipped.",
                        terms["ratio"], ppo.ratio_threshold)
        if self.nonfinite >= ppo.max_nonfinite:
            raise DivergedError(
                f"{self.nonfinite} updates in a row had a non-finite loss or gradient "
                f"(step {step}).", fix="lower ppo.optimizer.lr, raise "
                "ppo.init_kl_coef, check the reward's scale, or use hardware.precision=fp32")


def _factors(session: Session, state: TrainState, update: int) -> Factors:
    """What the schedules make of the learning rates at an update, counted over the whole run."""
    total = session.total_updates(state)

    def factor(schedule: SchedulerConfig) -> float:
        return lr_factor(update, name=schedule.name, total_updates=total,
                         warmup_updates=schedule.warmup_updates, min_lr_ratio=schedule.min_lr_ratio)

    return Factors(factor(session.cfg.ppo.scheduler), factor(value_scheduler(session.cfg.ppo)))


def _update(session: Session, experience: Experience, rows: torch.Tensor, state: TrainState,
            progress: _Progress, *, value_only: bool) -> tuple[str, dict[str, float]]:
    """Gradient, guards, and (unless a guard objects) one optimizer step."""
    updates = session.updates
    factors = _factors(session, state, state.updates + progress.updates)
    poisoned = faults.point("optimize.minibatch")
    verdict, sums = _gradient(session, experience, rows, value_only=value_only, poisoned=poisoned)
    progress.tokens += sums.tokens
    if updates.decides_first:
        lr = updates.apply(factors)
        norm = updates.norm()
        if verdict != "step":  # its gradient was made one that DeepSpeed refuses
            norm = torch.zeros(())
    else:
        norm = updates.norm()
    # one synchronisation per update: the guards must speak before the weights move
    terms_now = sums.over(session.backend.ranks)
    figures = torch.cat([terms_now, norm.reshape(1).to(terms_now)]).tolist()
    terms = dict(zip((*TERMS, "grad_norm"), figures, strict=True))
    if verdict == "step":
        verdict = judge(session, terms)
    if verdict == "step":
        progress.lr = lr if updates.decides_first else updates.apply(factors)
    progress.count(session, verdict, terms, state.step + 1)
    return verdict, terms


def optimize(session: Session, experience: Experience, state: TrainState, stop: StopFlag,
             tell: Callable[[int, int], None] | None = None) -> OptimizeResult:
    """``ppo_epochs`` passes of minibatch updates; the policy and optimizer change in place.

    Updates made = ppo_epochs x ceil(samples / mini_batch_size), less skipped ones and less what
    ``target_kl`` cuts off.

    Args:
        tell: hears before each minibatch how many are done, of how many.

    Raises:
        DivergedError: ``max_nonfinite`` non-finite updates in a row.
        StopRequested: a stop was asked for and the phase would outlast the grace time; the policy
            is then between two steps and must not be saved.
    """
    ppo = session.cfg.ppo
    value_only = state.step < ppo.critic_warmup_steps
    progress = _Progress(nonfinite=state.nonfinite)
    batches = [rows for epoch in range(ppo.ppo_epochs) for rows in minibatches(
        len(experience), ppo.mini_batch_size, seed=session.cfg.seed, step=state.step, epoch=epoch)]
    experience = remembering(session, on_device(experience, session.backend.device))
    sums: dict[str, float] = {}
    seen, stopped, started = 0, False, perf_counter()
    session.policy.train(session.cfg.model.gradient_checkpointing)
    for done, rows in enumerate(batches):
        left = (perf_counter() - started) / max(done, 1) * (len(batches) - done)
        if session.backend.ranks.any(stop.requested == signal.SIGTERM and left > GRACE_SECONDS):
            stop.meet()
        if tell is not None:
            tell(done, len(batches))
        verdict, terms = _update(session, experience, rows, state, progress, value_only=value_only)
        if verdict == "stop":
            stopped = True
            break
        if all(np.isfinite(v) for v in terms.values()):
            seen += 1
            for name, value in terms.items():
                sums[name] = (max(sums.get(name, 0.0), value) if name == "max_log_ratio"
                              else sums.get(name, 0.0) + value)
    session.updates.clear()
    session.policy.eval()
    means = {n: (v if n == "max_log_ratio" else v / max(seen, 1)) for n, v in sums.items()}
    tokens = int(session.backend.ranks.sum(torch.tensor(progress.tokens)))
    return OptimizeResult(progress.updates, progress.skipped, progress.nonfinite, stopped,
                          progress.lr, means, tokens)


def probe_gradient(session: Session, experience: Experience) -> dict[str, float]:
    """The loss terms and gradient norm of one forward and backward pass over all samples, as means
    over the update it would be. No weight moves and the gradient is dropped."""
    session.policy.train(session.cfg.model.gradient_checkpointing)
    _, sums = _gradient(session, on_device(experience, session.backend.device),
                        torch.arange(len(experience)), value_only=False, poisoned=False)
    norm = session.updates.norm()
    session.updates.clear()
    session.policy.eval()
    found = sums.over(session.backend.ranks)
    figures = torch.cat([found, norm.reshape(1).to(found)]).tolist()
    return dict(zip((*TERMS, "grad_norm"), figures, strict=True))
