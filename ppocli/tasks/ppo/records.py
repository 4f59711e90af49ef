"""The immutable records that pass between the phases of a PPO step, and PPO's own state between
steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ppocli.data.prompt_set import PromptBatch
from ppocli.models.layout import Sequences
from ppocli.ppo.moments import RunningMoments


@dataclass(frozen=True, slots=True)
class Rollout:
    """B samples of phase 1. Made by ``collect_rollout``, logged, read by ``to_experience``.

    All tensors are on the CPU; what is known of the actions is right-padded to R of them.
    """

    prompts: PromptBatch
    sequences: Sequences
    """tokens and action places"""
    logprobs: torch.Tensor
    """[B, R] fp32 of the actions under the rollout policy"""
    ref_logprobs: torch.Tensor
    """[B, R] fp32 under the reference"""
    values: torch.Tensor
    """[B, R] fp32; zero without a critic"""
    kl: torch.Tensor
    """[B, R] per-token KL estimate (nats), as ``ppo.kl_estimator`` says"""
    scores: list[float]
    """[B] raw scores as the rewards gave them"""
    dense: torch.Tensor | None
    """[B, R] per-token rewards, when a reward gives them"""
    valid: torch.Tensor
    """[B] bool, false where a sample has no score and is left out of the update"""
    finished: torch.Tensor
    """[B] bool"""
    has_reference: bool
    """false without a reference model: KL and reference logprobs then say nothing"""
    responses: list[str]
    parts: dict[str, list[float | None]]
    """scores of each reward by name"""
    frozen_states: list[torch.Tensor | None] = field(default_factory=list)
    """[n, D] of each sample, on the device: what entered the lowest layer that trains, where it was
    kept; empty where nobody knows of it"""

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


@dataclass(frozen=True, slots=True)
class Experience:
    """What phase 2 needs of B samples and no more; CPU tensors. Read by ``optimize``."""

    sequences: Sequences
    """tokens and action places"""
    logprobs: torch.Tensor
    """[B, R] under the rollout policy, as all below"""
    values: torch.Tensor | None
    """None without a critic, as are ``returns``"""
    advantages: torch.Tensor
    returns: torch.Tensor | None
    ref_logprobs: torch.Tensor | None = None
    """[B, R] where the KL is a term of the loss"""
    kl_coef: float = 0.0
    """of the KL term of the loss; 0 where the reward is charged"""
    frozen_states: list[torch.Tensor | None] = field(default_factory=list)
    """as of :class:`Rollout`"""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def response_mask(self) -> torch.Tensor:
        """[B, R] bool of the actions."""
        return self.sequences.mask


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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PPOState:
        """The state that :meth:`to_json` wrote."""
        return PPOState(**{**data, "moments": RunningMoments(**data["moments"])})
