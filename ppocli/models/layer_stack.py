"""The decoder's stack of layers, entered in the middle: one forward pass of the frozen bottom can
serve several tops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def layer_stack(lm: Any) -> nn.ModuleList:
    """The list of a model's decoder layers.

    Raises:
        ValueError: no list of modules is as long as the model is deep.
    """
    config, trunk = lm.config, lm.base_model
    depth = config.num_hidden_layers
    if getattr(config, "is_encoder_decoder", False):
        trunk = lm.get_decoder()
        depth = next(value for name in ("num_decoder_layers", "decoder_layers")
                     if (value := getattr(config, name, None)) is not None)
    for module in trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"no stack of {depth} layers in {type(trunk).__name__}")


def stack_owner(lm: Any) -> nn.Module:
    """The module whose child the stack of layers is."""
    stack = layer_stack(lm)
    return next(module for module in lm.base_model.modules()
                if any(child is stack for child in module.children()))


@torch.no_grad()
def probe(lm: Any, *hooks: Any) -> torch.Tensor:
    """[1, 3, D] the trunk's states of three tokens; removes the handles ``hooks`` at the end."""
    try:
        tokens = torch.zeros(1, 3, dtype=torch.long, device=lm.base_model.device)
        states: torch.Tensor = lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return states
    finally:
        for hook in hooks:
            hook.remove()


def layers_return_tuples(lm: Any) -> bool:
    """Whether the layers return tuples instead of tensors: transformers' differ in that."""
    kinds: list[bool] = []
    probe(lm, layer_stack(lm)[0].register_forward_hook(
        lambda _module, _inputs, out: kinds.append(isinstance(out, tuple))))
    return kinds[0]


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape a parameter has when it isn't sharded (by ZeRO 3)."""
    return getattr(parameter, "ds_shape", parameter.shape)


class _Skipped(nn.Module):
    """Stands in for a layer and hands its input on, or another tensor in its place."""

    def __init__(self, layer: nn.Module, instead: torch.Tensor | None, as_tuple: bool) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: nothing of it is moved or saved
        self.instead = instead
        self.as_tuple = as_tuple

    def __getattr__(self, name: str) -> Any:
        """What a trunk asks its layers for (the kind of their attention) is the layer's own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        """As the layer's, without computing anything."""
        out = hidden if self.instead is None else self.instead
        return (out,) if self.as_tuple else out


@contextmanager
def tapped(stack: nn.ModuleList, index: int) -> Iterator[list[torch.Tensor]]:
    """Collects what goes into layer ``index``, [b, T, D] for each forward pass meanwhile."""
    found: list[torch.Tensor] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    handle = stack[index].register_forward_pre_hook(take, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def entered_at(stack: nn.ModuleList, index: int, hidden: torch.Tensor, *, as_tuple: bool
               ) -> Iterator[None]:
    """Forward passes meanwhile start at layer ``index`` with ``hidden`` [b, T, D] as its input;
    the layers below are not run.

    Args:
        as_tuple: whether the model's layers return tuples.
    """
    if index == 0:
        raise ValueError("a stack is entered above its first layer")
    below = list(stack)[:index]
    for number, layer in enumerate(below):
        stack[number] = _Skipped(layer, hidden if number == 0 else None, as_tuple)
    try:
        yield
    finally:
        for number, layer in enumerate(below):
            stack[number] = layer


@dataclass(frozen=True, slots=True)
class Border:
    """The first layer of a causal LM that trains; nothing below it does."""

    layer: int
    as_tuple: bool
    """whether the model's layers return tuples"""

    def tap(self, lm: Any) -> AbstractContextManager[list[torch.Tensor]]:
        """Collects what enters the layer, [b, T, D] for each forward pass meanwhile."""
        return tapped(layer_stack(lm), self.layer)

    def entered(self, lm: Any, below: torch.Tensor) -> AbstractContextManager[None]:
        """Forward passes meanwhile start at the layer, with ``below`` as its input."""
        return entered_at(layer_stack(lm), self.layer, below, as_tuple=self.as_tuple)


@contextmanager
def swapped_parameters(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Forward passes meanwhile use ``tensors`` in place of the parameters of these names. Gradients
    must not flow through such a pass, nor be pending from one before."""
    own = dict(module.named_parameters())
    kept = {name: own[name].data for name in tensors}
    try:
        for name, tensor in tensors.items():
            own[name].data = tensor
        forget_casts()
        yield
    finally:
        for name, tensor in kept.items():
            own[name].data = tensor
        forget_casts()


def forget_casts() -> None:
    """Make autocast cast weights anew. While it is on it keeps its copies by parameter, and does
    not notice that a parameter's data have been replaced."""
    torch.clear_autocast_cache()
