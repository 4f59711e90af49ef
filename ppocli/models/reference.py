"""The frozen policy that the KL is measured against: a copy of its own, or the policy's own module
with what trains put back as it was, or with its adapter switched off."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ppocli.models.layer_stack import SplitPoint, swapped_tensors, trained_split
from ppocli.models.loading import peft_internals


class Reference(Protocol):
    """Yields a causal LM to run; which one may share its trunk with the policy."""

    def view(self, policy_lm: Any) -> AbstractContextManager[Any]:
        """The reference as a model, for passes without gradients.

        Args:
            policy_lm: the policy's model, which must not be run meanwhile.
        """

    @property
    def split(self) -> SplitPoint | None:
        """Where a pass of the :meth:`view` can start from what entered that layer in the policy's
        pass over the same batch; None where nothing is shared."""


@dataclass(frozen=True, slots=True)
class CopyReference:
    """A model of its own."""

    lm: Any
    device: torch.device
    """where it is run"""
    offload: bool = False
    """whether it lies in host memory while it isn't"""
    split: SplitPoint | None = None

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        if not self.offload:
            yield self.lm
            return
        there = {name: tensor.data.to(self.device, non_blocking=True) for name, tensor in
                 (*self.lm.named_parameters(), *self.lm.named_buffers())}
        with swapped_tensors(self.lm, there):
            yield self.lm


@torch.no_grad()
def follow(reference: CopyReference, policy_lm: Any, alpha: float) -> None:
    """Move a reference to ``alpha * policy + (1 - alpha) * reference``, weight by weight: with 1 a
    reset (ProRL, Liu et al. 2025, arXiv 2505.24864), below it TR-DPO's soft update (Gorbatovski et
    al. 2024, arXiv 2404.09656), which is TRL's ``ref_model_mixup_alpha``."""
    now = dict(policy_lm.named_parameters())
    for name, own in reference.lm.named_parameters():
        own.lerp_(now[name].to(own), alpha)


@dataclass(frozen=True, slots=True)
class SharedReference:
    """The policy's own frozen trunk, and copies of the few tensors that train (trlX's hydra)."""

    frozen: dict[str, torch.Tensor]
    """parameters that train as they were at the start, by their names in the causal LM"""
    split: SplitPoint | None
    """the first layer that trains: policy and reference are the same before it"""

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        device = next(policy_lm.parameters()).device
        here = {name: tensor.to(device) for name, tensor in self.frozen.items()}
        with swapped_tensors(policy_lm, here):
            yield policy_lm


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """The policy's own model with its adapter switched off: nothing is held twice."""

    split: SplitPoint | None = None

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        peft_internals.enable_adapter(policy_lm, False)
        try:
            yield policy_lm
        finally:
            peft_internals.enable_adapter(policy_lm, True)


@torch.no_grad()
def share_trunk(lm: Any, *, offload: bool = False) -> SharedReference:
    """A reference that shares what is frozen of a policy that has not been trained yet.

    Raises:
        ValueError: a pass from the first trained layer on does not give what a whole pass gives, so
            that the model's layers are not a plain sequence.
    """
    frozen = {name: p.detach().to("cpu" if offload else p.device, copy=True)
              for name, p in lm.named_parameters() if p.requires_grad}
    return SharedReference(frozen, trained_split(lm))
