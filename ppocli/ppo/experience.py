"""What updates learn from, and what :mod:`ppocli.ppo.step` calls to make it: scores are scaled,
advantages estimated and corrected, samples replayed by the policy. And PPO's own state between
steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ppocli.config import schema, tasks
from ppocli.data import data_set
from ppocli.distributed.backend import to_device
from ppocli.models import head, layout, trunk
from ppocli.ppo import losses
from ppocli.ppo.advantages import ESTIMATORS, AdvantageInputs, accepted_tokens, importance_weights
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.session import Session
from ppocli.training.task import UpdateGroup

log = logging.getLogger("ppocli")

POLICY, CRITIC = "all", "critic"
"""parts of an update: policy and value function, and the latter alone"""
CAREFUL = 1.41e-5
"""learning rate at which a first step is short on models of any size: the default"""
FIRST_RATE = 0.1
"""share of the learning rate with which a steered run begins: Adam's first steps are as long as its
rate, whatever the gradient, and a first step that is too long leaves the model's language"""


@dataclass(frozen=True, slots=True)
class ExperienceExtras:
    """What only some configurations need to learn from B samples."""

    ref_logprobs: torch.Tensor | None = None
    """[B, R] where the KL is a term of the loss"""
    counts: torch.Tensor | None = None
    """[B, R] bool of the actions that are in the loss; None: all are"""
    importance: torch.Tensor | None = None
    """[B, R] factors of each token's policy loss; None: there are none"""
    imitated: torch.Tensor | None = None
    """[B] bool, whether the likelihood of a sample is a term of the loss; None: of none"""
    frozen_states: list[torch.Tensor | None] = field(default_factory=list)
    """as of :class:`~ppocli.ppo.rollout.RolloutExtras`"""
    ref_states: list[torch.Tensor] = field(default_factory=list)
    """as of :class:`~ppocli.ppo.rollout.RolloutExtras`"""
    ref_head: head.HeadWeights | None = None
    """of the reference, on the device, where there are ``ref_states``"""
    examples: data_set.Examples | None = None
    """those of ``ppo.ptx.data`` that the updates mix in; None: none"""
    pretrains: bool = False
    """whether the value function alone learns, on returns of lambda 1"""


@dataclass(frozen=True, slots=True)
class Experience:
    """What phase 2 needs of B samples and no more. Made by ``to_experience``, read by
    ``optimize``."""

    sequences: layout.Sequences
    """tokens and action places"""
    logprobs: torch.Tensor
    """[B, R] of the old policy, as all below"""
    values: torch.Tensor | None
    """None without a critic, as are ``returns``"""
    advantages: torch.Tensor
    returns: torch.Tensor | None
    options: losses.LossOptions
    """of the loss, with the coefficients of this step"""
    extras: ExperienceExtras = field(default_factory=ExperienceExtras)

    @property
    def mean_loss_tokens(self) -> float:
        """Tokens of a sample that are in the loss, on average."""
        counted = self.sequences.mask if self.extras.counts is None else self.extras.counts
        return float(counted.sum()) / len(self.sequences)


def first_rate(lr: float) -> float:
    """The factor on ``ppo.optimizer.lr`` in the first step: a tenth, so that a rate which is much
    too large does no harm, but as much of a small one as makes :data:`CAREFUL`."""
    return max(FIRST_RATE, CAREFUL / max(lr, CAREFUL))


@dataclass(frozen=True, slots=True)
class PPOState:
    """PPO's own numbers between two steps: :attr:`ppocli.training.state.TrainState.task`."""

    kl_coef: float
    init_kl_coef: float
    """``ppo.init_kl_coef`` that ``kl_coef`` started from"""
    moments: losses.RunningMoments = field(default_factory=losses.RunningMoments)
    """of the raw scores, for ``reward.scale=running``"""
    ref_std: float | None = None
    """score deviation of the first rollout, for ``reward.scale=ref``"""
    health: dict[str, int] = field(default_factory=dict)
    """consecutive steps of each unhealthy sign"""
    first_length: float | None = None
    """mean response tokens of the first rollout"""
    pretrained_at: int | None = None
    """steps made when value pretraining ended; None: it hasn't, or there was none"""
    left_out: int = 0
    """samples so far that no step has learnt from (``ppo.dynamic_sampling``); the next sample has
    the number ``TrainState.episodes + left_out``"""
    mixed_in: int = 0
    """examples of ``ppo.ptx.data`` that the steps so far have passed"""
    rate: float = FIRST_RATE
    """factor on the learning rate where ``ppo.step_kl`` steers it"""
    decoding_differs: bool = False
    """a step's first ratios were off 1: old logprobs come from forward passes since"""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PPOState:
        """The state that :func:`dataclasses.asdict` made plain."""
        return PPOState(**{**data, "moments": losses.RunningMoments(**data["moments"])})


def update_moments(state: PPOState, rollout: Rollout, cfg: schema.TrainConfig) -> PPOState:
    """The state with this rollout's scores in its running moments, and with the reference deviation
    of the first rollout where ``reward.ref_std`` gives none. They are the scores that scaling will
    divide: raw ones, or with ``reward.clip_first`` clipped ones, the entries of a dense reward each
    before they are summed (``CarperAI/trlx:trlx/trainer/accelerate_ppo_trainer.py@3340c2f``,
    ``make_experience``)."""
    reward, scores = cfg.reward, torch.tensor(rollout.scores, dtype=torch.float64)
    if reward.clip_first and reward.clip is not None:
        scores = scores.clamp(-reward.clip, reward.clip)
        if rollout.extras.dense is not None:
            scores = rollout.extras.dense.clamp(-reward.clip, reward.clip).double().sum(1)
    moments = losses.RunningMoments.of(scores[rollout.valid].tolist())
    ref_std = reward.ref_std
    if reward.scale == "ref" and ref_std is None:
        ref_std = moments.std if state.ref_std is None else state.ref_std
    return replace(state, moments=state.moments.merge(moments), ref_std=ref_std)


def penalties_of(rollout: Rollout, cfg: schema.TrainConfig) -> dict[str, torch.Tensor]:
    """By name the penalties that the configuration sets, ``missing_eos``, ``short``, ``overlong``,
    with the amount of every sample, float64 [B], NaN where it does not apply."""
    reward, penalties = cfg.reward, dict[str, torch.Tensor]()
    lengths = rollout.sequences.mask.sum(1)
    full = torch.ones(len(lengths), dtype=torch.float64)
    if reward.missing_eos_penalty is not None:
        penalties["missing_eos"] = (full * reward.missing_eos_penalty).masked_fill(
            rollout.finished, math.nan)
    if reward.min_response_length is not None:
        penalties["short"] = (full * (reward.min_response_penalty or 0.0)).masked_fill(
            lengths >= reward.min_response_length, math.nan)
    if reward.overlong_buffer is not None:
        penalties["overlong"] = _overlong_penalties(rollout, cfg, reward.overlong_buffer)
    return penalties


def _overlong_penalties(rollout: Rollout, cfg: schema.TrainConfig, buffer: int) -> torch.Tensor:
    # of an episode, all that follows the prompt
    token_counts = rollout.sequences.lengths - rollout.prompts.mask.sum(1) \
        if rollout.extras.episodes else rollout.sequences.mask.sum(1)
    return losses.overlong_penalties(
        token_counts, longest=tasks.longest_rollout(cfg), buffer=buffer,
        factor=1.0 if cfg.reward.overlong_penalty is None else cfg.reward.overlong_penalty)


def shaped_scores(rollout: Rollout, state: PPOState, cfg: schema.TrainConfig
                  ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What lands on the tokens: scaled and clipped scores less penalties, [B] for the last token,
    and dense rewards [B, R], scaled and clipped entry by entry, or None. ``running`` divides by the
    running deviation (trlX ``scale_reward: running``), with ``reward.center`` after the running
    mean was taken off (TRL ``use_score_norm``); ``ref`` divides by the reference one. Clipping
    comes after scaling (TRL) or, with ``reward.clip_first``, before it (trlX), penalties after
    both. Those for responses that never ended or are too short are subtracted, as TRL's
    ``missing_eos_penalty``, both if both apply; or the larger one replaces the score, as
    torchtune's ``reward_penalty`` and summarize-from-feedback have it."""
    reward, dense, std, mean = cfg.reward, rollout.extras.dense, 1.0, 0.0
    clip = math.inf if reward.clip is None else reward.clip
    before, after = (clip, math.inf) if reward.clip_first else (math.inf, clip)
    if reward.scale == "running":
        std, mean = state.moments.std, state.moments.mean if reward.center else 0.0
    elif reward.scale == "ref":
        std, mean = state.ref_std or 1.0, reward.ref_mean or 0.0
    scores = torch.tensor(rollout.scores, dtype=torch.float64)
    scores = ((scores.clamp(-before, before) - mean) / std).clamp(-after, after)
    if dense is not None:
        dense = (dense.clamp(-before, before) / std).clamp(-after, after)
        # the mean is a sample's, not a token's: it comes off once, at the end
        scores = torch.full_like(scores, -mean / std)
    penalties = penalties_of(rollout, cfg)
    overlong = penalties.pop("overlong", None)
    if penalties:
        amounts = torch.stack(list(penalties.values()))  # [1 or 2, B], NaN where none applies
        if reward.penalty_mode == "replace":
            spared = amounts.isnan().all(0)
            scores = torch.where(spared, scores, -amounts.nan_to_num(-math.inf).amax(0))
            dense = None if dense is None else dense * spared[:, None]
        else:
            scores = scores - amounts.nan_to_num(0.0).sum(0)
    return scores.float() if overlong is None else scores.float() - overlong.float(), dense


def estimate_advantages(kept: Rollout, rewards: torch.Tensor, ppo: schema.PPOConfig, *,
                        pretrains: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages and returns [B, R] by ``ppo.advantage``; returns are None without a critic. The
    valid samples of a prompt are its whole group. With ``pretrains`` the value function learns what
    really followed, ``R_t = sum over k >= t of gamma^(k-t) r_k``, and nothing of its own estimates
    (VC-PPO, Yuan et al. 2025, arXiv 2503.01491, section on value pretraining)."""
    estimator = ESTIMATORS[ppo.advantage]
    return estimator.estimate(AdvantageInputs(
        rewards, kept.sequences.mask, torch.tensor(kept.prompts.episodes) // ppo.n,
        kept.values if estimator.needs_critic else None, gamma=ppo.gamma, lam=ppo.lam,
        lam_value=1.0 if pretrains else ppo.lam_value, lam_alpha=ppo.lam_alpha,
        group_std=ppo.group_std, batch_std=ppo.batch_std,
        group_baseline=ppo.group_baseline and ppo.n > 1, gaps=kept.extras.gaps,
        turns=kept.turns if ppo.gae_unit == "turn" else None))


def off_policy_correction(kept: Rollout, cfg: schema.TrainConfig
                          ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens that ``ppo.importance.reject`` accepts [B, R] bool, and importance weights [B, R]
    of the policy loss, or None; all and None from a sampler without logprobs."""
    importance, level, mask = cfg.ppo.importance, tasks.importance_level(cfg), kept.sequences.mask
    if (gap := kept.gap) is None:
        return mask, None
    return accepted_tokens(gap, mask, importance.reject), None if level is None else (
        importance_weights(gap, mask, level=level, cap=importance.cap))


def experience_of(kept: Rollout, ppo: schema.PPOConfig, *, kl_coef: float, progress: float,
                  advantages: torch.Tensor, returns: torch.Tensor | None, accepted: torch.Tensor,
                  importance: torch.Tensor | None, pretrains: bool) -> Experience:
    """The record that the updates of a step read, with the KL coefficient of its loss; ``accepted``
    [B, R] bool are the tokens that are in the loss unless they are truncated."""
    counts, coef = accepted if ppo.importance.reject else None, ppo.ent_coef
    if ppo.mask_truncated:
        counts = accepted & kept.finished[:, None]
    if ppo.ent_coef_end is not None:
        coef = (1.0 - progress) * ppo.ent_coef + progress * ppo.ent_coef_end
    options = losses.LossOptions(
        cliprange=ppo.cliprange, cliprange_high=ppo.cliprange_high, dual_clip=ppo.dual_clip,
        cliprange_value=ppo.cliprange_value, vf_coef=ppo.vf_coef, ent_coef=coef, kl_coef=kl_coef,
        kl_estimator=tasks.kl_term(ppo)[1], policy_loss=ppo.policy_loss,
        has_entropy=max(ppo.ent_coef, ppo.ent_coef_end or 0.0) > 0, nll_coef=ppo.positive_nll_coef)
    extras = ExperienceExtras(
        counts=counts, importance=importance, frozen_states=kept.extras.frozen_states,
        imitated=torch.tensor(kept.scores) > ppo.positive_above if ppo.positive_nll_coef else None,
        pretrains=pretrains)
    if kl_coef > 0:
        extras = replace(extras, ref_logprobs=kept.ref_logprobs, ref_states=kept.extras.ref_states)
    values = kept.values * kept.sequences.mask if ESTIMATORS[ppo.advantage].needs_critic else None
    return Experience(kept.sequences, kept.logprobs, values, advantages, returns, options, extras)


def without_signal(experience: Experience, cfg: schema.TrainConfig) -> Experience:
    """The experience with no advantage and nothing to imitate: the policy stays as it is. What a
    critic doesn't predict yet of the constant score, whitened, would move it, and so would a head
    that learns the constant on the policy's trunk."""
    extras = experience.extras
    if extras.imitated is not None:
        extras = replace(extras, imitated=torch.zeros_like(extras.imitated))
    head_alone = experience.values is not None and cfg.model.value.kind == "head"
    return replace(experience, advantages=torch.zeros_like(experience.advantages), extras=extras,
                   returns=experience.values if head_alone else experience.returns)


def imitation_weights(experience: Experience, rows: torch.Tensor, weights: torch.Tensor,
                      group: UpdateGroup) -> torch.Tensor:
    """[N] weight of each token of the places ``rows`` [b] in the likelihood of good responses; they
    sum to 1 over the update. What is in no part of the loss weighs 0."""
    mask, extras = experience.sequences.mask, experience.extras
    imitated: Any = extras.imitated
    counted = mask if extras.counts is None else extras.counts
    is_sample = group.rows < len(mask)  # the others are examples of ppo.ptx
    update = group.rows[is_sample]
    imitated_tokens = counted[update].sum(1) * group.weights[is_sample].sign() * imitated[update]
    shares = imitated[rows] * weights.sign() / imitated_tokens.sum().clamp(min=1)
    return (shares[:, None] * counted[rows])[mask[rows]]


def after_step(state: PPOState, rollout: Rollout, learnt: Experience, cfg: schema.TrainConfig,
               step: int) -> PPOState:
    """The state after ``step``: moments, the next KL coefficient, the end of value pretraining."""
    after = state if cfg.reward.scale == "none" else update_moments(state, rollout, cfg)
    if cfg.ppo.kl_controller == "adaptive":
        after = replace(after, kl_coef=_next_kl_coef(state.kl_coef, rollout, cfg.ppo))
    return _with_end_of_pretraining(after, learnt, cfg.ppo, step) if learnt.extras.pretrains \
        else after


def _next_kl_coef(coef: float, rollout: Rollout, ppo: schema.PPOConfig) -> float:
    tokens = float(rollout.sequences.mask.sum()) / len(rollout)
    return losses.adapt_kl_coef(
        coef, rollout.sequence_kl, target=ppo.target, horizon=ppo.horizon,
        num_samples=len(rollout), rounding=losses.ROUNDING * tokens)


def _with_end_of_pretraining(state: PPOState, learnt: Experience, ppo: schema.PPOConfig, step: int
                             ) -> PPOState:
    """The state after a step of value pretraining, which ends where ``ppo.value_pretrain_until`` is
    reached or the steps are made."""
    explained, until = explained_variance(learnt), ppo.value_pretrain_until
    if (until is None or not explained >= until) and step < ppo.value_pretrain_steps:
        return state
    log.info("value pretraining ends with step %d: the value function explains %.3f of the "
             "variance of the returns; the policy trains from the next step on", step, explained)
    return replace(state, pretrained_at=step)


def explained_variance(experience: Experience) -> float:
    """``1 - mean((R - V)^2) / var(R)`` over all response tokens, of the values ``V`` before any
    update on these samples; NaN where all returns are the same, or there is no value function."""
    if experience.values is None or experience.returns is None:
        return math.nan
    mask = experience.sequences.mask
    returns, values = (x.cpu()[mask].double() for x in (experience.returns, experience.values))
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    return 1.0 - float((returns - values).square().mean()) / variance if variance else math.nan


def on_device(session: Session, experience: Experience) -> Experience:
    """The figures that losses are made of on the device, once for all updates. Tokens and masks
    stay on the CPU, where batches are laid out without waiting for the device."""
    extras = experience.extras
    if session.frozen_states_bytes or extras.ref_states:
        extras = _with_states(session, experience)

    def moved(column: Any) -> Any:
        return None if column is None else to_device(column, session.backend.device)

    return replace(
        experience, logprobs=moved(experience.logprobs), values=moved(experience.values),
        advantages=moved(experience.advantages), returns=moved(experience.returns),
        extras=replace(extras, ref_logprobs=moved(extras.ref_logprobs),
                       importance=moved(extras.importance)))


def _with_states(session: Session, experience: Experience) -> ExperienceExtras:
    """Room for what the layers below the lowest that trains make of each sample, and the head for
    the reference's states."""
    extras = experience.extras
    if session.frozen_states_bytes and not extras.frozen_states:
        extras = replace(extras, frozen_states=[None] * len(experience.sequences))
    if extras.ref_states and session.reference is not None:
        with session.reference.view(session.policy.lm) as view:
            extras = replace(extras, ref_head=head.HeadWeights.of(view).as_now())
    return extras


def replay(session: Session, experience: Experience, rows: torch.Tensor, *, value_only: bool
           ) -> tuple[head.TokenFigures, int]:
    """The policy's figures of some rows of ``experience``, and how many tokens were computed."""
    samples, extras, other = experience.sequences.rows(rows), experience.extras, None
    batch = layout.lay_out(samples, pack=session.packs).to(session.backend.device)
    if extras.ref_head is not None:
        states = torch.cat([extras.ref_states[i] for i in rows.tolist()])
        other = head.OtherHead(to_device(states, session.backend.device), extras.ref_head)
    forward = partial(session.trained.engine, temperature=session.sampling.temperature,
                      want_entropy=experience.options.has_entropy, value_only=value_only,
                      reference=other)
    if session.policy.split is not None and extras.frozen_states:
        forward = partial(_replay_top, session, extras.frozen_states, rows.tolist(), samples,
                          forward)
    return forward(batch), batch.tokens.numel()


def _replay_top(session: Session, kept: list[torch.Tensor | None], places: list[int],
                samples: layout.Sequences, forward: Callable[..., head.TokenFigures],
                batch: layout.SequenceBatch) -> head.TokenFigures:
    """As :func:`replay`, of a policy whose lower layers are frozen: they run only for samples whose
    states were not kept; their outputs are kept then."""
    batch = replace(batch, frozen_states=layout.known_states(kept, places, batch))
    with trunk.inputs_at(session.policy.split if batch.frozen_states is None else None,
                         session.policy.lm) as entering:
        out = forward(batch)
    if entering:
        layout.keep_states(kept, session.frozen_states_bytes, places,
                           (samples.lengths - 1).tolist(), batch, entering[-1])
    return out
