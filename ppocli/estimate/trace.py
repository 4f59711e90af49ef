"""What one pass of a model keeps in memory, found by running it on tensors that have none.

The model's own code runs, as the engine calls it, on torch's fake tensors: shapes, types and the
autograd graph are real, no number is computed. Every storage is counted from its making to its end,
so attention kernels, gradient checkpointing, autocast and unusual architectures are as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ppocli.models.layout import SequenceBatch
from ppocli.models.policy import Policy
from ppocli.models.sampling import SamplingSpec, choose

SHALLOW, DEEP = 4, 8
"""layers that are run of a deep model; each further one adds as much as one between these"""
FULL = SHALLOW + DEEP
"""models of at most so many layers are run whole"""

_FP32_ON_CUDA = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "group_norm",
    "norm", "logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum"})
"""what CUDA's autocast computes in fp32 and the CPU's does not (torch's docs, "Autocast Op
Reference")"""


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """Bytes of one micro-batch, weights apart."""

    kept: int
    """alive between forward and backward: activations, and copies of weights in bf16"""
    forward: int
    """most that is alive beside them before; with checkpointing copies in bf16 are among it"""
    backward: int
    """most that is alive beside them later; a weight's gradient counts until it is complete"""

    @property
    def working(self) -> int:
        """Most that is alive beside what is kept."""
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class DecodingPass:
    """Bytes of one generate call, weights apart."""

    cache: int
    """keys and values of all samples at their full length"""
    working: int
    """most that is alive beside them"""


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages made inside that are alive."""

    def __init__(self, ours: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._never = {t.untyped_storage()._cdata for t in ours}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
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
def weightless(policy: Policy) -> Iterator[FakeTensorMode]:
    """``policy``, an outline on the meta device, with fake tensors in place of its own inside;
    must not be used for anything else afterwards."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made: dict[int, Any] = {}
        for module in policy.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    # the old one is kept, or another could get its id
                    made[id(parameter)] = (parameter, nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype),
                        requires_grad=parameter.requires_grad))
                module._parameters[name] = made[id(parameter)][1]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        yield mode


@contextmanager
def _computing(bf16: bool, cuda: bool) -> Iterator[None]:
    """As :meth:`ppocli.engine.backend.Backend.autocast` on the device that is meant."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16), _like(bf16, cuda):
        yield


def _like(bf16: bool, cuda: bool) -> Any:
    return _LikeCuda(bf16) if cuda else nullcontext()


@contextmanager
def _top_layers(lm: Any, count: int) -> Iterator[None]:
    """``lm`` with only its uppermost layers."""
    stack = _stack(lm)
    if stack is None or count >= len(stack[2]):
        yield
        return
    parent, name, layers = stack
    parent._modules[name] = nn.ModuleList(list(layers)[-count:])
    try:
        yield
    finally:
        parent._modules[name] = layers


def _stack(lm: Any) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The layers of a trunk, with the module that holds them and their name there."""
    depth = getattr(lm.config, "num_hidden_layers", None)
    for parent in lm.base_model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return parent, name, child
    return None


def _depths(lm: Any, keeping: int | None = None) -> tuple[list[int], int]:
    """How many layers to run, in one or two trials, and how many there are."""
    stack = _stack(lm)
    depth = len(stack[2]) if stack else 0
    if keeping is not None:
        depth = min(depth, keeping)
    return ([depth] if depth <= FULL else [SHALLOW, DEEP]), depth


def checkpoint_layers(policy: Policy, *, bf16: bool, cuda: bool) -> None:
    """Turn gradient checkpointing on, as the engine does; layers run a second time alike."""
    enable = getattr(policy.lm, "activation_checkpointing_enable", None)
    (enable or policy.lm.gradient_checkpointing_enable)({
        "use_reentrant": False, "context_fn": lambda: (nullcontext(), _like(bf16, cuda))})
    policy.train()


def training_pass(policy: Policy, *, rows: int, tokens: int, responses: int, bf16: bool,
                  cuda: bool, temperature: float, want_entropy: bool) -> TrainingPass:
    """What a micro-batch of ``rows`` samples takes, forward and backward.

    With A bytes kept by each layer, a model of L layers keeps c + A L; what comes on top is the
    head's or one layer's, whatever L is.

    Args:
        policy: inside :func:`weightless`; gradient checkpointing as it is set there.
        tokens: of the longest prompt and response together.
        responses: of these, those of the response.
    """
    lm = policy.lm
    stack = _stack(lm)
    keeping = None
    if stack is not None and not policy.training:
        # frozen layers below the trained ones keep nothing; checkpointed ones keep their input
        trained = sum(any(p.requires_grad for p in layer.parameters()) for layer in stack[2])
        keeping = trained + 1
    trials, depth = _depths(lm, keeping)
    found = []
    for layers in trials:
        with _top_layers(lm, layers):
            found.append(_train_once(policy, rows, tokens, responses, bf16, cuda, temperature,
                                     want_entropy))
    if len(found) == 1:
        return found[0]
    shallow, deep = found

    def at_depth(name: str) -> int:
        most = getattr(deep, name)
        return round(most + (most - getattr(shallow, name)) / (DEEP - SHALLOW) * (depth - DEEP))

    return TrainingPass(at_depth("kept"), max(at_depth("forward"), deep.forward),
                        max(shallow.backward, deep.backward))


def _train_once(policy: Policy, rows: int, tokens: int, responses: int, bf16: bool, cuda: bool,
                temperature: float, want_entropy: bool) -> TrainingPass:
    count = rows * responses
    batch = SequenceBatch(torch.empty(rows, max(tokens - 1, 1), dtype=torch.long),
                          torch.empty(count, dtype=torch.long),
                          torch.empty(count, dtype=torch.long))
    live = _Live(iter([*policy.parameters(), *policy.buffers()]))
    hooks = [p.register_post_accumulate_grad_hook(live.forget)
             for p in policy.parameters() if p.requires_grad]
    with live:
        with _computing(bf16, cuda):
            out = policy(batch, temperature=temperature, want_entropy=want_entropy)
            loss = out.logprobs.sum()
            if out.values is not None:
                loss = loss + out.values.sum()
            if out.entropy is not None:
                loss = loss + out.entropy.sum()
        kept, forward = live.now, live.peak
        live.peak = kept
        loss.backward()
        del out, loss
    for hook in hooks:
        hook.remove()
    for parameter in policy.parameters():
        parameter.grad = None
    return TrainingPass(kept, forward - kept, live.peak - kept)


def decoding_pass(policy: Policy, spec: SamplingSpec, *, rows: int, prompts: int, bf16: bool,
                  cuda: bool) -> DecodingPass:
    """What generating takes of ``rows`` samples.

    Args:
        policy: inside :func:`weightless`, for the last time: nothing in it is trained any more.
        prompts: tokens of the longest prompt.
    """
    lm = policy.lm
    policy.requires_grad_(False)  # autocast keeps copies of trained weights: told elsewhere
    trials, depth = _depths(lm)
    caches, working = [], 0
    for layers in trials:
        with _top_layers(lm, layers), torch.no_grad():
            # keys and values grow with the rows, one is enough; the last token is never fed
            cache, _ = _decode_once(policy, None, 1, prompts + spec.max_new_tokens - 1, bf16, cuda)
            own, peak = _decode_once(policy, spec, rows, prompts, bf16, cuda)
        caches.append(cache)
        working = max(working, peak - own)
    whole = caches[-1]
    if len(caches) == 2:
        whole = caches[1] + round((caches[1] - caches[0]) / (DEEP - SHALLOW) * (depth - DEEP))
    return DecodingPass(whole * rows, working)


def _decode_once(policy: Policy, spec: SamplingSpec | None, rows: int, tokens: int, bf16: bool,
                 cuda: bool) -> tuple[int, int]:
    """Bytes of the cache behind a prompt, and the peak on the way there."""
    from transformers import DynamicCache

    lm = policy.lm
    live = _Live(iter([*policy.parameters(), *policy.buffers()]))
    cache = DynamicCache(config=lm.config)
    with live, _computing(bf16, cuda):
        ids = torch.empty(rows, max(tokens, 1), dtype=torch.long)
        states = lm.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        hidden = states.last_hidden_state[:, -1]
        del states
        if spec is not None:
            choose(lm.get_output_embeddings()(hidden), torch.empty(rows, dtype=torch.float64), spec,
                   0, torch.empty(len(spec.stop_ids), dtype=torch.long))
            if policy.value_head is not None:
                policy.value_head(hidden)
    held = sum(t.untyped_storage().nbytes() for layer in cache.layers
               for t in (getattr(layer, "keys", None), getattr(layer, "values", None))
               if t is not None)
    return held, live.peak
