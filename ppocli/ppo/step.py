"""A PPO step on one page: sample, score and measure a rollout; make token rewards, advantages and
minibatches of it; the loss of a micro-batch.

Shapes: B samples of the whole step, b of one chunk or micro-batch on this rank, Q prompt tokens
padded on the left, R response tokens padded on the right, N response tokens laid flat. What only
some configurations need is one call each, in :mod:`~ppocli.ppo.experience`,
:mod:`~ppocli.ppo.rollout_sources` and :mod:`~ppocli.ppo.ppo_task`.
"""

from typing import Any

import numpy as np
import torch

from ppocli.config import schema, tasks
from ppocli.distributed.backend import to_device
from ppocli.ppo import experience as exp
from ppocli.ppo import losses, policy_samples, rollout
from ppocli.ppo.advantages import token_rewards
from ppocli.ppo.experience import CRITIC, POLICY, Experience, PPOState
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.session import Session
from ppocli.sampling.samples import Samples
from ppocli.training.task import Plan, StepContext, UpdateGroup


def collect_rollout(session: Session, context: StepContext, start: int, count: int,
                    samples: Samples | None = None) -> Rollout:
    """Sample, score and measure episodes ``start`` to ``start + count``: B samples in their order,
    the same on all ranks; or score and measure this rank's ``samples`` [b] of an earlier policy."""
    clock, pending = context.clock, None
    prompts, num_local = policy_samples.share_of_prompts(session, start, count)  # [b, Q]
    forward = samples is not None or not session.from_decode
    chunks, parts = list[tuple[rollout.Chunk, policy_samples.PendingScores]](), list[Rollout]()
    with session.sampler.acting(session.policy) as policy:
        for chunk in policy_samples.generate_chunks(  # tokens, logprobs, values [b, R]; texts [b]
                session, context, policy, session.sampling, prompts, num_local, samples):
            pending = policy_samples.start(session, context, chunk, pending)
            chunks.append((chunk, pending))
        for chunk, pending in chunks:
            clock.mark("rollout")
            columns = rollout.measure_chunk(  # logprobs, reference logprobs, values, KL [b, R]
                session, context, policy, chunk, forward=forward)
            clock.mark("scoring")
            scores = pending.wait("reward")  # [b]
            context.stop.meet()
            clock.mark("reward")
            if chunk.responses:
                parts.append(rollout.rollout_of(session, chunk, scores, columns))
    return rollout.of_all_ranks(session, parts, clock)


def to_experience(rollout: Rollout, state: PPOState, cfg: schema.TrainConfig, *,
                  progress: float = 0.0, pretrains: bool = False) -> Experience:
    """Token rewards, advantages and returns [B, R] of the samples with a valid score, with the KL
    coefficient of ``state``, that before this rollout. ``progress`` is 0 in the first step, 1 in
    the last; if it ``pretrains``, the value function alone learns, from returns of lambda 1."""
    ppo, kept = cfg.ppo, rollout
    if not bool(rollout.valid.all()):
        kept = rollout.rows(rollout.valid.nonzero().squeeze(-1).tolist())
    mask, (kl_in, _) = kept.sequences.mask, tasks.kl_term(ppo)
    # a KL that is rounding alone is not charged: whitening, and Adam, would make a signal of it
    moved = not bool((kept.k1.abs() <= losses.ROUNDING).all())  # NaN is no rounding
    if cfg.reward.scale != "none":
        state = exp.update_moments(state, rollout, cfg)
    scores, dense = exp.shaped_scores(kept, state, cfg)
    rewards = token_rewards(scores, kept.kl, mask, dense=dense,
                            kl_coef=state.kl_coef if kl_in == "reward" and moved else 0.0)
    if ppo.whiten_rewards:
        rewards = losses.whiten(rewards, mask, center=False)
    advantages, returns = exp.estimate_advantages(kept, rewards, ppo, pretrains=pretrains)
    accepted, importance = mask, None  # [B, R] bool; [B, R] or None
    if kept.extras.sampler_logprobs is not None:
        accepted, importance = exp.off_policy_correction(kept, cfg)
    if tasks.whitens_advantages(ppo):
        # over what is learnt from: another mean would push all of it one way
        advantages = losses.whiten(advantages, accepted, center=True)
    learnt = exp.experience_of(
        kept, ppo, kl_coef=state.kl_coef if kl_in == "loss" and kept.has_reference else 0.0,
        progress=progress, advantages=advantages, returns=returns, accepted=accepted,
        importance=importance, pretrains=pretrains)
    # scores that are equal up to rounding while the policy is still the reference: nothing to learn
    if dense is None and len(scores) > 1 and kept.has_reference and not moved and not pretrains \
            and bool(scores.max() - scores.min() <= 1e-6 * scores.abs().max()):
        return exp.without_signal(learnt, cfg)
    return learnt


def plan_updates(session: Session, experience: Experience, step: int) -> Plan:
    """``ppo_epochs`` passes over the experience in minibatches, each pass in another order that
    (seed, steps before this one, epoch) alone decide. Before them come ``critic_epochs`` passes for
    the value function alone, in other orders (phasic policy gradient, Cobbe et al. 2020, arXiv
    2009.04416). Updates in which no token counts are left out: momentum would still make a step."""
    ppo, groups, first = session.cfg.ppo, list[UpdateGroup](), session.cfg.ppo.critic_epochs or 0
    part = CRITIC if step < ppo.critic_warmup_steps or experience.extras.pretrains else POLICY
    for epoch in range(first + ppo.ppo_epochs):
        # numpy takes [.., 0] for [..]: the 1 makes the orders of the critic's passes differ
        number = [epoch, 1] if epoch < first else [epoch - first]
        order = np.random.default_rng([session.cfg.seed, step, *number]).permutation(
            len(experience.sequences))
        for rows in torch.from_numpy(order).split(ppo.mini_batch_size):
            group = update_of(session, experience, rows, epoch, CRITIC if epoch < first else part)
            if group.weights.any():
                groups.append(group)
    return Plan(exp.on_device(session, experience), groups)


def update_of(session: Session, experience: Experience, rows: torch.Tensor, epoch: int = 0,
              part: str = POLICY) -> UpdateGroup:
    """The update of these rows [A] of the experience, each token weighted for the whole of it."""
    ppo, lengths = session.cfg.ppo, experience.sequences.mask[rows].sum(1)
    counts = experience.extras.counts
    token_counts = lengths if counts is None else counts[rows].sum(1)
    weights = losses.token_weights(
        token_counts, aggregation=ppo.loss_aggregation, total_tokens=int(token_counts.sum()),
        total_samples=max(int((token_counts > 0).sum()), 1),
        max_tokens=tasks.longest_rollout(session.cfg)) * (token_counts > 0)
    return UpdateGroup(rows, experience.sequences.spans[rows], lengths, weights, epoch, part)


def loss(session: Session, experience: Experience, rows: torch.Tensor, weights: torch.Tensor,
         group: UpdateGroup) -> tuple[losses.PPOLoss, int]:
    """:func:`~ppocli.ppo.losses.ppo_loss` of the present policy at ``rows`` [b] of the experience,
    whose tokens have ``weights`` [b] in the ``group``'s update; and the tokens computed."""
    extras, mask = experience.extras, experience.sequences.mask[rows]
    device, lengths = session.backend.device, mask.sum(1)
    policy, tokens = exp.replay(session, experience, rows, value_only=group.part == CRITIC)
    row, column = mask.nonzero(as_tuple=True)
    places = to_device(rows[row] * mask.shape[1] + column, device)  # [N]

    def flat(x: Any) -> Any:
        return None if x is None else x.reshape(-1).index_select(0, places)

    counted = 1.0 if extras.counts is None else extras.counts[rows][mask]
    return losses.ppo_loss(experience.options, losses.LossInputs(
        logprobs=policy.logprobs, values=policy.values, entropy=policy.entropy, full_kl=policy.kl,
        old_logprobs=flat(experience.logprobs), advantages=flat(experience.advantages),
        old_values=flat(experience.values), returns=flat(experience.returns),
        ref_logprobs=flat(extras.ref_logprobs), importance=flat(extras.importance),
        weights=to_device(weights.repeat_interleave(lengths) * counted, device),
        total_tokens=int(group.counts[group.rows < len(experience.sequences)].sum()),
        lengths=to_device(lengths, device), imitated=None if extras.imitated is None else
        to_device(exp.imitation_weights(experience, rows, weights, group), device))), tokens
