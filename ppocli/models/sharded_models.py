"""Models that ZeRO 3 shards over the ranks: rank 0 alone loads them and distributes the partitions;
and sharded references."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.schema import TrainConfig
from ppocli.distributed.backend import Backend
from ppocli.distributed.deepspeed_internals import local_part, shard
from ppocli.models import layer_stack, sharded_weights, trunk
from ppocli.models.loading.language_model import LoadedLM, frozen_dtype

_Inventory = tuple[list[tuple[str, torch.Size, torch.dtype]], dict[str, torch.Tensor], Any,
                   trunk.Decoding]
"""what a rank needs to know of a model that it hasn't loaded: name, shape and type of its
parameters, tied ones once; its buffers; its generation config; how it is decoded"""


def load_in_parts(cfg: TrainConfig, backend: Backend, load: Callable[[], LoadedLM],
                  empty: Callable[[], LoadedLM], *, offload: bool) -> LoadedLM:
    """The model that ``load`` returns, its parameters sharded over all ranks. All ranks call this
    in step.

    Rank 0 alone reads the files and checks the whole weights; then it sends each tensor to all
    ranks, which keep one partition each. So a job holds only one whole model, in the host memory of
    rank 0, until it is distributed.

    Args:
        load: returns the model in host memory.
        empty: returns the same modules without weights, on the other ranks
            (:func:`ppocli.models.loading.language_model.empty_lm`).
        offload: whether the partitions stay in host memory.

    Raises:
        PpocliError: whatever ``load`` raised, on all ranks.
    """
    ranks = backend.ranks
    loaded: LoadedLM | None = None

    def take_stock() -> _Inventory:
        nonlocal loaded
        loaded = load()
        return ([(name, p.shape, p.dtype) for name, p in loaded.lm.named_parameters()],
                dict(loaded.lm.named_buffers()), loaded.generation_config,
                trunk.decoding_of(loaded.lm))

    parameters, buffers, generation_config, decoding = ranks.first_does(take_stock)
    model = ranks.all_do(lambda: empty() if loaded is None else loaded, "loading")
    if loaded is None:
        model = replace(model, generation_config=generation_config)
        trunk.set_decoding(model.lm, decoding)
    if [name for name, _ in model.lm.named_parameters()] != [name for name, *_ in parameters]:
        raise RuntimeError("ranks have made different models of the same configuration")
    for name, value in buffers.items():  # small, and whole on every rank
        owner, _, key = name.rpartition(".")
        model.lm.get_submodule(owner)._buffers[key] = value.to(backend.device)
    shard((_in_memory(model.lm, *one) for one in parameters), parts_config(cfg, offload=offload))
    return model


def parts_config(cfg: TrainConfig, *, offload: bool) -> dict[str, Any]:
    """The part of the run's DeepSpeed configuration that says how parameters are kept."""
    zero = {name: value for name, value in deepspeed_config(cfg)["zero_optimization"].items()
            if value != "auto" and name not in ("offload_param", "offload_optimizer")}
    if offload:
        zero["offload_param"] = {"device": "cpu"}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


def _in_memory(lm: nn.Module, name: str, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """The parameter of that name, allocated and put into every module that uses it."""
    placeholder = lm.get_parameter(name)
    if not placeholder.is_meta:
        return placeholder
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype),
                             requires_grad=placeholder.requires_grad)
    for module in lm.modules():
        for key, one in module._parameters.items():
            if one is placeholder:
                module._parameters[key] = parameter
    return parameter


@dataclass(frozen=True, slots=True)
class ShardedCopy:
    """A separate sharded model. Its passes gather weights layer by layer, so all ranks make them in
    step."""

    lm: Any
    engine: Any
    """DeepSpeed's, over the model's trunk"""
    split: layer_stack.SplitPoint | None = None

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        with sharded_weights.held(sharded_weights.head_parameters(self.lm)):
            yield self.lm


@dataclass(frozen=True, slots=True)
class ShardedTrunk:
    """The policy's frozen trunk, with this rank's original partitions of the tensors that train."""

    parts: dict[str, torch.Tensor]
    """by their names in the causal LM"""
    split: layer_stack.SplitPoint | None
    """as of :class:`ppocli.models.policy.SharedReference`"""

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`, for a policy whose weights are gathered or sharded."""
        parameters = dict(policy_lm.named_parameters())
        if sharded_weights.is_sharded(policy_lm):
            trained = {name: parameters[name] for name in self.parts}
            with sharded_weights.swapped_parts(trained, self.parts):
                yield policy_lm
            return
        whole = {name: sharded_weights.whole_of(part, parameters[name].shape,
                                                parameters[name].device)
                 for name, part in self.parts.items()}
        with layer_stack.swapped_tensors(policy_lm, whole):
            yield policy_lm


def sharded_copy(cfg: TrainConfig, lm: Any) -> ShardedCopy:
    """A reference from a model that is sharded already, by DeepSpeed's engine for inference as
    TRL's ``prepare_deepspeed`` uses it."""
    import deepspeed

    settings = parts_config(cfg, offload=cfg.model.reference.offload)
    settings["bf16"] = {"enabled": frozen_dtype(cfg.model, cfg.hardware) == torch.bfloat16}
    # around the trunk, through which passes go: its start tells DeepSpeed of a new pass
    engine, *_ = deepspeed.initialize(model=lm.base_model, config=settings)
    lm.eval()
    return ShardedCopy(lm, engine)


def share_sharded_trunk(lm: Any, *, offload: bool) -> ShardedTrunk:
    """As :func:`ppocli.models.policy.share_trunk`, of a sharded policy that is prepared for
    training and hasn't been trained yet.

    Raises:
        ValueError: as there.
    """
    split = layer_stack.trained_split(lm)
    local_parts = {name: local_part(p).detach() for name, p in lm.named_parameters()
                   if p.requires_grad}
    return ShardedTrunk({name: part.to("cpu" if offload else part.device, copy=True)
                         for name, part in local_parts.items()}, split)
