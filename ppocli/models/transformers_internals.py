"""The private parts of transformers that ppocli uses: the registry of attention functions, the
layers of its cache, and three building blocks. No other module touches them."""

import inspect
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from typing import Any

import torch

from ppocli.distributed.backend import to_device


def conv1d() -> Any:
    """GPT-2's linear layer, whose weight is stored as [inputs, outputs]."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def fuse_layers(lm: torch.nn.Module) -> None:
    """In one pass where the model's code makes several: GELU by its approximation with tanh, of
    which GPT-2's and others' code makes eight, and, on a GPU, RMSNorm as of Llama, of which it
    makes six, and about twice as many for its gradient."""
    from transformers.activations import FastGELUActivation, NewGELUActivation

    for module in list(lm.modules()):
        for name, child in module.named_children():
            if type(child) in (NewGELUActivation, FastGELUActivation):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.__class__ = _fused_norm(kind)


class _FusedNorm(torch.nn.Module):
    """RMSNorm through torch's function: on a CPU that makes the same numbers by the same
    operations, on a GPU from torch 2.9 on by one kernel."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the plain one's, to which half precision on a CPU, or mixed with fp32, is left: it
        would be rounded elsewhere."""
        dtype, on_cpu = hidden.dtype, hidden.device.type == "cpu"
        if self.weight.dtype != dtype or (on_cpu and dtype != torch.float32):
            plain: torch.Tensor = super().forward(hidden)
            return plain
        return torch.nn.functional.rms_norm(
            hidden, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _fused_norm(plain: Any) -> Any:
    """The kind of norm in place of ``plain``: itself, unless its code is Llama's."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    code, llamas = (inspect.unwrap(kind.forward).__code__ for kind in (plain, LlamaRMSNorm))
    if (code.co_code, code.co_names, code.co_consts) != (
            llamas.co_code, llamas.co_names, llamas.co_consts):
        return plain
    return type(plain.__name__, (_FusedNorm, plain), {})


# Attention ----------------------------------------------------------------------------------------

def attention_of(lm: Any) -> str | None:
    """The registered name of the attention that a model computes with."""
    return getattr(lm.config, "_attn_implementation", None)


def replace_sdpa(lm: Any, name: str, attention: Callable[..., Any]) -> None:
    """Make a model that would take "sdpa" take another attention function, with the same masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    settable = getattr(lm, "_can_set_attn_implementation", lambda: True)
    if attention_of(lm) != "sdpa" or not settable():
        return  # code of its own (Falcon); asked all the same, transformers warns
    if any(map(_asks_for_sdpa, {type(part) for part in lm.modules()})):
        return  # under another name DeepSeek-V3.2 and its kin would read what its indexer left out
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)
    lm.set_attn_implementation(name)


def _asks_for_sdpa(kind: Any) -> bool:
    """Whether a module does something only where attention is called "sdpa"."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "_attn_implementation" in code.co_names and any(
        one == "sdpa" or (isinstance(one, tuple) and "sdpa" in one) for one in code.co_consts)


def _mask(**words: Any) -> torch.Tensor | None:
    """transformers' own mask for "sdpa". Transformers would wait for the device in every pass to
    find out whether a mask leaves tokens out; ours always do."""
    from transformers.masking_utils import sdpa_mask

    if (mask := words.get("attention_mask")) is not None and mask.device.type != "cpu":
        words["allow_is_causal_skip"] = False
    return sdpa_mask(**words)


def sdpa_attention(*args: Any, **words: Any) -> torch.Tensor:
    """transformers' own attention function for "sdpa", [B, T, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **words)[0]


# The cache of keys and values ---------------------------------------------------------------------

def cache_name(module: Any) -> str:
    """What a model calls its cache: transformers 5.24 has renamed it, and warns of the old name."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


ROOM = 16
"""tokens that keys and values get more room for at a time"""
_ROOM = "ppocli_room"


@cache
def _roomy_layer() -> Any:
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):
        """All keys and values of a layer, with room for tokens to come: transformers' own layer
        copies all that are there for every token.

        Args:
            most: tokens that will be there at the end.
        """

        column: torch.Tensor | None = None
        """[1] where the next token goes, while the room is held (:func:`hold_room`)"""

        def __init__(self, most: int) -> None:
            super().__init__()
            self.most = most

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
                   ) -> tuple[torch.Tensor, torch.Tensor]:
            """Add [b, H, n, D] keys and values; returns all, or the whole room if it is held."""
            if self.column is not None:
                return (_put(self.keys, self.column, key_states),
                        _put(self.values, self.column, value_states))
            if not self.is_initialized:
                self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
                self.is_initialized = True
            self.keys = _extended(self.keys, key_states, self.most)
            self.values = _extended(self.values, value_states, self.most)
            return self.keys, self.values

    return RoomyLayer


def _put(held: Any, column: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The whole room of the states that are held, with new ones [b, H, 1, D] in a column."""
    room: torch.Tensor = getattr(held, _ROOM)
    return room.index_copy_(2, column, new.to(room.dtype))


def _extended(held: Any, new: torch.Tensor, most: int) -> torch.Tensor:
    """[b, H, T, D] and [b, H, n, D] states to [b, H, T + n, D], in place where there is room; in
    the type of attention's products: under autocast all would else be rounded anew each time."""
    count, end, room = held.shape[2], held.shape[2] + new.shape[2], getattr(held, _ROOM, None)
    if room is None or room.shape[2] < end:
        kind = new.device.type
        dtype = (torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind)
                 and new.dtype == torch.float32 else new.dtype)
        # rows that took others' places may go on for longer than was thought
        width = min(end + ROOM - 1, most) if end <= most else end + ROOM - 1
        room = new.new_zeros(*new.shape[:2], width, new.shape[3], dtype=dtype)
        room[:, :, :count] = held
    room[:, :, count:end] = new
    return _part_of(room, end)


def _part_of(room: torch.Tensor, end: int) -> torch.Tensor:
    out = room[:, :, :end]
    setattr(out, _ROOM, room)
    return out


def hold_room(cache: Any, width: int) -> torch.Tensor:
    """Give a cache that caches all keys room for ``width`` tokens. Until :func:`let_go_of_room`
    attention is given the whole room, whose address and shape don't change, and the next token is
    put where the returned tensor, [1], says."""
    column = to_device(torch.tensor([cached_tokens(cache)]), cache.layers[0].keys.device)
    for layer in cache.layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            room = held.new_zeros(*held.shape[:2], width, held.shape[3])
            room[:, :, :held.shape[2]] = held
            setattr(layer, name, _part_of(room, held.shape[2]))
            del held, room  # two copies of all layers are never held
        layer.column = column
    return column


def let_go_of_room(cache: Any, tokens: int) -> None:
    """The cache as it is once ``tokens`` more were put into the room that was held."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, _part_of(getattr(held, _ROOM), held.shape[2] + tokens))
        layer.column = None


def room_of(states: torch.Tensor) -> torch.Tensor | None:
    """[b, H, S, D], of which the [b, H, T, D] keys or values of a cache are the first T; finite
    numbers follow. None where there is no room, or it isn't known of."""
    return getattr(states, _ROOM, None)


def give_room(cache: Any, most: int) -> Any:
    """Transformers' cache with such layers in place of plain ones, for ``most`` tokens a row."""
    from transformers.cache_utils import DynamicLayer

    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = _roomy_layer()(most)
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = partial(_roomy_layer(), most)
    return cache


def caches_all_keys(lm: Any) -> bool:
    """Whether every layer keeps all keys and values of a row, and nothing else."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    layers = DynamicCache(config=lm.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def allows_gaps(lm: Any) -> bool:
    """Whether masked columns may stand between the tokens of a row. Attention windows, GPT-Neo's
    local layers and MPT's ALiBi count columns whatever a mask says."""
    return caches_all_keys(lm) and lm.config.model_type not in ("gpt_neo", "mpt")


def cached_tokens(cache: Any) -> int:
    """Number of cached tokens per row, padding included."""
    return cache.layers[0].keys.shape[2]


def drop_first_tokens(cache: Any, count: int) -> None:
    """Forget the leftmost keys and values."""
    for layer in cache.layers:
        if layer.keys is not None:
            layer.keys, layer.values = layer.keys[:, :, count:], layer.values[:, :, count:]


def taken_rows(cache: Any, rows: torch.Tensor) -> Any:
    """A cache with copies of the keys and values of some rows."""
    selected = copy(cache)
    selected.layers = [copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
    return selected


def append_rows(cache: Any, others: Any, width: int) -> None:
    """Append the rows of one cache to another, all padded on the left to ``width`` tokens."""
    for layer, new in zip(cache.layers, others.layers, strict=True):
        if layer.keys is None:  # this layer shares another one's
            continue
        layer.keys = torch.cat([_left_padded(layer.keys, width), _left_padded(new.keys, width)])
        new.keys = None  # two copies of all layers are never held
        layer.values = torch.cat([_left_padded(layer.values, width),
                                  _left_padded(new.values, width)])
        new.values = None


def _left_padded(states: torch.Tensor, width: int) -> torch.Tensor:
    """[b, H, T, D] to [b, H, width, D]."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
