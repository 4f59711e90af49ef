"""A rollout, the record of phase 1: forward passes over the chunks that were sampled, and the
chunks of all ranks as one. All ranks call what is here in step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from ppocli.config.tasks import kl_term
from ppocli.data.data_set import PromptBatch, RowRecord, joined, rows_of
from ppocli.errors import ConfigError
from ppocli.models import layout
from ppocli.models import policy as policies
from ppocli.models.head import HeadWeights, OtherHead
from ppocli.models.layout import Sequences
from ppocli.models.policy import Policy
from ppocli.ppo.losses import kl_per_token
from ppocli.ppo.session import EvalSession, Session
from ppocli.rewards.reward_records import RewardScores
from ppocli.runs import faults
from ppocli.runs.episode import Episode, turn_numbers, without_environments
from ppocli.sampling.samples import Samples
from ppocli.training.state import PhaseClock
from ppocli.training.task import StepContext


@dataclass(frozen=True, slots=True)
class Chunk:
    """One generated chunk."""

    out: Samples
    """its samples, the last of which may only keep the ranks in step"""
    prompts: PromptBatch
    """of this rank's own samples, as all below"""
    samples: Samples
    responses: list[str]


@dataclass(frozen=True, slots=True)
class RolloutExtras:
    """What only some configurations know of the B samples of a rollout."""

    dense: torch.Tensor | None = None
    """[B, R] per-token rewards, when a reward gives them"""
    sampler_logprobs: torch.Tensor | None = None
    """[B, R] fp32 as the sampler computed them, where ``Rollout.logprobs`` are others; zero from a
    sampler that computes none"""
    frozen_states: list[torch.Tensor | None] = field(default_factory=list)
    """[n, D] of each sample, on the device: the inputs of the lowest layer that trains, where they
    were kept; empty where none were"""
    ref_states: list[torch.Tensor] = field(default_factory=list)
    """[n, D] of each sample: the reference's final states at its response tokens; empty unless the
    loss compares whole distributions"""
    gaps: torch.Tensor | None = None
    """[B, R] as of :class:`~ppocli.ppo.advantages.AdvantageInputs`"""
    episodes: list[Episode] = field(default_factory=list)
    """[B] what happened, where an environment answered; else none"""
    waiting: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """samples for later steps (:mod:`ppocli.ppo.rollout_sources`)"""
    sampled: int = 0
    """samples of dynamic sampling, those it left out included; 0 without it"""
    sampled_tokens: int = 0
    """response tokens of these"""
    uniform_groups: int = 0
    """prompts of dynamic sampling whose samples all have the same score"""

    def rows(self, index: Any) -> RolloutExtras:
        """Those of the samples at these places, without any that wait."""
        return rows_of(replace(self, waiting={}), index)

    @staticmethod
    def joined(parts: Sequence[RolloutExtras]) -> RolloutExtras:
        """Those of the samples of several, padded to the widest."""
        return joined(parts)


@dataclass(frozen=True, slots=True)
class Rollout(RowRecord):
    """B samples of phase 1. Made by ``collect_rollout``, logged, read by ``to_experience``.

    All tensors are on the CPU; figures of the actions are right-padded to R of them.
    """

    prompts: PromptBatch
    sequences: Sequences
    """tokens and action places"""
    logprobs: torch.Tensor
    """[B, R] fp32 of the actions under the policy that ratios compare with (``ppo.old_logprobs``)
    """
    ref_logprobs: torch.Tensor
    """[B, R] fp32 under the reference"""
    values: torch.Tensor
    """[B, R] fp32; zero without a critic"""
    kl: torch.Tensor
    """[B, R] per-token KL estimate (nats), as ``ppo.kl_estimator`` says"""
    scores: list[float]
    """[B] raw scores as the rewards gave them"""
    valid: torch.Tensor
    """[B] bool, false where a sample has no score and is left out of the update"""
    finished: torch.Tensor
    """[B] bool"""
    has_reference: bool
    """false without a reference model: KL and reference logprobs then mean nothing"""
    responses: list[str]
    parts: dict[str, list[float | None]]
    """scores of each reward by name"""
    logs: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """[B] what the rewards logged, as of :class:`~ppocli.rewards.reward_records.RewardScores`"""
    extras: RolloutExtras = field(default_factory=RolloutExtras)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def response_mask(self) -> torch.Tensor:
        """[B, R] bool, true through the token that ended the response."""
        return self.sequences.mask

    @property
    def response_tokens(self) -> torch.Tensor:
        """[B, R] int64 ids of the actions."""
        return self.sequences.action_tokens

    @property
    def k1(self) -> torch.Tensor:
        """[B, R] the plainest estimate of the KL, in nats; only with a reference."""
        return (self.logprobs - self.ref_logprobs) * self.sequences.mask

    @property
    def sequence_kl(self) -> float:
        """k1 summed over each response, mean over samples; nats. NaN without a reference."""
        return float(self.k1.double().sum(1).mean()) if self.has_reference else math.nan

    @property
    def gap(self) -> torch.Tensor | None:
        """[B, R] log-ratio of the trained policy to the one that sampled, in nats; None where they
        are the same, or the sampler computes no logprobs."""
        sampler_logprobs = self.extras.sampler_logprobs
        if sampler_logprobs is None or not bool(sampler_logprobs.any()):
            return None
        return (self.logprobs - sampler_logprobs) * self.sequences.mask

    @property
    def turns(self) -> torch.Tensor | None:
        """[B, R] int64 turn of each action; None without an environment."""
        episodes, width = self.extras.episodes, self.sequences.mask.shape[1]
        return torch.tensor(turn_numbers(episodes, width)) if episodes else None

    @property
    def shown_scores(self) -> list[float | None]:
        """[B] the scores, None where a sample has none."""
        scores: list[float | None] = list(self.scores)
        for i in (~self.valid).nonzero().squeeze(-1).tolist():
            scores[i] = None
        return scores

    @property
    def valid_scores(self) -> list[float]:
        """The scores of the samples that have one."""
        return torch.tensor(self.scores, dtype=torch.float64)[self.valid].tolist()

    @staticmethod
    def joined(parts: Sequence[Rollout]) -> Rollout:
        """The samples of several, padded to the widest."""
        if len(parts) == 1:
            return parts[0]
        if any(part.extras.dense is not None for part in parts):
            parts = [part if part.extras.dense is not None else replace(
                part, extras=replace(part.extras, dense=part._on_last())) for part in parts]
        return joined(parts)

    def _on_last(self) -> torch.Tensor:
        """[B, R] the scores on the last tokens, as dense rewards have them."""
        last = (self.response_mask.sum(1) - 1).clamp(min=0)
        scores = torch.tensor(self.scores, dtype=torch.float32) * self.valid
        return torch.zeros(self.logprobs.shape).scatter(1, last[:, None], scores[:, None])


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What forward passes over samples are to give, next to the reference's logprobs and the KL."""

    phase: str
    """of :data:`ppocli.training.task.PASSES`"""
    estimator: str
    """as of :func:`~ppocli.ppo.losses.kl_per_token`, or ``full``: over the whole vocabulary"""
    temperature: float
    want_logprobs: bool
    """the policy's"""
    want_values: bool
    want_ref_states: bool = False
    most_frozen_bytes: int = 0
    """for what enters the policy's lowest layer that trains"""


def measure(session: EvalSession, context: StepContext, policy: Policy, out: Samples,
            options: PassOptions) -> dict[str, Any]:
    """Forward passes over B samples of the policy, as the sampler's ``acting`` yields it, and the
    reference: by the names of :class:`Rollout`, on the CPU, ``ref_logprobs``, ``kl`` and what else
    is wanted. An OutOfMemoryError where one sample is too much."""
    rows = min(session.forward_rows, len(out))
    return session.passes.retry(
        options.phase, rows, int(out.sequences.spans.max()),
        partial(_measure, session, context, policy, out, options, rows),
        in_step=session.scores_in_step)


@torch.no_grad()
def _measure(session: EvalSession, context: StepContext, policy: Policy, out: Samples,
             options: PassOptions, rows: int) -> dict[str, Any]:
    """As :func:`measure`, with at most so many rows per pass."""
    size, limit = session.passes.limit(options.phase, rows), session.cfg.ppo.micro_batch_tokens
    mask, reference, whole = out.sequences.mask, session.reference, options.estimator == "full"
    if limit is not None and session.scores_in_step:  # then all ranks make equally many passes
        longest = session.backend.ranks.most(int(out.sequences.spans.max()))
        size, limit = max(1, min(size, limit // longest)), None
    batches = layout.lay_out_rows(out.sequences, size, session.backend.device, pack=session.packs,
                                  tokens=limit)
    spread = partial(layout.spread, batches, mask.shape)
    split, frozen = None, list[torch.Tensor | None]([None] * len(batches))
    if options.most_frozen_bytes and policy.split is not None:
        split, frozen = _frozen_inputs(policy, out, batches, options.most_frozen_bytes)
    ours, theirs = list[Any](), list[policies.Scored]()
    with session.backend.autocast():
        if options.want_logprobs or options.want_values or whole:
            ours = _of_policy(session, context, policy, batches, options, split, frozen)
        if reference is not None:
            head = HeadWeights.of(policy.lm).as_now() if whole else None
            with reference.view(policy.lm) as view:
                for i, one in enumerate(batches):
                    context.stop.check()
                    faults.point("scoring.forward", size)
                    theirs.append(policies.score_reference(
                        reference, view, one, temperature=options.temperature,
                        of_policy=None if head is None else OtherHead(ours[i].states, head),
                        frozen_states=frozen[i], split=split if view is policy.lm else None))
                    frozen[i] = theirs[i].frozen_states
    sampled = spread(ours, "logprobs") if options.want_logprobs else out.logprobs
    ref_logprobs = sampled if reference is None else spread(theirs, "logprobs")
    kl = spread(theirs, "full_kl") if whole and theirs else kl_per_token(
        sampled, ref_logprobs, "k1" if whole else options.estimator)
    return {"logprobs": sampled if options.want_logprobs else None, "ref_logprobs": ref_logprobs,
            "values": spread(ours, "values") if options.want_values else None, "kl": kl * mask,
            "ref_states": [] if not options.want_ref_states else layout.states_by_sample(
                batches, [one.states for one in theirs], mask.sum(1)) if theirs else [],
            "frozen_states": [None] * len(mask) if split is None else layout.states_of_samples(
                batches, frozen, len(mask), options.most_frozen_bytes)}


def _of_policy(session: EvalSession, context: StepContext, policy: Policy,
               batches: list[layout.RowBatch], options: PassOptions, split: Any,
               frozen: list[torch.Tensor | None]) -> list[policies.Scored]:
    """What the policy makes of the batches; what enters the layer of the split, or of the
    reference's, is put into ``frozen``."""
    scored = list[policies.Scored]()
    kept_at = split if session.reference is None else session.reference.split or split
    for i, one in enumerate(batches):
        context.stop.check()
        faults.point("scoring.forward", len(one.rows))
        scored.append(policies.score_policy(
            policy, one, temperature=options.temperature, split=kept_at,
            want_logprobs=options.want_logprobs, want_values=options.want_values,
            keep_hidden=options.estimator == "full"))
        frozen[i] = frozen[i] if scored[i].frozen_states is None else scored[i].frozen_states
    return scored


def _frozen_inputs(policy: Policy, out: Samples, batches: list[layout.RowBatch], most: int
                   ) -> tuple[Any, list[torch.Tensor | None]]:
    """The layer at which passes are split, None where its inputs would take more than ``most``
    bytes; and [b, T, D] those of each batch that decoding has kept."""
    # all passes hold what enters the first layer that trains until the reference is run
    width = policy.lm.get_input_embeddings().weight.shape[-1]
    if 4 * width * sum(one.batch.tokens.numel() for one in batches) > most:
        return None, [None] * len(batches)
    kept = out.frozen_states
    return policy.split, [None if kept is None else layout.known_states(
        kept, one.rows, one.batch) for one in batches]


def measure_chunk(session: Session, context: StepContext, policy: Policy, chunk: Chunk, *,
                  forward: bool) -> dict[str, Any]:
    """Forward passes over a chunk's samples (:func:`measure`); with ``forward`` also for values,
    and for logprobs unless ratios are to be to the sampler's own."""
    ppo, (place, estimator) = session.cfg.ppo, kl_term(session.cfg.ppo)
    full_in_loss = (place, estimator) == ("loss", "full")
    return measure(session, context, policy, chunk.out, PassOptions(
        "scoring", "k1" if full_in_loss else estimator, session.sampling.temperature,
        want_logprobs=forward and ppo.old_logprobs == "trainer",
        want_values=policy.value_head is not None and (
            forward or not policy.values_while_decoding),
        want_ref_states=full_in_loss,
        most_frozen_bytes=session.frozen_states_bytes * len(chunk.out) // ppo.num_rollouts))


def rollout_of(session: Session, chunk: Chunk, scores: RewardScores, measured: dict[str, Any]
               ) -> Rollout:
    """A scored and measured chunk as a rollout, of this rank's own samples."""
    samples, count = chunk.samples, len(chunk.responses)
    columns = measured if count == len(chunk.out) else rows_of(measured, slice(count))
    logprobs, values = columns["logprobs"], columns["values"]
    extras = RolloutExtras(
        frozen_states=columns["frozen_states"], ref_states=columns["ref_states"],
        dense=None if scores.dense is None else _on_tokens(scores.dense, samples.mask),
        sampler_logprobs=None if logprobs is None else samples.logprobs,
        episodes=without_environments(samples.episodes) if samples.episodes else [])
    return Rollout(
        chunk.prompts, samples.sequences, samples.logprobs if logprobs is None else logprobs,
        columns["ref_logprobs"], samples.values if values is None else values, columns["kl"],
        scores.scores, torch.tensor(scores.valid), samples.finished, session.reference is not None,
        chunk.responses, scores.parts, scores.logs, extras)


def _on_tokens(rows: Sequence[Sequence[float]], mask: torch.Tensor) -> torch.Tensor:
    """[B, R] fp32 of B lists of numbers of the tokens."""
    columns = torch.zeros(mask.shape)
    columns[mask] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float32)
    return columns


def of_all_ranks(session: Session, parts: Sequence[Rollout], clock: PhaseClock) -> Rollout:
    """The samples of all ranks in the order of their episodes, from this rank's, if any. A
    ConfigError where ratios to the sampler's logprobs are needed, and it computes none."""
    whole = parts[0] if len(parts) == 1 and session.backend.ranks.world == 1 else _gathered(
        session, parts, clock)
    if session.corrects or session.cfg.ppo.old_logprobs == "sampler":
        _check_sampler_logprobs(session, whole)
    return whole


def _gathered(session: Session, parts: Sequence[Rollout], clock: PhaseClock) -> Rollout:
    """As :func:`of_all_ranks`, of several ranks or parts."""
    whole = Rollout.joined(parts) if parts else None
    if session.backend.ranks.world > 1:
        shares = session.backend.ranks.gather(whole)
        whole = Rollout.joined([part for part in shares if part is not None])
        whole = whole.rows(sorted(range(len(whole)), key=whole.prompts.episodes.__getitem__))
        clock.mark("gather")
    assert whole is not None
    return whole


def _check_sampler_logprobs(session: Session, rollout: Rollout) -> None:
    """Refuse a sampler without logprobs (:func:`of_all_ranks`)."""
    if (session.cfg.ppo.old_logprobs == "sampler" and not bool(rollout.logprobs.any())) or (
            session.corrects and rollout.gap is None):
        raise ConfigError(f"{type(session.sampler).__name__} returns no logprobs of its samples.",
                          where="ppo.old_logprobs, ppo.importance, rollout.engine",
                          fix="let it compute them, or use ppo.old_logprobs=trainer alone")
