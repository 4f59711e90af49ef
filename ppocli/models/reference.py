"""The frozen policy that the KL is measured against: a copy of its own, or the policy's own module
with what trains put back as it was, or with its adapter switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ppocli.models.layer_stack import (
    entered_at,
    layer_stack,
    layers_return_tuples,
    probe,
    swapped_parameters,
    tapped,
)
from ppocli.models.loading.adapters import adapter_off
from ppocli.models.trunk import has_encoder


class Reference(Protocol):
    """Yields a causal LM to run; which one may share its trunk with the policy."""

    def view(self, policy_lm: Any) -> AbstractContextManager[Any]:
        """The reference as a model, for passes without gradients.

        Args:
            policy_lm: the policy's model, which must not be run meanwhile.
        """

    def tap(self, policy_lm: Any) -> AbstractContextManager[list[torch.Tensor]]:
        """Collects of the policy's forward passes meanwhile what :meth:`entered` can use."""

    def entered(self, view: Any, hidden: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """A pass of the :meth:`view` meanwhile leaves out what the policy's pass over the same
        batch has computed already."""


@contextmanager
def _nothing_shared() -> Iterator[list[torch.Tensor]]:
    yield []


@dataclass(frozen=True, slots=True)
class CopyReference:
    """A model of its own."""

    lm: Any
    device: torch.device
    """where it is run"""
    offload: bool = False
    """whether it lies in host memory while it isn't"""

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        if not self.offload:
            yield self.lm
            return
        there = {name: p.data.to(self.device, non_blocking=True)
                 for name, p in self.lm.named_parameters()}
        with swapped_parameters(self.lm, there), _moved_buffers(self.lm, self.device):
            yield self.lm

    def tap(self, policy_lm: Any) -> AbstractContextManager[list[torch.Tensor]]:
        """As :class:`Reference`: nothing is shared."""
        return _nothing_shared()

    def entered(self, view: Any, hidden: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """As :class:`Reference`: nothing is shared."""
        return nullcontext()


@contextmanager
def _moved_buffers(lm: Any, device: torch.device) -> Iterator[None]:
    kept = dict(lm.named_buffers())
    owners = {name: lm.get_submodule(name.rpartition(".")[0]) for name in kept}
    try:
        for name, buffer in kept.items():
            owners[name]._buffers[name.rpartition(".")[2]] = buffer.to(device)
        yield
    finally:
        for name, buffer in kept.items():
            owners[name]._buffers[name.rpartition(".")[2]] = buffer


@dataclass(frozen=True, slots=True)
class SharedReference:
    """The policy's own frozen trunk, and copies of the few tensors that train (trlX's hydra).

    ``border`` is the first layer that trains: below it policy and reference are the same, and one
    pass serves both.
    """

    frozen: dict[str, torch.Tensor]
    """parameters that train as they were at the start, by their names in the causal LM"""
    border: int
    as_tuple: bool
    """whether the model's layers return tuples"""

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        device = next(policy_lm.parameters()).device
        here = {name: tensor.to(device) for name, tensor in self.frozen.items()}
        with swapped_parameters(policy_lm, here):
            yield policy_lm

    def tap(self, policy_lm: Any) -> AbstractContextManager[list[torch.Tensor]]:
        """As :class:`Reference`."""
        if self.border == 0:
            return _nothing_shared()
        return tapped(layer_stack(policy_lm), self.border)

    def entered(self, view: Any, hidden: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """As :class:`Reference`."""
        if not hidden:
            return nullcontext()
        return entered_at(layer_stack(view), self.border, hidden[-1], as_tuple=self.as_tuple)


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """The policy's own model with its adapter switched off: nothing is held twice."""

    def view(self, policy_lm: Any) -> AbstractContextManager[Any]:
        """As :class:`Reference`."""
        return adapter_off(policy_lm)

    def tap(self, policy_lm: Any) -> AbstractContextManager[list[torch.Tensor]]:
        """As :class:`Reference`: an adapter changes the states from the first layer on."""
        return _nothing_shared()

    def entered(self, view: Any, hidden: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """As :class:`Reference`: nothing is shared."""
        return nullcontext()


@torch.no_grad()
def share_trunk(lm: Any, *, offload: bool = False) -> SharedReference:
    """A reference that shares what is frozen of a policy that has not been trained yet.

    Raises:
        ValueError: a pass from the first trained layer on does not give what a whole pass gives, so
            that the model's layers are not a plain sequence.
    """
    frozen = {name: p.detach().clone().to("cpu" if offload else p.device)
              for name, p in lm.named_parameters() if p.requires_grad}
    return SharedReference(frozen, *trunk_border(lm))


@torch.no_grad()
def trunk_border(lm: Any) -> tuple[int, bool]:
    """The first layer that trains, or 0 where something below it does; and whether layers return
    tuples.

    Raises:
        ValueError: as :func:`share_trunk`.
    """
    stack = layer_stack(lm)
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in stack]
    # a decoder's layers beside an encoder need more than the states of the layer below
    if has_encoder(lm) or not any(trains) or _trains_before(lm, stack):
        return 0, False
    border = trains.index(True)
    return border, _check_entry(lm, stack, border)


def _trains_before(lm: Any, stack: Any) -> bool:
    """Whether something that trains runs before the first layer, an embedding say."""
    inside = {id(m) for m in stack.modules()}
    found: list[bool] = []  # of the modules beside the stack, in the order they run

    def note(module: torch.nn.Module, _inputs: Any) -> None:
        found.append(any(p.requires_grad for p in module.parameters(recurse=False)))

    hooks = [m.register_forward_pre_hook(note) for m in lm.base_model.modules()
             if id(m) not in inside]
    first: list[int] = []
    hooks.append(stack[0].register_forward_pre_hook(lambda *_: first.append(len(found))))
    probe(lm, *hooks)
    return any(found[:first[0]])


def _check_entry(lm: Any, stack: Any, border: int) -> bool:
    """Whether layers return tuples; entering at ``border`` must give what a whole pass gives."""
    if border == 0:
        return False
    as_tuple = layers_return_tuples(lm)
    with tapped(stack, border) as hidden:
        whole = probe(lm)
    try:
        with entered_at(stack, border, hidden[-1], as_tuple=as_tuple):
            entered = probe(lm)
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{type(lm).__name__} can't be entered at layer {border} ({error})"
                         ) from error
    if not torch.equal(whole, entered):
        raise ValueError(f"{type(lm).__name__} entered at layer {border} gives other numbers")
    return as_tuple
