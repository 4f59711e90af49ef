"""Linear layers on the CPU through oneDNN (:mod:`ppocli.distributed.onednn`): their gradients, and
weights laid out in its own order for decoding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ppocli.distributed import onednn
from ppocli.distributed.onednn import Product
from ppocli.models.transformers_internals import conv1d

PACKED_BYTES = 2 * 2**30
"""most that a second copy of the weights, made for decoding, may take: what is free at the moment
must not decide it, or a run would go on with other roundings"""


class _OneDnnLinear(torch.autograd.Function):
    """[M, K] x, [N, K] weight of any strides and [N] bias to x weight^T + bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
                ) -> torch.Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        # nobody needs the input of a frozen layer, and under adapters most layers are frozen
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.in_order = weight.is_contiguous()
        return onednn.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = onednn.product(grad, weight.t()) if need_x else None
        grad_weight = _weight_gradient(grad, x, in_order=ctx.in_order) if need_weight else None
        return grad_x, grad_weight, grad.sum(0) if need_bias else None


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, *, in_order: bool) -> torch.Tensor:
    """[N, K] of [M, N] and [M, K].

    The first operand of the product is copied. Either that is the one that gives the result in the
    weight's own memory order; or the other, if it is so much smaller that it pays to copy the
    result as well (autograd does).

    Args:
        in_order: whether the weight is stored as [N, K]; else transposed.
    """
    own, other = (grad, x) if in_order else (x, grad)
    first = own if own.numel() <= other.numel() + grad.shape[1] * x.shape[1] else other
    return onednn.product(grad.t(), x.t()) if first is grad else onednn.product(x.t(), grad.t()).t()


class _Routed(nn.Module):
    """What linear layers have in common that multiply through oneDNN."""

    weight: Any
    bias: Any
    packed: torch.Tensor | None = None
    """the weight in oneDNN's own order, for passes without gradients"""
    transposed = False
    """whether the weight is stored as [inputs, outputs]"""
    packed_alone = False
    """whether oneDNN serves for the packed weight and nothing else"""

    def rows(self) -> torch.Tensor:
        """The weight as [outputs, inputs]."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the plain layer's, which computes what this route has nothing to offer for."""
        if self.packed is not None:
            packed, dtype = self.packed, self.packed.dtype
            bias = None if self.bias is None else self.bias.to(dtype)
            return _over_rows(lambda rows: onednn.linear(rows, packed, bias), x.to(dtype))
        if (self.packed_alone or x.dtype != torch.float32 or self.weight.dtype != torch.float32
                or not x.numel() or x.device.type != "cpu" or torch.is_autocast_enabled("cpu")):
            return super().forward(x)
        return _over_rows(lambda rows: _OneDnnLinear.apply(rows, self.rows(), self.bias), x)


def _over_rows(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    out = product(x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


@cache
def _routed_kind(plain: Any) -> Any:
    """The layers through oneDNN for ``nn.Linear``, or for GPT-2's ``Conv1D``, whose weight is
    stored transposed."""
    return type(f"Routed{plain.__name__}", (_Routed, plain), {"transposed": plain is not nn.Linear})


def route_linears(module: nn.Module, products: str = onednn.ONEDNN) -> None:
    """Put layers that multiply through oneDNN in place of the linear layers inside ``module``, over
    the same parameters and under the same names.

    Args:
        products: where they do, as of :mod:`ppocli.distributed.onednn`; nowhere: nothing is
        changed.
    """
    if products == onednn.TORCH:
        return
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and type(child) in (nn.Linear, conv1d()):
                made[child] = made.get(child) or _routed_copy(
                    child, packed_alone=products == onednn.DECODING)
                parent._modules[name] = made[child]


def _routed_copy(layer: Any, *, packed_alone: bool) -> nn.Module:
    plain: Any = type(layer)
    with torch.device("meta"):
        routed = _routed_kind(plain)(*((layer.in_features, layer.out_features)
                                       if plain is nn.Linear else (layer.nf, layer.nx)))
    routed.weight, routed.bias = layer.weight, layer.bias
    routed.packed_alone = packed_alone
    return routed.train(layer.training)


def product_of(layer: Any) -> Product:
    """How the numbers of a linear layer are multiplied."""
    if isinstance(layer, _Routed) and not layer.packed_alone and layer.weight.device.type == "cpu":
        return _product
    return nn.functional.linear


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return nn.functional.linear(x, weight)
    return onednn.product(x, weight)


def packed_size(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the copy that :func:`packed_weights` makes of a module once its linear layers are
    routed; the weights may be on any device."""
    return _size(_packable(module, dtype, (nn.Linear, conv1d())), dtype)


def _packable(module: nn.Module, dtype: torch.dtype, kinds: tuple[type, ...] = ()) -> list[Any]:
    """Layers of these very types, or routed ones, that compute in ``dtype``: weights in fewer bits
    do so only where autocast is on."""
    parts: list[Any] = [part for part in module.modules()
                        if type(part) in kinds or isinstance(part, _Routed)]
    return [part for part in parts if part.weight.dtype in (torch.float32, dtype)]


def _size(layers: list[Any], dtype: torch.dtype) -> int:
    size = sum(layer.weight.numel() * dtype.itemsize for layer in layers)
    return size if size <= PACKED_BYTES else 0


@contextmanager
def packed_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Passes without gradients meanwhile take routed weights from a copy in oneDNN's own order,
    which products of few rows, as in decoding, gain most from. It holds the weights a second time;
    of a model where that would be more than ``PACKED_BYTES`` none is made.

    Args:
        dtype: that is computed in.
    """
    layers = [part for part in _packable(module, dtype) if part.weight.device.type == "cpu"]
    layers = layers if _size(layers, dtype) else []
    try:
        for layer in layers:
            # in one expression: a name would hold the last layer's, the largest, meanwhile
            layer.packed = onednn.packed(layer.rows().detach().to(dtype))
        yield
    finally:
        for layer in layers:
            layer.packed = None
