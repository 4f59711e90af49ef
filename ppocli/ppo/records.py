"""The immutable records that pass between the phases of a PPO step, and PPO's own state between
steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ppocli.data import data_set, prompt_set
from ppocli.data.columns import joined, rows_of
from ppocli.models.head import HeadWeights
from ppocli.models.layout import Sequences
from ppocli.ppo.losses import LossOptions
from ppocli.ppo.shaping import RunningMoments
from ppocli.ppo.step_size import FIRST_RATE
from ppocli.runs.episode import Episode, turn_numbers

POLICY, CRITIC = "all", "critic"
"""parts of an update: policy and value function, and the latter alone"""


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
    """[B, R] as of :class:`ppocli.ppo.advantages.AdvantageInputs`"""
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
class Rollout:
    """B samples of phase 1. Made by ``collect_rollout``, logged, read by ``to_experience``.

    All tensors are on the CPU; figures of the actions are right-padded to R of them.
    """

    prompts: prompt_set.PromptBatch
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
        return [score if valid else None
                for score, valid in zip(self.scores, self.valid.tolist(), strict=True)]

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

    def rows(self, order: list[int]) -> Rollout:
        """The samples at these places, without any that wait."""
        return rows_of(self, order)


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
    """as of :class:`RolloutExtras`"""
    ref_states: list[torch.Tensor] = field(default_factory=list)
    """as of :class:`RolloutExtras`"""
    ref_head: HeadWeights | None = None
    """of the reference, on the device, where there are ``ref_states``"""
    examples: data_set.Examples | None = None
    """those of ``ppo.ptx.data`` that the updates mix in; None: none"""
    pretrains: bool = False
    """whether the value function alone learns, on returns of lambda 1"""


@dataclass(frozen=True, slots=True)
class Experience:
    """What phase 2 needs of B samples and no more. Made by ``to_experience``, read by
    ``optimize``."""

    sequences: Sequences
    """tokens and action places"""
    logprobs: torch.Tensor
    """[B, R] of the old policy, as all below"""
    values: torch.Tensor | None
    """None without a critic, as are ``returns``"""
    advantages: torch.Tensor
    returns: torch.Tensor | None
    options: LossOptions
    """of the loss, with the coefficients of this step"""
    extras: ExperienceExtras = field(default_factory=ExperienceExtras)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def response_mask(self) -> torch.Tensor:
        """[B, R] bool of the actions."""
        return self.sequences.mask

    @property
    def mean_loss_tokens(self) -> float:
        """Tokens of a sample that are in the loss, on average."""
        counts = self.extras.counts
        return float((self.response_mask if counts is None else counts).sum()) / len(self)


@dataclass(frozen=True, slots=True)
class PPOState:
    """PPO's own numbers between two steps: :attr:`ppocli.training.state.TrainState.task`."""

    kl_coef: float
    init_kl_coef: float
    """``ppo.init_kl_coef`` that ``kl_coef`` started from"""
    moments: RunningMoments = field(default_factory=RunningMoments)
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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PPOState:
        """The state that :meth:`to_json` wrote."""
        return PPOState(**{**data, "moments": RunningMoments(**data["moments"])})
