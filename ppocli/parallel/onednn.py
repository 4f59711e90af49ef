"""Matrix products by oneDNN on the CPU: whether this torch has them, exactly, and what they are
faster for here than torch's own; and whether bf16 is faster than fp32.

In fp32 torch hands matrix products to the BLAS it was built with (MKL in the usual wheels), which
falls behind on some processors and shapes: wide output embeddings, few rows, AMD. oneDNN, in the
same wheel, multiplies the same numbers as exactly. torch reaches it for linear layers by
``torch.ops.mkldnn._linear_pointwise``, the operator that its compiler emits. Only this file calls
torch's private operators.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from time import process_time
from typing import cast

import torch

from ppocli.config.schema import HardwareConfig
from ppocli.errors import ConfigError

log = logging.getLogger("ppocli")

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""[M, K] and [N, K] to [M, N], the first times the second transposed; strides may be any"""

TORCH, DECODING, ONEDNN = "torch", "oneDNN in decoding", "oneDNN"
"""whose products linear layers take: oneDNN's nowhere, in decoding alone, everywhere"""
EXACT = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
"""most relative error of a product by the type of its numbers; bf16 is off by 1e-3"""
PASS_SHAPE = (256, 768, 768)
"""(rows, inputs, outputs) that both kinds of products are timed on for forward and backward passes
"""
DECODING_SHAPES = ((16, 768, 2304), (32, 768, 8192))
"""likewise for decoding, with weights that are packed: a layer, an output embedding"""
CACHED = 64
"""kernels that are kept, each for one shape of a product, of up to a megabyte; by default two
thousand"""
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""of oneDNN, and of what torch has around it"""
GAIN = 1.05
"""oneDNN is taken for what it is this many times as fast at"""
BF16_SHAPE = (64, 768, 768)
"""the product that bf16 and fp32 are compared on: bf16 without instructions is slow at once"""
SLOW = 1.5
"""so many times as long as in fp32 is worth a warning"""
TRIES = 5
"""of each product, the first of which only warms up"""
ROWS_HINT = 64
"""rows that a packed weight is laid out for; it serves any number"""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[M, K] x, [N, K] weight and [N] bias to x weight^T + bias [M, N], without a gradient.

    Args:
        weight: may be one that :func:`packed` has laid out.
    """
    return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As :data:`Product`, without a gradient."""
    return linear(x, weight, None)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of an [N, K] weight in oneDNN's own memory order, for :func:`linear`."""
    return cast(torch.Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT))


def choose_gemm(hardware: HardwareConfig, noted: str | None = None) -> str:
    """Where linear layers on the CPU should multiply through oneDNN: ``TORCH``, ``DECODING`` or
    ``ONEDNN``.

    ``hardware.gemm=auto`` takes it for what it is exact and, measured now, faster at. In bf16 torch
    takes it itself, and what is left to gain are weights packed for decoding.

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
        return TORCH
    if fault := probe(torch.bfloat16 if hardware.precision == "bf16" else torch.float32):
        if wanted == "onednn":
            raise ConfigError(f"oneDNN can't be used for linear layers: {fault}.",
                              where="hardware.gemm", fix="set hardware.gemm=auto or default")
        log.debug("linear layers: torch's default products (%s)", fault)
        return TORCH
    if wanted == "onednn" or hardware.precision == "bf16":
        return ONEDNN
    if noted in (TORCH, DECODING, ONEDNN):
        return noted
    passes, decoding = _gains(torch.get_num_threads())
    chosen = ONEDNN if passes >= GAIN else DECODING if decoding >= GAIN else TORCH
    log.debug("linear layers: %s; oneDNN is %.2f times as fast as torch's default in forward and "
              "backward passes, %.2f times in decoding", chosen, passes, decoding)
    return chosen


@cache
def probe(dtype: torch.dtype = torch.float32) -> str | None:
    """What is wrong with oneDNN's products, in a few words; None if they are there and as exact as
    their type. In bf16 there are none where the processor has no AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 256, generator=generator).to(dtype) for rows in (48, 512))
    try:
        # the last one from operands in other memory orders, as gradients need them
        found = (product(x, weight), linear(x, packed(weight), None),
                 product(x.t().contiguous().t(), weight.t().contiguous().t()))
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"its operator fails here ({str(error).splitlines()[0]})"
    exact, most = x.double() @ weight.double().t(), EXACT[dtype]
    off = max(float((one - exact).norm() / exact.norm()) for one in found)
    return None if off < most else f"its products are off by {off:.1e}, not {most:.0e}"


@cache
def has_amx() -> bool:
    """Whether the processor multiplies tiles of bf16 numbers (Intel's AMX), as torch says."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())


def warn_of_slow_bf16() -> None:
    """Say so where a run in bf16 would take longer than one in fp32."""
    if (gain := bf16_gain()) < 1 / SLOW:
        log.warning("hardware.precision=bf16: products take %.1f times as long as in fp32 on this "
                    "processor: hardware.precision=fp32 is faster.", 1 / gain)


@cache
def bf16_gain() -> float:
    """How many times as fast torch multiplies on this CPU in bf16 as in fp32."""
    rows, inputs, outputs = BF16_SHAPE
    x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    linear = torch.nn.functional.linear
    return _seconds(linear, x, weight) / _seconds(linear, x.bfloat16(), weight.bfloat16())


@cache
def _gains(_threads: int) -> tuple[float, float]:
    """How many times as fast as torch's products oneDNN's are, with so many threads: in forward and
    backward passes, where most of a training's time goes; and in decoding."""
    passes, decoding = [0.0, 0.0], [0.0, 0.0]
    default: Product = torch.nn.functional.linear
    rows, inputs, outputs = PASS_SHAPE
    x, weight, grad = (torch.ones(size) for size in (
        (rows, inputs), (outputs, inputs), (rows, outputs)))
    for a, b in ((x, weight), (grad, weight.t()), (grad.t(), x.t())):
        for i, multiply in enumerate((default, product)):
            passes[i] += _seconds(multiply, a, b)
    for rows, inputs, outputs in DECODING_SHAPES:
        x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
        decoding[0] += _seconds(default, x, weight)
        decoding[1] += _seconds(product, x, packed(weight))
    return passes[0] / passes[1], decoding[0] / decoding[1]


def _seconds(multiply: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Processor seconds for a billion multiplications, the best of a few tries."""
    times = []
    for _ in range(TRIES):
        start = process_time()
        multiply(x, weight)
        times.append(process_time() - start)
    return min(times[1:]) / (x.shape[0] * weight.numel() / 1e9)
