"""A PPO step on one page: sample, score and measure a rollout; make token rewards, advantages and
minibatches of it; the loss of a micro-batch.

Shapes: B samples of the whole step, b of one chunk or micro-batch on this rank, Q prompt tokens
padded on the left, R response tokens padded on the right, N response tokens laid flat. What only
some configurations need is one call each, in :mod:`~ppocli.ppo.experience`,
:mod:`~ppocli.ppo.rollout_sources` and :mod:`~ppocli.ppo.ptx`.
"""

from typing import Any

import numpy as np
import torch

from ppocli.config import algorithm, sampling, schema
from ppocli.distributed.backend import to_device
from ppocli.ppo import experience as exp
from ppocli.ppo import losses, ptx, reward_calls, rollout, shaping
from ppocli.ppo.advantages import token_rewards
from ppocli.ppo.records import CRITIC, POLICY, Experience, PPOState, Rollout
from ppocli.ppo.session import Session
from ppocli.sampling.samples import Samples
from ppocli.training.task import Plan, StepContext, UpdateGroup


def collect_rollout(session: Session, context: StepContext, start: int, count: int,
                    samples: Samples | None = None) -> Rollout:
    """Sample, score and measure the episodes ``start`` to ``start + count``: B samples in the order
    of their episodes, the same on all ranks.

    Args:
        samples: [B] of an earlier policy, in place of the present one's.

    Raises:
        ConfigError: ratios to the sampler's logprobs are asked for, and it computes none.
    """
    ranks, clock = session.backend.ranks, context.clock
    rows, num_local = ranks.share(range(count))
    prompts = session.next_prompts(start, count).rows(rows)  # [b, Q]
    pending, parts = list[tuple[rollout.Chunk, reward_calls.PendingScores]](), list[Rollout]()
    with session.acting() as acting:
        for chunk in rollout.generate_chunks(  # tokens, logprobs, values [b, R]; texts [b]
                acting, context, prompts, num_local, samples and samples.rows(rows)):
            previous = pending[-1][1] if pending else None
            pending.append((chunk, reward_calls.start(acting, context, chunk, previous)))
        for chunk, scoring in pending:
            clock.mark("rollout")
            measured = rollout.measure_chunk(  # logprobs, reference logprobs, values, KL [b, R]
                acting, context, chunk, forward=samples is not None or not acting.from_decode)
            clock.mark("scoring")
            scores = scoring.wait("reward")  # [b]
            context.stop.meet()
            clock.mark("reward")
            if len(chunk):
                parts.append(rollout.rollout_of(session, chunk, scores, measured))
    return rollout.whole_rollout(session, context, parts)


def to_experience(rollout: Rollout, state: PPOState, cfg: schema.TrainConfig, *,
                  progress: float = 0.0, pretrains: bool = False) -> Experience:
    """Token rewards, advantages and returns [B, R] of the samples with a valid score.

    Args:
        state: before this rollout, with the KL coefficient to charge.
        progress: 0 in the first step of the run, 1 in the last.
        pretrains: the value function alone learns, from returns of lambda 1.
    """
    ppo, kept = cfg.ppo, rollout.rows(rollout.valid.nonzero().squeeze(-1).tolist())
    mask, charge = kept.response_mask, exp.kl_charge(kept, state, ppo)
    scores, dense = exp.shaped_scores(kept, exp.update_moments(state, rollout, cfg), cfg)
    rewards = token_rewards(scores, kept.kl, mask, dense=dense, kl_coef=charge.in_rewards)
    if ppo.whiten_rewards:
        rewards = shaping.whiten(rewards, mask, center=False)
    advantages, returns = exp.estimate_advantages(kept, rewards, ppo, pretrains=pretrains)
    accepted, importance = exp.off_policy_correction(kept, cfg)  # [B, R] bool; [B, R] or None
    if algorithm.whitens_advantages(ppo):
        # over what is learnt from: another mean would push all of it one way
        advantages = shaping.whiten(advantages, accepted, center=True)
    learnt = exp.experience_of(kept, ppo, charge, advantages=advantages, returns=returns,
                               accepted=accepted, importance=importance, progress=progress,
                               pretrains=pretrains)
    if exp.says_nothing(kept, scores, dense, charge, pretrains=pretrains):
        return exp.without_signal(learnt, cfg)
    return learnt


def plan_updates(session: Session, experience: Experience, step: int, mixed_in: int = 0) -> Plan:
    """``ppo_epochs`` passes over the experience in minibatches, each pass in another order that
    (seed, step, epoch) alone decide. Before them come ``critic_epochs`` passes for the value
    function alone, in other orders (phasic policy gradient, Cobbe et al. 2020, arXiv 2009.04416).
    Updates in which no token counts are left out: momentum would still make a step of them.

    Args:
        step: steps before this one.
        mixed_in: examples of ``ppo.ptx.data`` before those of this one.
    """
    ppo, groups, first = session.cfg.ppo, list[UpdateGroup](), session.cfg.ppo.critic_epochs or 0
    part = CRITIC if step < ppo.critic_warmup_steps or experience.pretrains else POLICY
    for epoch in range(first + ppo.ppo_epochs):
        # numpy takes [.., 0] for [..]: the 1 makes the orders of the critic's passes differ
        number = [epoch, 1] if epoch < first else [epoch - first]
        order = np.random.default_rng([session.cfg.seed, step, *number]).permutation(
            len(experience))
        groups += [update_of(session, experience, rows, epoch, CRITIC if epoch < first else part)
                   for rows in torch.from_numpy(order).split(ppo.mini_batch_size)]
    return plan_of(session, experience, [g for g in groups if g.weights.any()], mixed_in)


def plan_of(session: Session, experience: Experience, groups: list[UpdateGroup], mixed_in: int
            ) -> Plan:
    """These updates, with examples of ``ppo.ptx.data`` in them where there are any."""
    if session.examples is not None:
        experience, groups = ptx.with_examples(session, experience, groups, mixed_in)
    return Plan(exp.on_device(session, experience), groups)


def update_of(session: Session, experience: Experience, rows: torch.Tensor, epoch: int = 0,
              part: str = POLICY) -> UpdateGroup:
    """The update of these rows [A] of the experience, each token weighted for the whole of it."""
    ppo, lengths = session.cfg.ppo, experience.response_mask[rows].sum(1)
    token_counts = lengths if experience.counts is None else experience.counts[rows].sum(1)
    weights = losses.token_weights(
        token_counts, aggregation=ppo.loss_aggregation, total_tokens=int(token_counts.sum()),
        total_samples=max(int((token_counts > 0).sum()), 1),
        max_tokens=sampling.longest_rollout(session.cfg)) * (token_counts > 0)
    return UpdateGroup(rows, experience.sequences.spans[rows], lengths, weights, epoch, part)


def loss(session: Session, experience: Experience, rows: torch.Tensor, weights: torch.Tensor,
         group: UpdateGroup) -> tuple[losses.PPOLoss, int]:
    """:func:`ppocli.ppo.losses.ppo_loss` of the policy as it is now, and the tokens computed.

    Args:
        rows: [b] places in the experience.
        weights: [b] fp32 weight of each of their tokens in the whole update.
        group: the whole update.
    """
    mask, device = experience.response_mask[rows], session.backend.device
    policy, tokens = exp.replay(session, experience, rows, value_only=group.part == CRITIC)
    row, column = mask.nonzero(as_tuple=True)
    places = to_device(rows[row] * mask.shape[1] + column, device)  # [N]

    def flat(x: Any) -> Any:
        return None if x is None else x.reshape(-1).index_select(0, places)

    term_weights = weights.repeat_interleave(mask.sum(1))  # [N]
    if experience.counts is not None:
        term_weights = term_weights * experience.counts[rows][mask]
    samples = group.rows < len(experience)  # the others are examples of ppo.ptx
    return losses.ppo_loss(
        exp.loss_options(session.cfg.ppo, experience), logprobs=policy.logprobs,
        values=policy.values, entropy=policy.entropy, old_logprobs=flat(experience.logprobs),
        advantages=flat(experience.advantages), old_values=flat(experience.values),
        returns=flat(experience.returns), ref_logprobs=flat(experience.ref_logprobs),
        weights=to_device(term_weights, device), importance=flat(experience.importance),
        total_tokens=int(group.counts[samples].sum()), lengths=to_device(mask.sum(1), device),
        imitated=exp.imitation_weights(experience, rows, weights, group, samples, device),
        full_kl=policy.kl), tokens
