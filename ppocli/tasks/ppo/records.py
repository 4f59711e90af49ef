"""The immutable records that pass between the phases of a step, and the state between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ppocli.data.batch import PromptBatch
from ppocli.ppo.moments import RunningMoments
from ppocli.train.clock import Spent

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Rollout:
    """B samples of phase 1. Made by ``collect_rollout``, logged, read by ``to_experience``.

    All tensors are on the CPU; responses are right-padded to R tokens.
    """

    prompts: PromptBatch
    response_tokens: torch.Tensor
    """[B, R] int64"""
    response_mask: torch.Tensor
    """[B, R] bool, true through the token that ended the response"""
    logprobs: torch.Tensor
    """[B, R] fp32 of the sampled tokens under the rollout policy"""
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


@dataclass(frozen=True, slots=True)
class Experience:
    """What phase 2 needs of B samples and no more; CPU tensors. Read by ``optimize``."""

    prompt_tokens: torch.Tensor
    prompt_mask: torch.Tensor
    response_tokens: torch.Tensor
    response_mask: torch.Tensor
    logprobs: torch.Tensor
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
        return len(self.response_tokens)


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far, comparable only under the same ``judged_by``."""

    step: int
    metric: float


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything between two steps that is not a tensor; saved in every checkpoint."""

    kl_coef: float
    init_kl_coef: float
    """``ppo.init_kl_coef`` that ``kl_coef`` started from"""
    digests: dict[str, str]
    """of the prompts and of the reference's weights; others on resume mean another run"""
    judged_by: str
    """digest of all that an evaluation's figures depend on beside the policy"""
    step: int = 0
    episodes: int = 0
    """samples drawn; also the cursor into the prompt order"""
    updates: int = 0
    """optimizer updates made; the learning-rate schedule runs over these"""
    moments: RunningMoments = field(default_factory=RunningMoments)
    """of the raw scores, for ``reward.scale=running``"""
    ref_std: float | None = None
    """score deviation of the first rollout, for ``reward.scale=ref``"""
    best: Best | None = None
    eval_before: dict[str, float] | None = None
    eval_last: dict[str, float] | None = None
    eval_step: int | None = None
    """step of ``eval_last``"""
    pending: dict[str, Any] | None = None
    """figures of the newest step while its evaluation and its metrics row are still to come"""
    nonfinite: int = 0
    """non-finite updates in a row"""
    seconds: dict[str, float] = field(default_factory=dict)
    """wall time by phase since the start of the run"""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """CPU time by phase of all threads of the process"""
    tokens: dict[str, int] = field(default_factory=dict)
    """tokens by phase since the start of the run"""
    health: dict[str, int] = field(default_factory=dict)
    """consecutive steps of each unhealthy sign"""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> TrainState:
        """The state that ``to_json`` wrote."""
        state = TrainState(**data)
        return replace(state, moments=RunningMoments(**data["moments"]),
                       best=None if data["best"] is None else Best(**data["best"]))

    def book(self, spent: Spent, tokens: Mapping[str, int] = MappingProxyType({})) -> TrainState:
        """The state with more time and tokens booked to phases."""
        return replace(self, seconds=_added(self.seconds, spent.seconds),
                       cpu_seconds=_added(self.cpu_seconds, spent.cpu_seconds),
                       tokens=_added(self.tokens, tokens))


def _added(sums: Mapping[str, N], more: Mapping[str, N]) -> dict[str, N]:
    return {**sums, **{name: sums[name] + value if name in sums else value
                       for name, value in more.items()}}
