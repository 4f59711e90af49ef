"""Value functions with layers of their own: a branch that leaves the policy's trunk near its top,
or a whole second model."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn

from ppocli.models.layer_stack import (
    SplitPoint,
    layer_stack,
    layers_return_tuples,
    stack_path,
    trial_pass,
)
from ppocli.models.layout import SequenceBatch
from ppocli.models.trunk import has_encoder, response_hidden


class ValueTrunk(Protocol):
    """Makes the hidden states that a value head reads; a module."""

    split: SplitPoint | None
    """the layer of the policy from whose inputs the trunk starts; None where nothing is shared"""

    def __call__(self, lm: Any, batch: SequenceBatch, shared: list[torch.Tensor]) -> torch.Tensor:
        """[N, D] states at the positions that predict the batch's response tokens.

        Args:
            lm: the policy's model.
            shared: what entered the layer of :attr:`split` in its pass over this batch.
        """


class ValueBranch(nn.Module):
    """Own copies of the policy's top layers and of what follows them, fed by the layer below (trlX
    ``num_value_layers_unfrozen``). Gradients flow on into those of the policy's layers that train.

    Args:
        lm: the policy's model; the copies start as its layers are.
        num_layers: how many.

    Raises:
        ValueError: the model has no plain stack of layers, or no layer would be left below.
    """

    def __init__(self, lm: Any, num_layers: int) -> None:
        super().__init__()
        if has_encoder(lm):
            raise ValueError("a branch can't leave the decoder of an encoder-decoder")
        stack = layer_stack(lm)
        if not 0 < num_layers < len(stack):
            raise ValueError(f"a branch of {num_layers} layers does not fit a stack of "
                             f"{len(stack)}: it needs one below it")
        self.start = len(stack) - num_layers
        self.split = SplitPoint(self.start, layers_return_tuples(lm))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for layer in list(stack)[self.start:])
        self.tail = nn.ModuleDict({name: copy.deepcopy(module)
                                   for name, module in _after_stack(lm).items()})
        self.requires_grad_(True)

    def forward(self, lm: Any, batch: SequenceBatch, shared: list[torch.Tensor]) -> torch.Tensor:
        """As :class:`ValueTrunk`."""
        path = stack_path(lm)
        own: dict[str, nn.Module] = {f"{path}.{self.start + i}": layer
                                     for i, layer in enumerate(self.layers)}
        beside = path.rpartition(".")[0]
        own |= {f"{beside}.{name}".strip("."): module for name, module in self.tail.items()}
        return response_hidden(self.split.resumed(lm, shared[-1], own), batch)


class ValueModel(nn.Module):
    """A trunk of its own, which sees the same tokens as the policy's."""

    split = None

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, lm: Any, batch: SequenceBatch, shared: list[torch.Tensor]) -> torch.Tensor:
        """As :class:`ValueTrunk`."""
        return response_hidden(self.lm, batch)


class ScoreHead(nn.Module):
    """The linear head of a reward model as a value head, so that values start as its scores."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.outer = nn.Linear(weight.shape[1], 1, bias=bias is not None)
        with torch.no_grad():
            self.outer.weight.copy_(weight)
            if bias is not None:
                self.outer.bias.copy_(bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] hidden states -> [...] values, fp32 whatever the compute type."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.outer(hidden.float()).squeeze(-1)


def _after_stack(lm: Any) -> dict[str, nn.Module]:
    """Modules beside the stack that have weights and run after its last layer, by name."""
    stack, owner = layer_stack(lm), lm.get_submodule(stack_path(lm).rpartition(".")[0])
    order: list[str] = []
    hooks = [stack[-1].register_forward_hook(lambda *_: order.append(""))]
    hooks += [module.register_forward_hook(lambda *_, name=name: order.append(name))
              for name, module in owner.named_children() if module is not stack]
    trial_pass(lm, *hooks)
    after = dict.fromkeys(order[order.index("") + 1:])
    return {name: module for name, module in owner.named_children()
            if name in after and any(True for _ in module.parameters())}
