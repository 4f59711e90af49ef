"""Linear layers on the CPU through oneDNN, where that beats torch's own path.

In fp32 torch hands matrix products to the BLAS it was built with (MKL in the usual wheels), which
falls behind on some processors and shapes: wide output embeddings, few rows, AMD. oneDNN, in the
same wheel, multiplies the same numbers as exactly. torch reaches it for linear layers by
``torch.ops.mkldnn._linear_pointwise``, the operator that its compiler emits; it has no gradient of
its own, so that one is defined here. Everything that knows of it is in this file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import process_time
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ppocli.config.schema import HardwareConfig
from ppocli.errors import ConfigError
from ppocli.text import first_line

log = logging.getLogger("ppocli")

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""[M, K] and [N, K] to [M, N], the first times the second transposed; strides may be any"""

EXACT = 2e-6
"""most relative error of a product of fp32 numbers; bf16 is off by 1e-3"""
SHAPES = ((256, 768, 768), (16, 768, 2304), (32, 768, 8192))
"""(rows, inputs, outputs) that the two paths are timed on: training, decoding, output embedding"""
CACHED = 128
"""kernels that are kept, each for one shape of a product, of up to a megabyte; by default two
thousand"""
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""of oneDNN, and of what torch has around it"""
GAIN = 1.05
"""oneDNN is taken where it is this many times as fast"""
TRIES = 5
"""of each product, the first of which only warms up"""
ROWS_HINT = 64
"""rows that a packed weight is laid out for; it serves any number"""
PACKED_BYTES = 2 * 2**30
"""most that a second copy of the weights, made for decoding, may take: what is free at the moment
must not decide it, or a run would go on with other roundings"""


def onednn_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As :data:`Product`, without a gradient."""
    return _linear(x, weight, None)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


class _OneDnnLinear(torch.autograd.Function):
    """[M, K] x, [N, K] weight of any strides and [N] bias to x weight^T + bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
                ) -> torch.Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        # nobody needs the input of a frozen layer, and under adapters most layers are frozen
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.in_order = weight.is_contiguous()
        return _linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = onednn_product(grad, weight.t()) if need_x else None
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
    if first is grad:
        return onednn_product(grad.t(), x.t())
    return onednn_product(x.t(), grad.t()).t()


class _Routed:
    """What linear layers have in common that multiply through oneDNN."""

    weight: Any
    bias: Any
    packed: torch.Tensor | None = None
    """the weight in oneDNN's own order, for passes without gradients"""

    def routed(self, x: torch.Tensor) -> torch.Tensor | None:
        """The layer's output, or None where this route has nothing to offer."""
        if self.packed is not None:
            dtype = self.packed.dtype
            bias = None if self.bias is None else self.bias.to(dtype)
            packed = self.packed
            return _over_rows(lambda rows: _linear(rows, packed, bias), x.to(dtype))
        if (x.dtype != torch.float32 or self.weight.dtype != torch.float32 or not x.numel()
                or x.device.type != "cpu" or torch.is_autocast_enabled("cpu")):
            return None
        return _over_rows(
            lambda rows: _OneDnnLinear.apply(rows, _as_rows(self), self.bias), x)


def _over_rows(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    out = product(x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


class RoutedLinear(_Routed, nn.Linear):
    """``nn.Linear`` through oneDNN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As ``nn.Linear``."""
        out = self.routed(x)
        return nn.Linear.forward(self, x) if out is None else out


@cache
def _conv1d() -> tuple[type[nn.Module], type[nn.Module]]:
    """GPT-2's linear layer, whose weight is stored transposed, and the same through oneDNN."""
    from transformers.pytorch_utils import Conv1D

    class RoutedConv1D(_Routed, Conv1D):
        """transformers' ``Conv1D`` through oneDNN."""

        def forward(self, x: torch.Tensor) -> Any:
            """As ``Conv1D``."""
            out = self.routed(x)
            return Conv1D.forward(self, x) if out is None else out

    return Conv1D, RoutedConv1D


def route_linears(module: nn.Module) -> None:
    """Make the linear layers of ``module`` multiply through oneDNN from now on. Their names, their
    parameters and what they are instances of stay as they were."""
    conv, routed_conv = _conv1d()
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = RoutedLinear
        elif type(part) is conv:
            part.__class__ = routed_conv


def product_of(layer: Any) -> Product:
    """How the numbers of a linear layer are multiplied."""
    if isinstance(layer, _Routed) and layer.weight.device.type == "cpu":
        return _product
    return nn.functional.linear


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return nn.functional.linear(x, weight)
    return onednn_product(x, weight)


def packed_size(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the copy that :func:`packed_weights` makes of a module once its linear layers are
    routed; the weights may be on any device."""
    return _size(_packable(module, dtype, (nn.Linear, _conv1d()[0])), dtype)


def _packable(module: nn.Module, dtype: torch.dtype, kinds: tuple[type, ...] = ()) -> list[Any]:
    """Layers of these very types, or routed ones, that compute in ``dtype``: weights in fewer bits
    do so only where autocast is on."""
    parts: list[Any] = [part for part in module.modules()
                        if type(part) in kinds or isinstance(part, _Routed)]
    return [part for part in parts if part.weight.dtype in (torch.float32, dtype)]


def _as_rows(layer: Any) -> torch.Tensor:
    """The weight as [outputs, inputs]."""
    stored: torch.Tensor = layer.weight
    return stored.t() if issubclass(type(layer), _conv1d()[0]) else stored


def _size(layers: list[Any], dtype: torch.dtype) -> int:
    size = sum(layer.weight.numel() * dtype.itemsize for layer in layers)
    return size if size <= PACKED_BYTES else 0


@contextmanager
def packed_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Passes without gradients meanwhile take weights from a copy in oneDNN's own order, which
    products of few rows gain most from. It holds the weights a second time; of a model where that
    would be more than ``PACKED_BYTES`` none is made.

    Args:
        dtype: that is computed in.
    """
    layers = [part for part in _packable(module, dtype) if part.weight.device.type == "cpu"]
    if not _size(layers, dtype):
        layers = []
    try:
        for layer in layers:
            # in one expression: a name would hold the last layer's, the largest, meanwhile
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(
                _as_rows(layer).detach().to(dtype), ROWS_HINT)
        yield
    finally:
        for layer in layers:
            layer.packed = None


def choose_gemm(hardware: HardwareConfig, noted: bool | None = None) -> bool:
    """Whether linear layers on the CPU should multiply through oneDNN.

    ``hardware.gemm=auto`` takes it where it is exact and, measured now, faster. In bf16 torch takes
    it itself, and what is left to gain are weights packed for decoding.

    Args:
        noted: what ``auto`` came to when the run began: two measurements may differ, and the
            roundings of a run that is resumed must not.

    Raises:
        ConfigError: ``onednn`` is wanted and torch has none, or not an exact one.
    """
    for name in _CACHES:  # read when oneDNN computes for the first time
        os.environ.setdefault(name, str(CACHED))
    wanted = hardware.gemm
    if wanted == "default":
        return False
    fault = _fault()
    if fault is not None:
        if wanted == "onednn":
            raise ConfigError(f"oneDNN can't be used for linear layers: {fault}.",
                              where="hardware.gemm", fix="set hardware.gemm=auto or default")
        log.debug("linear layers: torch's default products (%s)", fault)
        return False
    if wanted == "onednn" or hardware.precision == "bf16":
        return True
    if noted is not None:
        return noted
    gain = _gain(torch.get_num_threads())
    log.debug("linear layers: oneDNN is %.2f times as fast as torch's default here%s", gain,
             "" if gain >= GAIN else ", the default stays")
    return gain >= GAIN


@cache
def _fault() -> str | None:
    """What is wrong with the route; None if it is there and as exact as fp32."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 256, generator=generator) for rows in (48, 512))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        found = onednn_product(x, weight), _linear(x, packed, None), _transposed(x, weight)
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"its operator fails here ({first_line(error)})"
    exact = x.double() @ weight.double().t()
    off = max(float((product - exact).norm() / exact.norm()) for product in found)
    return None if off < EXACT else f"its fp32 products are off by {off:.1e}"


def _transposed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same product from operands in other memory orders, as gradients need them."""
    return onednn_product(x.t().contiguous().t(), weight.t().contiguous().t())


@cache
def _gain(_threads: int) -> float:
    """How many times as fast oneDNN is over all of ``SHAPES``, with so many threads."""
    default = onednn = 0.0
    for rows, inputs, outputs in SHAPES:
        x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
        default += _seconds(nn.functional.linear, x, weight)
        onednn += _seconds(onednn_product, x, weight)
    return default / onednn


def _seconds(product: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Processor seconds for a billion multiplications, the best of a few tries."""
    times = []
    for _ in range(TRIES):
        start = process_time()
        product(x, weight)
        times.append(process_time() - start)
    return min(times[1:]) / (x.shape[0] * weight.numel() / 1e9)
