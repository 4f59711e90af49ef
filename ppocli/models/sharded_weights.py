"""Weights and optimizer state that DeepSpeed shards: gathered, read and written by parameter name,
so that a checkpoint doesn't depend on the ZeRO stage or the number of ranks. Under ZeRO 3 rank 0
alone loads a model and distributes the partitions; references are sharded too."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.schema import TrainConfig
from ppocli.distributed import deepspeed_internals as internals
from ppocli.distributed.backend import Backend
from ppocli.distributed.deepspeed_internals import shard
from ppocli.distributed.ranks import Ranks
from ppocli.models import trunk
from ppocli.models.loading.language_model import LoadedLM, frozen_dtype
from ppocli.models.policy import Policy


def gathered(module: nn.Module, stage: int, *, modify: bool = False) -> Any:
    """Context in which every parameter of ``module`` is whole, on every rank; nothing to do below
    ZeRO 3.

    Args:
        modify: keep what is written to the parameters inside (the same on all ranks).
    """
    return nullcontext() if stage < 3 else _whole(list(module.parameters()), modify)


def _whole(parameters: list[Any], modify: bool = False) -> Any:
    from deepspeed import zero

    internals.put_back(parameters)
    return zero.GatheredParameters(parameters, modifier_rank=0 if modify else None)


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's passes gather its weights, so that all ranks make them in step."""
    return any(map(internals.is_sharded, module.parameters()))


@contextmanager
def held(parameters: list[Any]) -> Iterator[None]:
    """Gather these sharded parameters on every rank for the block, and keep them gathered after the
    forward pass of a layer that uses them, where DeepSpeed would release them."""
    with _whole(parameters), internals.marked_in_use(parameters):
        yield


def one_gathered(tensor: torch.Tensor, *, modify: bool = False) -> Any:
    """Context in which a tensor that may be a sharded parameter is whole, on every rank.

    Args:
        modify: as of :func:`gathered`.
    """
    if not internals.is_sharded(tensor):
        return nullcontext()
    internals.put_back([tensor])
    if internals.is_whole(tensor):  # held
        return nullcontext()
    return _whole([tensor], modify)


def host_weights(module: nn.Module, stage: int, *, keep: bool) -> dict[str, torch.Tensor] | None:
    """The state dict of a module that is sharded by ZeRO 3, in host memory; None below that stage.
    Tensors are gathered one at a time, on all ranks in step, so that only the rank with ``keep``
    holds the whole model. Tied tensors are stored once."""
    if stage < 3:
        return None
    weights: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            with one_gathered(tensor):
                seen[id(tensor)] = tensor.detach().cpu().clone() if keep else torch.empty(0)
        weights[name] = seen[id(tensor)]
    return weights if keep else {}


def head_parameters(lm: Any) -> list[Any]:
    """Parameters of the output embedding, which is read outside its forward pass."""
    return list(lm.get_output_embeddings().parameters())


def adopt_weights(policy: nn.Module, stage: int) -> None:
    """Copy weights that were just loaded into the policy to DeepSpeed's optimizer, which steps on
    its own copy."""
    if stage == 0:
        return
    for parameter in policy.parameters():
        if parameter.requires_grad:
            with one_gathered(parameter):
                whole = parameter.detach().clone()
            internals.set_whole(parameter, whole, None, stage)


@contextmanager
def gathered_policy(policy: Policy) -> Iterator[Policy]:
    """A second module over the same, whole, weights of a policy that is sharded by ZeRO 3.

    The hooks on the original release each layer's weights behind its forward pass; the copy has
    none, so that decoding gathers once and not at every token. It holds no weights of its own, and
    computes as the original does: a KL of the same weights has to be 0, to the last bit.
    """
    with gathered(policy, 3):
        parameters = {id(p): nn.Parameter(p.data, requires_grad=False) for p in policy.parameters()}
        lm, head = (None if module is None else trunk.without_hooks(module, parameters)
                    for module in (policy.lm, policy.value_head))
        try:
            # the value function's trunk stays as it is: nothing decodes with it
            yield Policy(lm, cast(Any, head), policy.value_trunk).eval()
        finally:
            for copied in parameters.values():  # modules refer to each other, and so are freed late
                copied.data = copied.data.new_empty(0)


def optimizer_slots(parameters: dict[str, nn.Parameter], optimizer: Any, stage: int, ranks: Ranks
                    ) -> dict[str, torch.Tensor]:
    """This rank's share of the optimizer state: whole tensors by ``NAME/slot``; without ZeRO, the
    optimizer's own tensors.

    Each tensor goes to the rank with the fewest elements so far. Under ZeRO all ranks gather it in
    step and one keeps it on the CPU, so that no rank holds more than its share and one tensor.
    """
    state: dict[str, torch.Tensor] = {}
    slots, elements = _slots(optimizer, stage), [0] * ranks.world
    for name, parameter in parameters.items():
        for slot in slots:
            if (value := _read_slot(parameter, slot, optimizer, stage)) is None:
                continue
            owner = elements.index(min(elements))
            elements[owner] += value.numel()
            if owner == ranks.rank:
                state[f"{name}/{slot}"] = value.detach() if stage == 0 else \
                    value.detach().cpu().contiguous().clone()
    return state


def _slots(optimizer: Any, stage: int) -> list[str]:
    """Names of the optimizer's state for a parameter; none before its first step."""
    if stage > 0:
        internals.link_state(optimizer, stage)
    inner = optimizer.optimizer if stage > 0 else optimizer
    # sorted: a loaded optimizer may have them in another order
    return sorted({slot for state in inner.state.values()
                   for slot, value in state.items() if value is not None})


def _read_slot(parameter: nn.Parameter, slot: str, optimizer: Any, stage: int
               ) -> torch.Tensor | None:
    if stage == 0:
        value = optimizer.state.get(parameter, {}).get(slot)
        return None if value is None else torch.as_tensor(value)
    kept = [state[slot] for state in optimizer.optimizer.state.values() if slot in state]
    if torch.as_tensor(kept[0]).dim() == 0:  # counts of steps are the same everywhere
        return torch.as_tensor(kept[0])
    from deepspeed.utils import safe_get_full_optimizer_state

    return safe_get_full_optimizer_state(parameter, slot).reshape(internals.whole_shape(parameter))


def fill_optimizer(parameters: dict[str, nn.Parameter], optimizer: Any, stage: int,
                   saved: dict[str, dict[str, Callable[[], torch.Tensor]]]) -> None:
    """Restore the optimizer's state from what :func:`optimizer_slots` read on all ranks.

    Args:
        saved: parameter name -> slot -> a function that reads the whole tensor.
    """
    if stage == 0:
        for name, slots in saved.items():
            parameter = parameters[name]
            optimizer.state[parameter] = {slot: _placed(read(), slot, optimizer, parameter)
                                          for slot, read in slots.items()}
        return
    if not saved:
        return
    _make_state(optimizer, stage, next(iter(saved.values())))
    internals.link_state(optimizer, stage)
    for name, slots in saved.items():
        for slot, read in slots.items():
            if (value := read()).dim() > 0:
                internals.set_whole(parameters[name], value, slot, stage)


def slot_fits(slot: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a saved tensor of optimizer state can belong to a parameter of shape ``whole``."""
    if slot == "row_var":  # of Adafactor
        return shape == (*whole[:-1], 1)
    if slot == "col_var":
        return shape == (*whole[:-2], 1, *whole[-1:])
    if slot.startswith("qmap"):  # of bitsandbytes
        return len(shape) == 1
    if slot.startswith("absmax"):
        return shape == (-(-math.prod(whole) // 256),)
    return shape in ((), whole)


def _placed(value: torch.Tensor, slot: str, optimizer: Any, parameter: nn.Parameter) -> Any:
    """A saved slot as the optimizer itself keeps it."""
    if slot == "step" and not value.is_floating_point():
        return int(value)  # bitsandbytes counts in Python
    fused = any(group.get("fused") for group in optimizer.param_groups)
    # others read the count of steps on the host
    return value if slot == "step" and not fused else value.to(parameter.device)


def _make_state(optimizer: Any, stage: int, slots: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Zeroed state for DeepSpeed's flat partitions, as the optimizer's first step would make it."""
    for flat in internals.flat_tensors(optimizer, stage):
        optimizer.optimizer.state[flat] = {
            slot: torch.zeros_like(flat) if (value := read()).dim() > 0 else value.clone()
            for slot, read in slots.items()}


# Models in parts ----------------------------------------------------------------------------------

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
    split: trunk.SplitPoint | None = None

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        with held(head_parameters(self.lm)):
            yield self.lm


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
