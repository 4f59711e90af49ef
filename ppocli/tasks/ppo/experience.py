"""Between the phases: scores, KL and values become advantages and returns."""

import logging
import math
from dataclasses import replace

import torch

from ppocli.config import algorithm, sampling, schema
from ppocli.ppo import kl, off_policy, shaping
from ppocli.ppo.advantages import Samples, token_rewards
from ppocli.ppo.losses import LossOptions
from ppocli.tasks.ppo.records import Experience, PPOState, Rollout

log = logging.getLogger("ppocli")


def update_moments(state: PPOState, rollout: Rollout, cfg: schema.TrainConfig) -> PPOState:
    """The state with this rollout's scores in its running moments, and with the reference deviation
    of the first rollout where ``reward.ref_std`` gives none.

    They are the scores that scaling will divide: raw ones, or with ``reward.clip_first`` clipped
    ones, the entries of a dense reward each before they are summed
    (``CarperAI/trlx:trlx/trainer/accelerate_ppo_trainer.py@3340c2f``, ``make_experience``).
    """
    scores, dense = _clipped_before(rollout, cfg.reward)
    if cfg.reward.clip_first and dense is not None:
        scores = dense.double().sum(1).tolist()
    found = shaping.moments_of(replace(rollout, scores=scores).valid_scores)
    ref_std = cfg.reward.ref_std
    if cfg.reward.scale == "ref" and ref_std is None:
        ref_std = found.std if state.ref_std is None else state.ref_std
    return replace(state, moments=state.moments.merge(found), ref_std=ref_std)


def _clipped_before(rollout: Rollout, reward: schema.RewardConfig
                    ) -> tuple[list[float], torch.Tensor | None]:
    """Scores [B] and dense rewards [B, R] or None, clipped where that comes before scaling."""
    clip = reward.clip if reward.clip_first else None
    return (shaping.scale_scores(rollout.scores, std=1.0, clip=clip),
            None if rollout.dense is None else shaping.clipped(rollout.dense, clip))


def penalties_of(rollout: Rollout, cfg: schema.TrainConfig) -> dict[str, list[float | None]]:
    """Penalties that the configuration asks for by name, each with the amount of every sample, None
    where it does not apply: ``missing_eos``, ``short``, ``overlong``."""
    reward, found = cfg.reward, dict[str, list[float | None]]()
    lengths = rollout.response_mask.sum(1).tolist()
    if reward.missing_eos_penalty is not None:
        found["missing_eos"] = [None if ended else reward.missing_eos_penalty
                                for ended in rollout.finished.tolist()]
    if reward.min_response_length is not None:
        found["short"] = [reward.min_response_penalty if length < reward.min_response_length
                          else None for length in lengths]
    if reward.overlong_buffer is not None:
        factor = 1.0 if reward.overlong_penalty is None else reward.overlong_penalty
        # of an episode, all that follows the prompt
        said = (rollout.sequences.lengths - rollout.prompts.mask.sum(1)).tolist() \
            if rollout.episodes else lengths
        found["overlong"] = list(shaping.overlong_penalties(
            said, longest=sampling.longest_rollout(cfg), buffer=reward.overlong_buffer,
            factor=factor))
    return found


def shaped_scores(rollout: Rollout, state: PPOState, cfg: schema.TrainConfig
                  ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What lands on the tokens: scaled and clipped scores, less penalties.

    ``running`` divides by the running deviation (trlX ``scale_reward: running``), with
    ``reward.center`` after the running mean was taken off (TRL ``use_score_norm``); ``ref`` divides
    by the reference one. Clipping comes after scaling (TRL) or, with ``reward.clip_first``, before
    it (trlX), penalties after both. Dense rewards are scaled and clipped entry by entry; a penalty
    that replaces a score replaces them.

    Returns:
        scores [B] for the last token, and dense rewards [B, R] or None.
    """
    reward = cfg.reward
    std, mean = 1.0, 0.0
    if reward.scale == "running":
        std, mean = state.moments.std, state.moments.mean if reward.center else 0.0
    elif reward.scale == "ref":
        std, mean = state.ref_std or 1.0, reward.ref_mean or 0.0
    last = None if reward.clip_first else reward.clip
    raw, dense = _clipped_before(rollout, reward)
    if dense is None:
        scores = shaping.scale_scores(raw, std=std, mean=mean, clip=last)
    else:
        dense = shaping.clipped(dense / std, last)
        # the mean is a sample's, not a token's: it comes off once, at the end
        scores = [-mean / std] * len(rollout)
    penalties = penalties_of(rollout, cfg)
    nothing: list[float | None] = [None] * len(rollout)
    amounts = [[amount for amount in each if amount is not None] for each in zip(
        penalties.get("missing_eos", nothing), penalties.get("short", nothing), strict=True)]
    replace = reward.penalty_mode == "replace"
    scores = shaping.penalised(scores, amounts, replace=replace)
    if dense is not None and replace:
        dense = dense * torch.tensor([not each for each in amounts])[:, None]
    found = torch.tensor(scores, dtype=torch.float32)
    if "overlong" in penalties:
        found = found - torch.tensor(penalties["overlong"], dtype=torch.float32)
    return found, dense


def to_experience(rollout: Rollout, state: PPOState, cfg: schema.TrainConfig, *,
                  progress: float = 0.0, pretrains: bool = False) -> Experience:
    """Token rewards, advantages and whitening over the valid samples of a rollout.

    The samples of a prompt that are left without an invalid one are their whole group.

    Args:
        state: before this rollout, with the KL coefficient to charge.
        progress: 0 in the first step of the run, 1 in the last.
        pretrains: the value function learns what really followed, ``R_t = sum over k >= t of
            gamma^(k-t) r_k``, and nothing of its own estimates (VC-PPO, Yuan et al. 2025, arXiv
            2503.01491, section on value pretraining).
    """
    kept = rollout.rows(rollout.valid.nonzero().squeeze(-1).tolist())
    mask = kept.response_mask
    ppo, in_reward = cfg.ppo, algorithm.kl_in(cfg.ppo) == "reward"
    scores, dense = shaped_scores(kept, update_moments(state, rollout, cfg), cfg)
    # a KL that is rounding alone isn't charged: whitening, and Adam, would make a signal of it
    apart = not bool((kept.k1.abs() <= kl.ROUNDING).all())  # NaN is no rounding
    rewards = token_rewards(scores, kept.kl, mask, dense=dense,
                            kl_coef=state.kl_coef if in_reward and apart else 0.0)
    if ppo.whiten_rewards:
        rewards = shaping.whiten(rewards, mask, center=False)
    values = kept.values if algorithm.estimator_of(ppo).needs_critic else None
    groups = torch.tensor(kept.prompts.episodes) // ppo.n
    advantages, returns = algorithm.estimator_of(ppo).estimate(Samples(
        rewards, mask, groups, values, gamma=ppo.gamma, lam=ppo.lam,
        lam_value=1.0 if pretrains else ppo.lam_value, lam_alpha=ppo.lam_alpha,
        group_std=ppo.group_std, batch_std=ppo.batch_std, gaps=kept.gaps,
        turns=kept.turns if ppo.gae_unit == "turn" else None))
    wanted, gap, accepted, importance = ppo.importance, kept.gap, mask, None
    if gap is not None:
        accepted = off_policy.accepted(gap, mask, wanted.reject)
        if (level := algorithm.importance_level(cfg)) is not None:
            importance = off_policy.importance_weights(gap, mask, level=level, cap=wanted.cap)
    if algorithm.whitens_advantages(ppo):
        # what is learnt from would have a mean otherwise, which pushes all of it one way
        advantages = shaping.whiten(advantages, accepted, center=True)
    counts = (accepted & kept.finished[:, None] if ppo.mask_truncated
              else accepted if wanted.reject else None)
    charged = not in_reward and kept.has_reference and state.kl_coef > 0
    imitated = torch.tensor(kept.scores) > ppo.positive_above
    alike = dense is None and len(scores) > 1 and bool(  # up to rounding
        scores.max() - scores.min() <= 1e-6 * scores.abs().max())
    if alike and kept.has_reference and not (apart or pretrains):
        # nothing says which response is better, and the policy is still the reference: it stays so.
        # What a critic doesn't know yet of the constant, whitened, would move it, and so would a
        # head that learns the constant on the policy's trunk
        advantages, imitated = torch.zeros_like(advantages), torch.zeros_like(imitated)
        if values is not None and cfg.model.value.kind == "head":
            returns = values

    return Experience(
        sequences=kept.sequences, logprobs=kept.logprobs,
        values=None if values is None else values * mask, advantages=advantages, returns=returns,
        ref_logprobs=kept.ref_logprobs if charged else None,
        ref_states=kept.ref_states if charged else [],
        counts=counts, importance=importance, pretrains=pretrains,
        imitated=imitated if ppo.positive_nll_coef else None,
        kl_coef=state.kl_coef if charged else 0.0,
        ent_coef=ppo.ent_coef if ppo.ent_coef_end is None else
        (1.0 - progress) * ppo.ent_coef + progress * ppo.ent_coef_end,
        frozen_states=kept.frozen_states)


def after_step(state: PPOState, rollout: Rollout, learnt: Experience, cfg: schema.TrainConfig,
               step: int) -> PPOState:
    """The state after ``step``, whose rollout was ``rollout``."""
    after = replace(update_moments(state, rollout, cfg), kl_coef=next_kl_coef(state, rollout, cfg))
    return after_pretraining(after, learnt, cfg.ppo, step) if learnt.pretrains else after


def explained_variance(experience: Experience) -> float:
    """``1 - mean((R - V)^2) / var(R)`` over all response tokens, of the values ``V`` before any
    update on these samples; NaN where all returns are the same, or there is no value function."""
    if experience.values is None or experience.returns is None:
        return math.nan
    mask = experience.response_mask
    returns, values = (x.cpu()[mask].double() for x in (experience.returns, experience.values))
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    return 1.0 - float((returns - values).square().mean()) / variance if variance else math.nan


def after_pretraining(state: PPOState, experience: Experience, ppo: schema.PPOConfig, step: int
                      ) -> PPOState:
    """The state after a step of value pretraining, ``step`` with it; says when it was the last:
    ``ppo.value_pretrain_until`` is reached, or the steps are made."""
    found, until = explained_variance(experience), ppo.value_pretrain_until
    if (until is None or not found >= until) and step < ppo.value_pretrain_steps:
        return state
    log.info("value pretraining ends with step %d: the value function explains %.3f of the "
             "variance of the returns; the policy trains from the next step on", step, found)
    return replace(state, pretrained_at=step)


def sequence_kl(rollout: Rollout) -> float:
    """Sampled KL (k1) summed over each response, mean over samples; nats. NaN without reference."""
    return float(rollout.k1.double().sum(1).mean()) if rollout.has_reference else math.nan


def next_kl_coef(state: PPOState, rollout: Rollout, cfg: schema.TrainConfig) -> float:
    """The coefficient for the next rollout."""
    if cfg.ppo.kl_controller == "fixed":
        return state.kl_coef
    tokens = float(rollout.response_mask.sum()) / len(rollout)
    return kl.adapt_kl_coef(state.kl_coef, sequence_kl(rollout), target=cfg.ppo.target,
                            horizon=cfg.ppo.horizon, num_samples=len(rollout),
                            rounding=kl.ROUNDING * tokens)


def loss_options(ppo: schema.PPOConfig, experience: Experience) -> LossOptions:
    """The loss that a configuration asks for, with the coefficients of this step."""
    return LossOptions(
        cliprange=ppo.cliprange, cliprange_high=ppo.cliprange_high, dual_clip=ppo.dual_clip,
        cliprange_value=ppo.cliprange_value, vf_coef=ppo.vf_coef, ent_coef=experience.ent_coef,
        kl_coef=experience.kl_coef, kl_estimator=algorithm.kl_estimator(ppo),
        policy_loss=ppo.policy_loss, nll_coef=ppo.positive_nll_coef)
