"""Phase 2: clipped PPO updates on one rollout's experience."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from time import perf_counter

import numpy as np
import torch

from ppocli.engine import faults
from ppocli.engine.backend import set_learning_rate
from ppocli.engine.records import Experience, TrainState
from ppocli.engine.rollout import rows_by_length
from ppocli.engine.session import Session
from ppocli.engine.stop import StopFlag
from ppocli.errors import DivergedError
from ppocli.models.layout import lay_out
from ppocli.ppo.losses import PPOLoss, ppo_loss, token_weights
from ppocli.ppo.schedule import lr_factor

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
    """tokens that went through forward and backward"""


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
    return replace(experience, logprobs=experience.logprobs.to(device),
                   values=experience.values.to(device),
                   advantages=experience.advantages.to(device),
                   returns=experience.returns.to(device))


def _backward(session: Session, experience: Experience, rows: torch.Tensor, *, value_only: bool
              ) -> tuple[torch.Tensor, int]:
    """Accumulate the gradient of one minibatch.

    Returns:
        the terms of its loss, in the order of ``TERMS``, on the device; and tokens computed.
    """
    ppo, device = session.cfg.ppo, session.backend.device
    lengths = experience.response_mask[rows].sum(1)
    total_tokens = int(lengths.sum())
    weights = token_weights(lengths, aggregation=ppo.loss_aggregation, total_tokens=total_tokens,
                            total_samples=len(rows))
    spans = lengths + experience.prompt_mask[rows].sum(1)
    sums: torch.Tensor | None = None
    tokens = 0
    for part in rows_by_length(spans, session.forward_rows):
        chosen = rows[part]
        mask = experience.response_mask[chosen]
        if not bool(mask.any()):
            continue
        batch = lay_out(experience.prompt_tokens[chosen], experience.prompt_mask[chosen],
                        experience.response_tokens[chosen], mask).to(device)
        out = session.engine(batch, temperature=session.sampling.temperature,
                             want_entropy=ppo.ent_coef > 0, value_only=value_only)

        row, column = mask.nonzero(as_tuple=True)
        place = (chosen[row] * mask.shape[1] + column).to(device)

        def flat(x: torch.Tensor, place: torch.Tensor = place) -> torch.Tensor:
            return x.reshape(-1).index_select(0, place)

        loss = ppo_loss(
            logprobs=out.logprobs, values=out.values, entropy=out.entropy,
            old_logprobs=flat(experience.logprobs), old_values=flat(experience.values),
            advantages=flat(experience.advantages), returns=flat(experience.returns),
            weights=weights[part].repeat_interleave(lengths[part]).to(device),
            total_tokens=total_tokens, cliprange=ppo.cliprange,
            cliprange_value=ppo.cliprange_value, vf_coef=ppo.vf_coef, ent_coef=ppo.ent_coef)
        session.backend.accelerator.backward(loss.total)
        terms = torch.stack([getattr(loss, name).detach() for name in TERMS])
        sums = terms if sums is None else _add_terms(sums, terms)
        tokens += batch.tokens.numel()
    return (torch.zeros(len(TERMS)) if sums is None else sums), tokens


def _add_terms(sums: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    total = sums + terms
    largest = TERMS.index("max_log_ratio")
    total[largest] = torch.maximum(sums[largest], terms[largest])
    return total


def _clip_gradient(session: Session) -> torch.Tensor:
    """The gradient norm before clipping, on the device."""
    parameters = [p for p in session.policy.parameters() if p.grad is not None]
    limit = session.cfg.ppo.max_grad_norm
    norm = session.backend.accelerator.clip_grad_norm_(
        parameters, float("inf") if limit is None else limit)
    return norm.detach()


@dataclass(slots=True)
class _Progress:
    """What one optimize phase has done so far."""

    updates: int = 0
    skipped: int = 0
    nonfinite: int = 0
    lr: float = 0.0
    tokens: int = 0

    def verdict(self, session: Session, terms: dict[str, float]) -> str:
        """``step``, ``skip`` or ``stop`` for one minibatch whose gradient is ready."""
        ppo = session.cfg.ppo
        if not all(np.isfinite(v) for v in terms.values()):
            self.nonfinite += 1
            log.warning("A loss or gradient is not finite; the update is skipped (%d in a row, "
                        "the run stops at ppo.max_nonfinite=%d).", self.nonfinite,
                        ppo.max_nonfinite)
            return "skip"
        self.nonfinite = 0
        if ppo.target_kl is not None and terms["approx_kl"] > 1.5 * ppo.target_kl:
            return "stop"
        if ppo.ratio_threshold is not None and terms["ratio"] > ppo.ratio_threshold:
            log.warning("Mean ratio %.3g exceeds ppo.ratio_threshold=%g; the update is skipped.",
                        terms["ratio"], ppo.ratio_threshold)
            return "skip"
        return "step"


def _update(session: Session, experience: Experience, rows: torch.Tensor, state: TrainState,
            progress: _Progress, *, value_only: bool) -> tuple[str, dict[str, float]]:
    """Gradient, guards, and (unless a guard objects) one optimizer step."""
    ppo = session.cfg.ppo
    session.optimizer.zero_grad(set_to_none=True)
    sums, tokens = _backward(session, experience, rows, value_only=value_only)
    progress.tokens += tokens
    if faults.point("optimize.minibatch"):
        for parameter in session.policy.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))
    norm = _clip_gradient(session)
    # one synchronisation per update: the guards must speak before the weights move
    figures = torch.cat([sums, norm.reshape(1).to(sums)]).tolist()
    terms = dict(zip((*TERMS, "grad_norm"), figures, strict=True))
    verdict = progress.verdict(session, terms)
    if verdict == "step":
        factor = lr_factor(state.updates + progress.updates, name=ppo.scheduler.name,
                           total_updates=session.total_updates(state),
                           warmup_updates=ppo.scheduler.warmup_updates,
                           min_lr_ratio=ppo.scheduler.min_lr_ratio)
        progress.lr = set_learning_rate(session.optimizer, factor)
        session.optimizer.step()
        progress.updates += 1
    elif verdict == "skip":
        progress.skipped += 1
        if progress.nonfinite >= ppo.max_nonfinite:
            raise DivergedError(
                f"{progress.nonfinite} updates in a row had a non-finite loss or gradient "
                f"(step {state.step + 1}).", fix="lower ppo.optimizer.lr, raise "
                "ppo.init_kl_coef, check the reward's scale, or use hardware.precision=fp32")
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
    experience = on_device(experience, session.backend.device)
    sums: dict[str, float] = {}
    seen, stopped, started = 0, False, perf_counter()
    session.policy.train(session.cfg.model.gradient_checkpointing)
    for done, rows in enumerate(batches):
        if stop.requested == signal.SIGTERM and (perf_counter() - started) / max(done, 1) * (
                len(batches) - done) > GRACE_SECONDS:
            stop.check()
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
    session.optimizer.zero_grad(set_to_none=True)
    session.policy.eval()
    means = {n: (v if n == "max_log_ratio" else v / max(seen, 1)) for n, v in sums.items()}
    return OptimizeResult(progress.updates, progress.skipped, progress.nonfinite, stopped,
                          progress.lr, means, progress.tokens)


def probe_gradient(session: Session, experience: Experience) -> dict[str, float]:
    """The loss terms and gradient norm of one forward and backward pass over all samples, as means
    over the update it would be. No weight moves and the gradient is dropped."""
    session.policy.train(session.cfg.model.gradient_checkpointing)
    sums, _ = _backward(session, on_device(experience, session.backend.device),
                        torch.arange(len(experience)), value_only=False)
    norm = _clip_gradient(session)
    session.optimizer.zero_grad(set_to_none=True)
    session.policy.eval()
    figures = torch.cat([sums, norm.reshape(1).to(sums)]).tolist()
    return dict(zip((*TERMS, "grad_norm"), figures, strict=True))
