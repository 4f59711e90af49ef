"""Faster ways of computing attention and linear layers, which change a model's numbers by rounding
only. Attention: transformers' own ("sdpa"), packed rows, and on a CPU plain products for short
sequences. Linear layers on a CPU: oneDNN (:mod:`ppocli.distributed.onednn`), with gradients, and
with weights laid out in its own order for decoding.

torch's attention kernel for CPUs works through long sequences without keeping [T, T] probabilities;
for short ones, and in bf16, two products and a softmax that keeps them are faster
(benchmarks/RESULTS.md). On a GPU they are for a single query with a mask, which torch's fastest
kernels don't take.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ppocli.distributed import onednn
from ppocli.distributed.onednn import Product, has_amx
from ppocli.models import layout, transformers_internals, trunk
from ppocli.models.transformers_internals import conv1d

NAME = "ppocli"
SHORT = {torch.float32: 128, torch.bfloat16: 256}
"""most keys for which plain products are taken on a CPU"""
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""most difference of packed and padded states, in standard deviations"""
HIDDEN = torch.finfo(torch.bfloat16).min
"""added to the scores of keys that a query must not see: finite, also where autocast rounds it"""
_BEYOND = ("position_bias", "cache", "softcap", "s_aux")
"""arguments that only transformers' own functions understand"""


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, dropout: float = 0.0,
              scaling: float | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """What transformers asks of an attention function: [B, T, H, D], and no weights, of queries [B,
    H, T, D], keys and values [B, G, S, D] with G dividing H. The mask is bool (true: attend) or
    added to the scores, [B or 1, 1, T, S]; None: causal for several queries; or a packing's."""
    packing = getattr(attention_mask, layout.PACKING, None)
    if hasattr(attention_mask, layout.PACKING):
        attention_mask = None
    plain = not dropout and set(map(kwargs.get, _BEYOND)) == {None}
    if packing is not None:
        if plain and query.device.type == "cuda" and (
                out := _over_packed(query, key, value, packing, scaling)) is not None:
            return out, None
        query, key, value = map(partial(layout.to_grid, packing=packing), (query, key, value))
    if plain and _is_short(query, key, attention_mask):
        if (causal := kwargs.get("is_causal")) is None:
            causal = getattr(module, "is_causal", True)
        out = _by_products(query, key, value, attention_mask, scaling,
                           bool(causal) and attention_mask is None and query.shape[2] > 1)
    else:
        out = transformers_internals.sdpa_attention(module, query, key, value, attention_mask,
                                                    dropout=dropout, scaling=scaling, **kwargs)
    return (out if packing is None else layout.to_pack(out, packing)), None


def _over_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 packing: layout.Packing, scaling: float | None) -> torch.Tensor | None:
    """Attention over packed rows as they lie there on a GPU, [1, H, N, D] to [1, N, H, D]; None
    where there is no kernel for them."""
    depth, autocast = query.shape[-1], torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else query.dtype
    if (dtype.itemsize != 2 or depth % 8 or depth > 256
            or value.shape[-1] != depth or (varlen := _varlen(query.device.index)) is None):
        return None
    # not by an index, whose gradient would be copied into zeros
    heads = (one.squeeze(0).transpose(0, 1).to(dtype) for one in (query, key, value))
    longest = max(packing.width, layout.MULTIPLE)
    out: torch.Tensor = varlen(*heads, packing.ends, packing.ends, longest, longest,
                               scale=scaling, window_size=(-1, 0))
    return out[None]


@cache
def _varlen(device: int) -> Any:
    """torch's FlashAttention (arXiv:2307.08691) over packed rows; None before torch 2.11."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    if "window_size" not in names or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in names else varlen_attn


def _is_short(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether plain products serve, and are faster."""
    queries, keys, on_cpu = query.shape[2], key.shape[2], query.device.type == "cpu"
    if mask is None:  # which keys other numbers of queries see is a matter of conventions
        serves = on_cpu and queries in (1, keys)
    else:
        serves = (on_cpu or queries == 1) and mask.shape[1] == 1 and mask.shape[-1] == keys
    if not (serves and on_cpu):
        return serves
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    if queries == 1:  # of which torch's kernel makes more where there are tiles for bf16
        return kind != torch.bfloat16 or not has_amx()
    return keys <= SHORT.get(kind, 0)


def _by_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 mask: torch.Tensor | None, scaling: float | None, causal: bool) -> torch.Tensor:
    """softmax(q k^T scaling + mask) v, the query heads of a group side by side."""
    rows, heads, queries, depth = query.shape
    room = transformers_internals.room_of(key) if queries == 1 else None
    if room is not None and (values_room := transformers_internals.room_of(value)) is not None:
        # products of a part of each head's keys would copy them first, and take longer than those
        # of all, which have the same shape for a number of tokens
        count, width = key.shape[2], room.shape[2]
        mask = (torch.arange(width) < count).view(1, 1, 1, width) if mask is None else (
            torch.nn.functional.pad(mask, (0, width - count),
                                    value=HIDDEN if mask.is_floating_point() else False))
        key, value = room, values_room
    groups, keys = key.shape[1], key.shape[2]
    share = heads // groups
    flat = query.reshape(rows * groups, share * queries, depth)
    scores = torch.baddbmm(_bias(mask, causal, query, groups, share, keys), flat,
                           key.reshape(rows * groups, keys, depth).transpose(1, 2),
                           alpha=depth**-0.5 if scaling is None else scaling)
    weights = torch.softmax(scores, -1)
    if weights.device.type != "cpu":  # where autocast makes them fp32
        weights = weights.to(value.dtype)
    out = torch.bmm(weights, value.reshape(rows * groups, keys, value.shape[3]).to(weights.dtype))
    return out.view(rows, heads, queries, -1).transpose(1, 2).contiguous()


def _bias(mask: torch.Tensor | None, causal: bool, query: torch.Tensor, groups: int, share: int,
          keys: int) -> torch.Tensor:
    """What is added to the scores; broadcasts to [B * G, H / G * T, S]. A query of padding may see
    no key at all, so what hides a key is finite."""
    rows, _, queries, _ = query.shape
    if mask is None:
        if not causal:
            return query.new_zeros(1, 1, 1)
        return torch.full((queries, keys), HIDDEN, dtype=query.dtype).triu_(1).repeat(
            share, 1)[None]
    if mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill_(~mask, HIDDEN)
    else:  # which may hide keys by -inf, or by a number that rounds to it
        mask = mask.to(query.dtype).clamp(min=HIDDEN)
    mask = mask.expand(rows, groups, queries, keys).reshape(rows * groups, queries, keys)
    return mask.repeat(1, share, 1) if share > 1 else mask


def use_kernels(lm: Any) -> None:
    """Make a model that has just been loaded take this project's attention, and activations and
    norms in one pass where it would make them out of several."""
    if not trunk.has_encoder(lm):
        transformers_internals.replace_sdpa(lm, NAME, attention)
    transformers_internals.fuse_layers(lm)


@torch.no_grad()
def takes_packed(lm: Any) -> bool:
    """Whether a model gives packed rows the states that it gives padded ones; found out by trying.

    Not with an encoder, windows of attention, an attention of its own, or states
    that run on from token to token. Windows are wider than what is tried, but they forget keys.
    """
    if (trunk.has_encoder(lm) or transformers_internals.attention_of(lm) != NAME
            or "position_ids" not in inspect.signature(lm.base_model.forward).parameters):
        return False
    device = lm.get_input_embeddings().weight.device
    lengths, none = torch.tensor([3, 5, 2]), torch.zeros(3, 1, dtype=torch.bool)
    inside = torch.arange(5)[None, :] < lengths[:, None]
    samples = layout.Sequences(torch.arange(15).reshape(3, 5) % 11, 1 + lengths, none.long(), none)
    try:
        if not transformers_internals.caches_all_keys(lm):
            return False
        packed, plain = (layout.lay_out(samples, pack=pack).to(device) for pack in (True, False))
        expected = trunk.trunk_states(lm, plain)[inside.to(device)]
        states = trunk.trunk_states(lm, packed)[0, :len(expected)]
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
        return False
    if expected.shape != states.shape:
        return False
    off = (expected.float() - states.float()).abs().max() / expected.float().std().clamp(min=1e-6)
    lm.ppocli_packs = bool(off < CLOSE.get(expected.dtype, 0.0))
    return lm.ppocli_packs


# Linear layers ------------------------------------------------------------------------------------

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
    in_place, other = (grad, x) if in_order else (x, grad)
    first = (in_place if in_place.numel() <= other.numel() + grad.shape[1] * x.shape[1]
             else other)
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


@contextmanager
def packed_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Passes in ``dtype`` without gradients meanwhile take routed weights from a copy in oneDNN's
    own order, which products of few rows, as in decoding, gain most from. It holds the weights a
    second time; of a model where that would be more than ``PACKED_BYTES`` none is made."""
    layers, size = list[Any](), 0
    for part in module.modules():
        # weights in fewer bits compute in ``dtype`` only where autocast is on
        if isinstance(part, _Routed) and part.weight.dtype in (torch.float32, dtype) and (
                part.weight.device.type == "cpu"):
            layers.append(part)
            size += part.weight.numel() * dtype.itemsize
    layers = layers if size <= PACKED_BYTES else []
    try:
        for layer in layers:
            # in one expression: a name would hold the last layer's, the largest, meanwhile
            layer.packed = onednn.packed(layer.rows().detach().to(dtype))
        yield
    finally:
        for layer in layers:
            layer.packed = None
