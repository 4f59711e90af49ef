"""A model that is too large for one rank: rank 0 loads it, and hands every rank its part of each
tensor, as ZeRO 3 keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.schema import TrainConfig
from ppocli.models.loading.language_model import LoadedLM
from ppocli.models.trunk import Decoding, decoding_of, set_decoding
from ppocli.parallel.backend import Backend
from ppocli.parallel.deepspeed_internals import shard


@dataclass(frozen=True, slots=True)
class _Inventory:
    """What a rank that hasn't loaded a model has to know of it."""

    parameters: list[tuple[str, torch.Size, torch.dtype]]
    """name, shape, type; tied ones once"""
    buffers: dict[str, torch.Tensor]
    generation_config: Any
    decoding: Decoding


def load_in_parts(cfg: TrainConfig, backend: Backend, load: Callable[[], LoadedLM],
                  empty: Callable[[], LoadedLM], *, offload: bool) -> LoadedLM:
    """The model that ``load`` gives, its parameters sharded over all ranks. All call it in step.

    Rank 0 alone reads the files and checks what came of them, on whole weights; then each tensor
    goes to all ranks, which keep a part each. So a job holds one whole model, in the host memory of
    rank 0, and that only until it has been handed out.

    Args:
        load: gives the model in host memory.
        empty: gives the same modules without weights (:func:`ppocli.models.loading.language_model.
            empty_lm`); called on the other ranks.
        offload: whether the parts lie in host memory.

    Raises:
        PpocliError: whatever ``load`` raised, on all ranks.
    """
    ranks = backend.ranks
    loaded: LoadedLM | None = None

    def take_stock() -> _Inventory:
        nonlocal loaded
        loaded = load()
        return _Inventory([(name, p.shape, p.dtype) for name, p in loaded.lm.named_parameters()],
                          dict(loaded.lm.named_buffers()), loaded.generation_config,
                          decoding_of(loaded.lm))

    inventory = ranks.first_does(take_stock)
    mine = ranks.all_do(lambda: empty() if loaded is None else loaded, "loading")
    if loaded is None:
        mine = replace(mine, generation_config=inventory.generation_config)
        set_decoding(mine.lm, inventory.decoding)
    _fill_buffers(mine.lm, inventory, backend.device)
    _hand_out(mine.lm, inventory, parts_config(cfg, offload=offload))
    return mine


def parts_config(cfg: TrainConfig, *, offload: bool) -> dict[str, Any]:
    """The run's DeepSpeed configuration as far as it says how parameters are kept."""
    zero = {name: value for name, value in deepspeed_config(cfg)["zero_optimization"].items()
            if value != "auto" and name not in ("offload_param", "offload_optimizer")}
    if offload:
        zero["offload_param"] = {"device": "cpu"}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


def _fill_buffers(lm: nn.Module, inventory: _Inventory, device: torch.device) -> None:
    """Buffers are small, and whole on every rank."""
    for name, value in inventory.buffers.items():
        owner, _, key = name.rpartition(".")
        lm.get_submodule(owner)._buffers[key] = value.to(device)


def _hand_out(lm: nn.Module, inventory: _Inventory, settings: dict[str, Any]) -> None:
    """Shard all parameters; rank 0's values are those of all."""
    if [name for name, _ in lm.named_parameters()] != [name for name, *_ in inventory.parameters]:
        raise RuntimeError("ranks have made different models of the same configuration")
    shard((_in_memory(lm, *one) for one in inventory.parameters), settings)


def _in_memory(lm: nn.Module, name: str, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """The parameter of that name, with room for its values, wherever it is used."""
    there = lm.get_parameter(name)
    if not there.is_meta:
        return there
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=there.requires_grad)
    for module in lm.modules():
        for key, one in module._parameters.items():
            if one is there:
                module._parameters[key] = parameter
    return parameter
