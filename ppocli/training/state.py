"""The state between two steps, which only the loop commits, and always as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from ppocli.training.clock import Spent

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far, comparable only under the same ``judged_by``."""

    step: int
    metric: float


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything between two steps beside weights and optimizer; saved in every checkpoint."""

    digests: dict[str, str]
    """digests of what must not change silently in a run, such as its data; different ones on resume
    mean a different run"""
    judged_by: str
    """digest of everything that evaluation figures depend on, except the trained weights"""
    step: int = 0
    episodes: int = 0
    """samples drawn; also the cursor into the data"""
    updates: int = 0
    """optimizer updates made; the learning-rate schedule runs over these"""
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
    task: dict[str, Any] = field(default_factory=dict)
    """the task's own numbers, as plain JSON"""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """the task's own tensors by name, on the CPU; never changed in place"""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; without the tensors."""
        return {name: value for name, value in asdict(replace(self, tensors={})).items()
                if name != "tensors"}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrainState:
        """The state that :meth:`to_json` wrote, without tensors. Numbers of PPO that earlier
        versions kept among the loop's are found too."""
        known = {f.name for f in fields(TrainState)}
        own = {name: value for name, value in data.items() if name in known}
        own["task"] = {**{name: value for name, value in data.items() if name not in known},
                       **data.get("task", {})}
        own["best"] = None if data["best"] is None else Best(**data["best"])
        return TrainState(**own)

    def book(self, spent: Spent, tokens: Mapping[str, int] | None = None) -> TrainState:
        """The state with more time and tokens booked to phases."""
        return replace(self, seconds=_added(self.seconds, spent.seconds),
                       cpu_seconds=_added(self.cpu_seconds, spent.cpu_seconds),
                       tokens=_added(self.tokens, tokens or {}))


def _added(sums: Mapping[str, N], more: Mapping[str, N]) -> dict[str, N]:
    return {**sums, **{name: sums[name] + value if name in sums else value
                       for name, value in more.items()}}
