"""What lives meanwhile: storages counted from their making to their end, and operations that keep
what they would keep on CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_FP32_ON_CUDA = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "group_norm",
    "norm", "logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum"})
"""what CUDA's autocast computes in fp32 and the CPU's does not (torch's docs, "Autocast Op
Reference")"""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside that are alive."""

    def __init__(self, ours: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._never = {t.untyped_storage()._cdata for t in ours}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.logsumexp.default:  # which makes one more of its input inside
            self.peak = max(self.peak, self.now + args[0].nbytes)
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self.hold(value)
        return out

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._sizes or number in self._never:
            return
        self._sizes[number] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, number)

    def drop(self, number: int) -> None:
        """Count a storage no longer."""
        self.now -= self._sizes.pop(number, 0)

    def forget(self, parameter: torch.Tensor) -> None:
        """A gradient is complete: what gradients take is told elsewhere."""
        if parameter.grad is not None:
            self.drop(parameter.grad.untyped_storage()._cdata)


class _LikeCuda(TorchFunctionMode):
    """Lets operations on fake CPU tensors keep what they would keep on CUDA.

    Fake CUDA tensors need a torch built for CUDA, and a laptop has none.
    """

    def __init__(self, bf16: bool) -> None:
        super().__init__()
        self._bf16 = bf16

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._bf16 and name in _FP32_ON_CUDA:
            args = tree_map(_in_fp32, args)
        elif not self._bf16 and name == "scaled_dot_product_attention" and kwargs.get("enable_gqa"):
            return _plain_attention(*args, **kwargs)  # no fused kernel of CUDA shares heads in fp32
        return func(*args, **kwargs)


def _in_fp32(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if half else value


def _plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
                     scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """Shapes of torch's math kernel, which keeps the [b, heads, T, T] probabilities."""
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    weights = torch.softmax((query * 1.0) @ (key * 1.0).transpose(-2, -1), -1)
    return weights @ value


@contextmanager
def computing(bf16: bool, cuda: bool) -> Iterator[None]:
    """As :meth:`ppocli.parallel.backend.Backend.autocast` on the device that is meant."""
    with (torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16), like_device(bf16, cuda),
          _one_sequence_a_row()):
        yield


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """transformers looks at positions for several sequences in a row. Where they have no numbers it
    makes a mask for that, [b, T, T], which no pass of ours has."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    find = getattr(masking_utils, name)
    setattr(masking_utils, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, find)


def like_device(bf16: bool, cuda: bool) -> AbstractContextManager[Any]:
    """Operations keep meanwhile what they keep on the device that is meant."""
    return _LikeCuda(bf16) if cuda else nullcontext()
