"""An accelerator that isn't there, for tests: its tensors lie on the host under a device of another
name, "sim", and everything that is asked of them is seen.

An operation on tensors of both sides raises, but for copies and for host tensors without
dimensions, as on a GPU. Waits are counted, with the line of ppocli that asked for them: a wait is
what ``torch.cuda.set_sync_debug_mode`` warns of, numbers read from the device,
copies that are not said to be non-blocking, shapes that depend on data. A non-blocking copy to the
host arrives with the next wait and not before.

The device is torch's "PrivateUse1". It has to be there before a process makes its first backward
pass, and stays for as long as the process does.
"""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME = "sim"
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
            "unique_consecutive", "equal", "bincount", "repeat_interleave"}
"""operations whose result, or its shape, the host has to know"""
_COPIES = {"_to_copy", "copy_"}
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}


class MixedDevicesError(RuntimeError):
    """One operation on tensors of the host and of the device."""


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    host: torch.Tensor
    """its numbers"""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, layout=host.layout, device=torch.device(NAME, 0))
        made.host = host
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.host})"

    def __deepcopy__(self, memo: Any) -> Any:
        made = OnDevice(copy.deepcopy(self.host, memo)).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        return memo.setdefault(id(self), made)

    # torch moves modules of tensors that can be taken apart by exchanging what parameters are, so
    # that tied ones stay tied, as on a GPU
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> "OnDevice":
        return OnDevice(inner["host"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (own := _PYTHON.get(func)) is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = Simulated.current
        if device is None:
            raise RuntimeError(f"{func}: the simulated device is not open")
        return device.run(func, args, kwargs or {})


_fused = torch.nn.functional.scaled_dot_product_attention


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
               ) -> torch.Tensor:
    """In place of torch's own, which would keep a matrix of all probabilities, as kernels of GPUs
    don't."""
    if not isinstance(query, OnDevice):
        return _fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                      enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            ~attn_mask, float("-inf"))
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


_PYTHON: dict[Any, Callable[..., Any]] = {
    torch.Tensor.tolist: lambda tensor: tensor.cpu().tolist(),
    torch.Tensor.data_ptr: lambda tensor: tensor.host.data_ptr(),
    torch.Tensor.untyped_storage: lambda tensor: tensor.host.untyped_storage(),
}
"""what torch's Python methods would do with memory that isn't there"""


class _Functions(TorchFunctionMode):
    """Constructors that torch runs out of sight of dispatch modes, pinned memory, and tensors that
    are given another one's data, which torch can't see are of the same kind here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_ours(kwargs.get("device")):
            del kwargs["device"]
            return func(*args, **kwargs).to(NAME)
        if func is torch.Tensor.pin_memory:
            return _pinned(args[0].clone())
        if func is torch.Tensor.is_pinned:
            return getattr(args[0], "pinned", False)
        if func == torch.Tensor.data.__set__ and any(isinstance(x, OnDevice) for x in args):
            made = args[1].detach()
            if isinstance(args[0], torch.nn.Parameter):
                made = torch.nn.Parameter(made, args[0].requires_grad)
            return torch.utils.swap_tensors(args[0], made)
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
            return _pinned(func(*args, **kwargs))
        return func(*args, **kwargs)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.pinned = True  # type: ignore[attr-defined]
    return tensor


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


class Simulated(TorchDispatchMode):
    """The device while it is open, and what was asked of it since the last :meth:`take`."""

    current: ClassVar["Simulated | None"] = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """by what asked for them and where: ``item ppocli/...py:12``"""
        self.mixed: list[str] = []
        """operations that have raised: somebody may have caught it"""
        self._on_their_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self) -> Counter[str]:
        """The waits so far, which are counted anew from here."""
        found, self.waits = self.waits, Counter()
        return found

    def wait(self, why: str) -> None:
        """Count a wait; what was to be copied to the host is there then."""
        self.waits[f"{why} {_asked_by()}"] += 1
        for there, host in self._on_their_way:
            there.copy_(host)
        self._on_their_way = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_ours(kwargs.get("device")) or any(
                isinstance(one, OnDevice) for one in tree_leaves((args, kwargs))):
            return self.run(func, args, kwargs)
        return func(*args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation of the device, or to or from it."""
        name = func.overloadpacket.__name__
        if name in _COPIES:
            found = self._copied(name, func, args, kwargs)
            if found is not None:
                return found
        elif mixed := [tuple(one.shape) for one in tree_leaves((args, kwargs)) if one.__class__ in (
                torch.Tensor, torch.nn.Parameter) and one.dim()]:
            self.mixed.append(f"{func} in {_asked_by()}: tensors of shape {mixed} lie on the host, "
                              "others on the device")
            raise MixedDevicesError(self.mixed[-1])
        if (name in _WAITING and kwargs.get("output_size") is None) or (
                name in _BY_MASK and _by_mask(args)):
            self.wait({"_local_scalar_dense": "item"}.get(name, name))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        out = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if isinstance(out, (bool, int, float)):
            return out
        return return_and_correct_aliasing(func, args, kwargs, tree_map(
            lambda one: OnDevice(one) if isinstance(one, torch.Tensor) else one, out))

    def _copied(self, name: str, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A copy from one side to the other; None for one that stays on the device."""
        source = args[1 if name == "copy_" else 0]
        there = isinstance(args[0], OnDevice) if name == "copy_" else \
            _is_ours(kwargs.get("device", source.device))
        here = isinstance(source, OnDevice)
        if here and there:
            return None
        patient = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        host = source.host if here else source
        if not host.numel():
            return OnDevice(host.clone()) if there else host.clone()
        if there:  # what isn't pinned is copied by the host itself
            if patient or not getattr(source, "pinned", False):
                self.wait("copy to the device")
            if name == "copy_":
                args[0].host.copy_(host)
                return args[0]
            return OnDevice(func(host, **{**kwargs, "device": torch.device("cpu")}))
        found = args[0] if name == "copy_" else torch.full_like(
            host, 1, dtype=kwargs.get("dtype") or host.dtype)
        self._on_their_way.append((found, host.clone()))
        if patient or (name == "copy_" and not getattr(found, "pinned", False)):
            self.wait("copy to the host")
        return found


def _host(value: Any) -> Any:
    return value.host if isinstance(value, OnDevice) else value


def _by_mask(args: Any) -> bool:
    """Whether a tensor is indexed by truth values, which have to be counted first. A single number
    that is put into their places needn't."""
    masks = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return masks and not (len(args) > 2 and args[2].dim() == 0)


def _asked_by() -> str:
    """The innermost line of ppocli that is being run, else of whoever is."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/ppocli/" in path and not path.endswith("/parallel/backend.py"):
            return f"ppocli/{path.rpartition('/ppocli/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _set_device(device: torch.device) -> None:
    if device.index is None:  # as CUDA does
        raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")


class _Module:
    """``torch.sim``, as ``torch.cuda`` is."""

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = empty_cache = staticmethod(lambda *_: None)
    reset_peak_memory_stats = staticmethod(lambda device=None: None)
    set_device = staticmethod(_set_device)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    get_rng_state = staticmethod(lambda device=None: torch.zeros(16, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    memory_allocated = max_memory_allocated = staticmethod(lambda device=None: 2**20)
    mem_get_info = staticmethod(lambda device=None: (2**40, 2**40))
    get_device_name = staticmethod(lambda device=None: "simulated")

    @staticmethod
    def synchronize(device: Any = None) -> None:
        assert Simulated.current is not None
        Simulated.current.wait("synchronize")


def register() -> None:
    """Make the device known to torch, once for the process."""
    _setup_privateuseone_for_python_backend(NAME, _Module())


@contextmanager
def opened() -> Iterator[Simulated]:
    """The device, which a block of code computes on.

    Raises:
        AssertionError: at the end, if an operation of both sides was caught by somebody.
    """
    attention = mock.patch("torch.nn.functional.scaled_dot_product_attention", _attention)
    # which a build of torch for CUDA asks of a driver that isn't there
    recording = mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)
    with attention, recording, _Functions(), Simulated() as device:
        Simulated.current = device
        try:
            yield device
        finally:
            Simulated.current = None
    assert not device.mixed, device.mixed
