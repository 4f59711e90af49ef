"""What :mod:`ppocli.ppo.step` calls between the rollout and the loss: scores are scaled, the
KL is charged, advantages estimated and corrected, samples replayed by the policy."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ppocli.config import algorithm, sampling, schema
from ppocli.distributed.backend import to_device
from ppocli.models import head, layer_stack, layout, passes
from ppocli.ppo import kl, off_policy, shaping
from ppocli.ppo.advantages import Samples
from ppocli.ppo.losses import LossOptions
from ppocli.ppo.records import Experience, PPOState, Rollout
from ppocli.ppo.session import Session
from ppocli.training.task import UpdateGroup

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
    moments = shaping.moments_of(replace(rollout, scores=scores).valid_scores)
    ref_std = cfg.reward.ref_std
    if cfg.reward.scale == "ref" and ref_std is None:
        ref_std = moments.std if state.ref_std is None else state.ref_std
    return replace(state, moments=state.moments.merge(moments), ref_std=ref_std)


def _clipped_before(rollout: Rollout, reward: schema.RewardConfig
                    ) -> tuple[list[float], torch.Tensor | None]:
    """Scores [B] and dense rewards [B, R] or None, clipped where that comes before scaling."""
    clip = reward.clip if reward.clip_first else None
    return (shaping.scale_scores(rollout.scores, std=1.0, clip=clip),
            None if rollout.dense is None else shaping.clipped(rollout.dense, clip))


def penalties_of(rollout: Rollout, cfg: schema.TrainConfig) -> dict[str, list[float | None]]:
    """Penalties that the configuration asks for by name, each with the amount of every sample, None
    where it does not apply: ``missing_eos``, ``short``, ``overlong``."""
    reward, penalties = cfg.reward, dict[str, list[float | None]]()
    lengths = rollout.response_mask.sum(1).tolist()
    if reward.missing_eos_penalty is not None:
        penalties["missing_eos"] = [None if ended else reward.missing_eos_penalty
                                for ended in rollout.finished.tolist()]
    if reward.min_response_length is not None:
        penalties["short"] = [reward.min_response_penalty if length < reward.min_response_length
                          else None for length in lengths]
    if reward.overlong_buffer is not None:
        factor = 1.0 if reward.overlong_penalty is None else reward.overlong_penalty
        # of an episode, all that follows the prompt
        token_counts = (rollout.sequences.lengths - rollout.prompts.mask.sum(1)).tolist() \
            if rollout.episodes else lengths
        penalties["overlong"] = list(shaping.overlong_penalties(
            token_counts, longest=sampling.longest_rollout(cfg), buffer=reward.overlong_buffer,
            factor=factor))
    return penalties


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
    total = torch.tensor(scores, dtype=torch.float32)
    if "overlong" in penalties:
        total = total - torch.tensor(penalties["overlong"], dtype=torch.float32)
    return total, dense


@dataclass(frozen=True, slots=True)
class KLCharge:
    """How the KL to the reference is charged in a step."""

    in_rewards: float
    """coefficient in the token rewards; 0 where the KL is rounding alone: whitening, and Adam,
    would make a signal of it"""
    in_loss: float
    """coefficient of the KL term of the loss"""
    moved: bool
    """whether policy and reference differ by more than rounding"""


def kl_charge(kept: Rollout, state: PPOState, ppo: schema.PPOConfig) -> KLCharge:
    """The coefficients of the KL for these samples."""
    in_reward = algorithm.kl_in(ppo) == "reward"
    moved = not bool((kept.k1.abs() <= kl.ROUNDING).all())  # NaN is no rounding
    charged = not in_reward and kept.has_reference and state.kl_coef > 0
    return KLCharge(state.kl_coef if in_reward and moved else 0.0,
                    state.kl_coef if charged else 0.0, moved)


def estimate_advantages(kept: Rollout, rewards: torch.Tensor, ppo: schema.PPOConfig, *,
                        pretrains: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages and returns [B, R] by ``ppo.advantage``; returns are None without a critic. The
    samples of a prompt that are left without an invalid one are their whole group.

    Args:
        pretrains: the value function learns what really followed, ``R_t = sum over k >= t of
            gamma^(k-t) r_k``, and nothing of its own estimates (VC-PPO, Yuan et al. 2025, arXiv
            2503.01491, section on value pretraining).
    """
    estimator = algorithm.estimator_of(ppo)
    return estimator.estimate(Samples(
        rewards, kept.response_mask, torch.tensor(kept.prompts.episodes) // ppo.n,
        kept.values if estimator.needs_critic else None, gamma=ppo.gamma, lam=ppo.lam,
        lam_value=1.0 if pretrains else ppo.lam_value, lam_alpha=ppo.lam_alpha,
        group_std=ppo.group_std, batch_std=ppo.batch_std, gaps=kept.gaps,
        turns=kept.turns if ppo.gae_unit == "turn" else None))


def off_policy_correction(kept: Rollout, cfg: schema.TrainConfig
                          ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens that ``ppo.importance.reject`` accepts [B, R] bool, and importance weights [B, R]
    of the policy loss; all tokens and None where the sampler is the policy."""
    mask, gap, importance = kept.response_mask, kept.gap, cfg.ppo.importance
    if gap is None:
        return mask, None
    level = algorithm.importance_level(cfg)
    return off_policy.accepted(gap, mask, importance.reject), None if level is None else (
        off_policy.importance_weights(gap, mask, level=level, cap=importance.cap))


def experience_of(kept: Rollout, ppo: schema.PPOConfig, charge: KLCharge, *,
                  advantages: torch.Tensor, returns: torch.Tensor | None, accepted: torch.Tensor,
                  importance: torch.Tensor | None, progress: float, pretrains: bool) -> Experience:
    """The record that the updates of a step read."""
    charged = charge.in_loss > 0
    return Experience(
        sequences=kept.sequences, logprobs=kept.logprobs, advantages=advantages, returns=returns,
        values=kept.values * kept.response_mask if algorithm.estimator_of(ppo).needs_critic
        else None,
        ref_logprobs=kept.ref_logprobs if charged else None,
        ref_states=kept.ref_states if charged else [], kl_coef=charge.in_loss,
        counts=accepted & kept.finished[:, None] if ppo.mask_truncated
        else accepted if ppo.importance.reject else None,
        importance=importance, pretrains=pretrains,
        imitated=torch.tensor(kept.scores) > ppo.positive_above if ppo.positive_nll_coef else None,
        ent_coef=ppo.ent_coef if ppo.ent_coef_end is None else
        (1.0 - progress) * ppo.ent_coef + progress * ppo.ent_coef_end,
        frozen_states=kept.frozen_states)


def says_nothing(kept: Rollout, scores: torch.Tensor, dense: torch.Tensor | None,
                 charge: KLCharge, *, pretrains: bool) -> bool:
    """Whether nothing says which response is better, all scores being equal up to rounding, while
    the policy is still the reference."""
    if dense is not None or len(scores) < 2 or not kept.has_reference or charge.moved or pretrains:
        return False
    return bool(scores.max() - scores.min() <= 1e-6 * scores.abs().max())


def without_signal(experience: Experience, cfg: schema.TrainConfig) -> Experience:
    """The experience with no advantage and nothing to imitate: the policy stays as it is. What a
    critic doesn't know yet of the constant score, whitened, would move it, and so would a head that
    learns the constant on the policy's trunk."""
    head_alone = experience.values is not None and cfg.model.value.kind == "head"
    return replace(
        experience, advantages=torch.zeros_like(experience.advantages),
        imitated=None if experience.imitated is None else torch.zeros_like(experience.imitated),
        returns=experience.values if head_alone else experience.returns)


def imitation_weights(experience: Experience, rows: torch.Tensor, weights: torch.Tensor,
                      group: UpdateGroup, samples: torch.Tensor, device: torch.device
                      ) -> torch.Tensor | None:
    """Each token's weight [N] in the likelihood of good responses (``ppo.positive_nll_coef``); they
    sum to 1 over the update; None without that term.

    Args:
        rows: [b] places of the micro-batch in the experience.
        weights: [b] of its tokens in the loss; what is in no part of the loss has the weight 0.
        samples: [A] bool, which atoms of the update are samples.
    """
    if experience.imitated is None:
        return None
    mask, update = experience.response_mask, group.rows[samples]
    counted = mask if experience.counts is None else experience.counts
    imitated_tokens = (counted[update].sum(1) * group.weights[samples].sign()
                       * experience.imitated[update])
    shares = experience.imitated[rows] * weights.sign() / imitated_tokens.sum().clamp(min=1)
    return to_device((shares[:, None] * counted[rows])[mask[rows]], device)


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
    explained, until = explained_variance(experience), ppo.value_pretrain_until
    if (until is None or not explained >= until) and step < ppo.value_pretrain_steps:
        return state
    log.info("value pretraining ends with step %d: the value function explains %.3f of the "
             "variance of the returns; the policy trains from the next step on", step, explained)
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


def on_device(session: Session, experience: Experience) -> Experience:
    """The figures that losses are made of on the device, once for all updates, and room for what
    the layers below the lowest that trains make of each sample. Tokens and masks stay on the CPU,
    where batches are laid out without waiting for the device."""
    names = ("logprobs", "values", "advantages", "returns", "ref_logprobs", "importance")
    columns: dict[str, Any] = {name: to_device(tensor, session.backend.device) for name in names
                             if (tensor := getattr(experience, name)) is not None}
    if session.frozen_states_bytes and not experience.frozen_states:
        columns["frozen_states"] = [None] * len(experience)
    if experience.ref_states and session.reference is not None:
        with session.reference.view(session.policy.lm) as view:
            columns["ref_head"] = head.HeadWeights.of(view).as_now()
    return replace(experience, **columns)


def replay(session: Session, experience: Experience, rows: torch.Tensor, *, value_only: bool
           ) -> tuple[head.TokenFigures, int]:
    """What the policy says of some rows of ``experience``, and how many tokens were computed.

    Frozen lower layers run only for samples of which nothing is remembered; what comes out of them
    is remembered then.
    """
    samples, places, split = experience.sequences.rows(rows), rows.tolist(), session.policy.split
    batch, kept = layout.lay_out(samples, pack=session.packs).to(session.backend.device), None
    if split is not None and experience.frozen_states:
        kept = experience.frozen_states
        batch = replace(batch, frozen_states=passes.known_states(kept, places, batch))
    remembers = kept is not None and batch.frozen_states is None
    other = None if experience.ref_head is None else head.OtherHead(
        to_device(torch.cat([experience.ref_states[i] for i in places]), session.backend.device),
        experience.ref_head)
    with layer_stack.inputs_at(split if remembers else None, session.policy.lm) as entering:
        out = session.trained.engine(batch, temperature=session.sampling.temperature,
                                     want_entropy=algorithm.wants_entropy(session.cfg.ppo),
                                     value_only=value_only, reference=other)
    if kept is not None and entering:
        passes.keep_states(kept, session.frozen_states_bytes, places,
                           (samples.lengths - 1).tolist(), batch, entering[-1])
    return out, batch.tokens.numel()
