"""The private parts of DeepSpeed that ppocli uses: how ZeRO 3 marks a sharded parameter, where it
keeps a rank's partition, and the flat tensors that its optimizers step on. No other module touches
them."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

_USER = -1
"""our number among the modules that use a parameter; DeepSpeed's own start at 0"""


def silence_deprecations() -> None:
    """DeepSpeed calls torch by deprecated names, dozens of times in each step."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def skip_compiled_kernel() -> None:
    """Keep DeepSpeed from compiling a CPU kernel that only its inference uses. Compiling takes a
    minute, and fails where there is no C++ compiler."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# Sharded parameters -------------------------------------------------------------------------------

def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ZeRO 3 partitions a tensor, even if it is gathered at the moment."""
    return hasattr(tensor, "ds_id")


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape a tensor has when it isn't sharded."""
    return cast(torch.Size, getattr(tensor, "ds_shape", tensor.shape))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's partition of a tensor; the tensor itself if it isn't sharded."""
    return cast(torch.Tensor, getattr(tensor, "ds_tensor", tensor))


def is_whole(parameter: Any) -> bool:
    """Whether a sharded parameter is gathered at the moment."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return getattr(parameter, "ds_status", None) == ZeroParamStatus.AVAILABLE


def put_back(parameters: Iterable[Any]) -> None:
    """Partition gathered parameters again. Small ones, which DeepSpeed leaves gathered after a
    pass, may be rounded to the type that it computes in."""
    for parameter in parameters:
        if is_whole(parameter) and not parameter.ds_active_sub_modules:
            parameter.partition()


@contextmanager
def marked_in_use(parameters: list[Any]) -> Iterator[None]:
    """Keep gathered parameters gathered after the forward pass of a layer that uses them, where
    DeepSpeed would release them."""
    try:
        for parameter in parameters:
            parameter.ds_active_sub_modules.add(_USER)
        yield
    finally:
        for parameter in parameters:
            parameter.ds_active_sub_modules.discard(_USER)


def shard(parameters: Iterable[nn.Parameter], settings: Mapping[str, Any]) -> None:
    """Partition parameters over the ranks, one after the other, with rank 0's values."""
    from deepspeed import zero

    rest = iter(parameters)
    first: Any = next(rest)
    zero.Init(module=nn.ParameterList([first]), config_dict_or_path=dict(settings))
    for parameter in rest:
        first.convert_to_zero_parameters(param_list=[parameter])


# Optimizers ---------------------------------------------------------------------------------------

def set_whole(parameter: Any, whole: torch.Tensor, slot: str | None, stage: int) -> None:
    """Put a whole tensor in place of the optimizer's copy of a parameter, or of a slot of its
    state."""
    from deepspeed import utils

    set_weight, set_state = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
    if stage == 3:
        # DeepSpeed's own setters for whole tensors fail on those that don't divide by the ranks
        set_weight, set_state = (utils.safe_set_local_fp32_param,
                                 utils.safe_set_local_optimizer_state)
        size, rank = parameter.partition_numel(), torch.distributed.get_rank()
        room = size * torch.distributed.get_world_size() - whole.numel()
        whole = nn.functional.pad(whole.flatten(), (0, room)).narrow(0, size * rank, size)
    if slot is None:
        set_weight(parameter, whole)
    else:
        set_state(parameter, whole, slot)


def flat_tensors(optimizer: Any, stage: int) -> list[torch.Tensor]:
    """The flat tensors that the optimizer inside DeepSpeed's steps on and keeps state for."""
    return cast(list[torch.Tensor], optimizer.fp32_partitioned_groups_flat if stage == 3
                else optimizer.single_partition_of_fp32_groups)


def link_state(optimizer: Any, stage: int) -> None:
    """ZeRO 1 and 2 link parameters to optimizer state when they are built, before there is any."""
    if stage == 3:
        return
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for group, flat in zip(optimizer.bit16_groups, flat_tensors(optimizer, stage), strict=True):
        if optimizer.optimizer.state.get(flat):
            lazy_init_hp_params_optimizer_state(group, flat, optimizer.optimizer.state)
