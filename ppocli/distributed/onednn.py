"""Matrix products by oneDNN on the CPU: whether this torch provides them exactly, and on which
processors linear layers use them.

In fp32 torch hands matrix products to the BLAS it was built with (MKL in the usual wheels), which
falls behind on some processors: it uses AVX-512 on Intel's alone. oneDNN, in the same wheel, is as
exact. torch reaches it for linear layers by
``torch.ops.mkldnn._linear_pointwise``, the operator that its compiler emits. Only this file calls
torch's private operators.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import cast

import torch

from ppocli.config.schema import HardwareConfig
from ppocli.errors import ConfigError
from ppocli.runs.environment import cpu_vendor

log = logging.getLogger("ppocli")

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""[M, K] and [N, K] to [M, N], the first times the second transposed; strides may be any"""

TORCH, DECODING, ONEDNN = "torch", "oneDNN in decoding", "oneDNN"
"""where linear layers use oneDNN: nowhere, in decoding only, everywhere"""
_BY_KEY = {"default": TORCH, "decoding": DECODING, "onednn": ONEDNN}
"""what ``hardware.gemm`` may name"""
EXACT = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
"""largest relative error of a product that counts as exact; bf16 itself is off by 1e-3"""
CACHED = 64
"""kernels that are kept, each for one shape of a product, of up to a megabyte; by default two
thousand"""
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""of oneDNN, and of what torch has around it"""
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


def choose_gemm(hardware: HardwareConfig, recorded: str | None = None) -> str:
    """Where linear layers on the CPU multiply through oneDNN: ``TORCH``, ``DECODING`` or
    ``ONEDNN``.

    Under ``hardware.gemm=auto`` the kind of processor decides, not a measurement: the same command
    must round the same way each time.

    Args:
        recorded: what the resumed run started with. ``auto`` keeps it, also on another processor,
            as long as that provides such products.

    Raises:
        ConfigError: ``onednn`` or ``decoding`` is set and torch has none, or not an exact one.
    """
    for name in _CACHES:  # read when oneDNN computes for the first time
        os.environ.setdefault(name, str(CACHED))
    fitting = _fitting(hardware.precision)
    kept = recorded if recorded in (TORCH, DECODING, ONEDNN) else None
    chosen = _BY_KEY.get(hardware.gemm, kept or fitting)
    if chosen != TORCH and (fault := probe(
            torch.bfloat16 if hardware.precision == "bf16" else torch.float32)):
        if hardware.gemm != "auto":
            raise ConfigError(f"oneDNN can't be used for linear layers: {fault}.",
                              where="hardware.gemm", fix="set hardware.gemm=auto or default")
        chosen = TORCH
        log.debug("linear layers: torch's default products (%s)", fault)
    if hardware.gemm == "auto" and kept == chosen != fitting:
        log.info("linear layers: %s, as when the run began; a run that begins on this processor "
                 "takes %s", chosen, fitting)
    return chosen


def _fitting(precision: str) -> str:
    """What is fastest on a processor of this kind (benchmarks/RESULTS.md). In bf16 torch uses
    oneDNN by itself; only packing weights for decoding gains more."""
    if precision == "bf16":
        return ONEDNN
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return TORCH
    return ONEDNN if cpu_vendor() == "AuthenticAMD" else DECODING


@cache
def probe(dtype: torch.dtype = torch.float32) -> str | None:
    """What is wrong with oneDNN's products, in a few words; None if they exist and are as exact as
    their type. In bf16 there are none where the processor has no AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 256, generator=generator).to(dtype) for rows in (48, 512))
    try:
        # the last one from operands in other memory orders, as gradients need them
        products = (product(x, weight), linear(x, packed(weight), None),
                    product(x.t().contiguous().t(), weight.t().contiguous().t()))
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"its operator fails here ({str(error).splitlines()[0]})"
    exact, most = x.double() @ weight.double().t(), EXACT[dtype]
    off = max(float((one - exact).norm() / exact.norm()) for one in products)
    return None if off < most else f"its products are off by {off:.1e}, not {most:.0e}"


@cache
def has_amx() -> bool:
    """Whether the processor multiplies tiles of bf16 numbers (Intel's AMX), as torch says."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())
