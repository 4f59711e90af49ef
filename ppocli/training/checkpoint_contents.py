"""What a checkpoint of one process holds: gathered from a session, copied, written.

The same function writes the tensors that train and copies of them, so that the files are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from ppocli.estimate.parts import pinned_bytes
from ppocli.parallel.ranks import Ranks
from ppocli.storage.atomic import TEMPORARY_PREFIX, walk_files
from ppocli.storage.model_files import POLICY
from ppocli.training import random_state as generators
from ppocli.training.optimizers import named_trainable
from ppocli.training.random_state import Generators
from ppocli.training.saved_model import SavedModel, Tensors
from ppocli.training.task import Task
from ppocli.zero.sharded_weights import optimizer_slots

OPTIMIZER = "optimizer.safetensors"
TASK_STATE = "task_state.safetensors"


@dataclass(frozen=True, slots=True)
class Contents:
    """Tensors by name, and what else goes with them."""

    policy: Tensors
    """the state dict of the policy's model, or its adapter's tensors as PEFT names them"""
    modules: dict[str, Tensors]
    """file name -> state dict of what else is trained"""
    slots: Tensors
    """optimizer state by ``NAME/slot``"""
    generators: Generators
    task: Tensors
    """the task's own; never changed in place"""
    frozen: frozenset[int]
    """addresses of weights that don't train: a copy can share them"""
    described: dict[str, bytes] | None = None
    """the small files of ``policy/`` by name; None: as the model is described when it is
    written"""

    @property
    def groups(self) -> dict[str, Tensors]:
        """All tensors, by what they belong to."""
        return {POLICY: self.policy, OPTIMIZER: self.slots, **self.modules}


def contents_of(task: Task, state: Generators, tensors: Mapping[str, torch.Tensor]) -> Contents:
    """The tensors that train, as they are: what is made of them must be done before they change.

    Args:
        task: of one process that shards nothing.
        state: of the global generators when the training state was committed.
        tensors: :attr:`~ppocli.training.state.TrainState.tensors`.
    """
    trained = task.trained
    return Contents(
        policy=task.saved.tensors(),
        modules={name: module.state_dict() for name, module in module_files(task).items()},
        slots=optimizer_slots(named_trainable(trained.module), trained.optimizer, 0, Ranks()),
        generators=state, task=dict(tensors),
        frozen=frozenset(p.data_ptr() for p in trained.module.parameters() if not p.requires_grad))


def module_files(task: Task) -> dict[str, torch.nn.Module]:
    """File name -> what trains beside the model itself."""
    return {f"{name}.safetensors": module for name, module in
            {**task.modules(), **task.saved.prompt_encoders()}.items()}


def write_contents(saved: SavedModel, contents: Contents, folder: Path) -> None:
    """Put all of it into ``folder``; safetensors and JSON only.

    Of ``saved`` what never changes is read: of a copy this can be done while it trains.
    """
    saved.write_weights(folder / POLICY, contents.policy)
    if contents.described is None:
        saved.describe(folder / POLICY)
    else:
        for name, raw in contents.described.items():
            path = folder / POLICY / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(raw)
    for name, tensors in contents.modules.items():
        save_tensors(tensors, folder / name)
    save_tensors(contents.slots, folder / OPTIMIZER)
    write_task_state(contents.task, folder)
    generators.write(contents.generators, folder)


def write_task_state(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """The task's own tensors; no file without any."""
    if tensors:
        save_tensors(tensors, folder / TASK_STATE)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors of any device; those that share memory are written once each."""
    plain: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    save_file(plain, path)


class HostCopies:
    """Host memory that tensors are copied to, kept for the next copy: to get and touch it takes
    longer than to fill it. Copies of tensors on a GPU are in pinned memory."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def held(self) -> bool:
        """Whether there is any yet."""
        return bool(self._held)

    def release(self) -> None:
        """Give it back."""
        self._held.clear()

    def copy(self, saved: SavedModel, contents: Contents, scratch: Path) -> Contents:
        """The contents as they are now, of which nothing changes any more until the next call.

        Args:
            scratch: a folder in which small files can be put for a moment.

        Raises:
            OSError: they can't.
            RuntimeError: there is no memory.
        """
        with TemporaryDirectory(dir=scratch, prefix=TEMPORARY_PREFIX) as place:
            saved.describe(Path(place))
            described = {name: Path(place, name).read_bytes() for name in walk_files(Path(place))}
        groups = {group: self._copied(group, tensors, contents.frozen)
                  for group, tensors in contents.groups.items()}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return replace(contents, policy=groups.pop(POLICY), slots=groups.pop(OPTIMIZER),
                       modules=groups, described=described)

    def _copied(self, group: str, tensors: Tensors, frozen: frozenset[int]) -> Tensors:
        """Copies, of what is tied one, as transformers expects of tied weights."""
        found: Tensors = {}
        made: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, tensor in tensors.items():
            if (same := _identity(tensor)) not in made:
                made[same] = self._copy_of((group, name), tensor, tensor.data_ptr() in frozen)
            found[name] = made[same]
        return found

    def _copy_of(self, key: tuple[str, str], tensor: torch.Tensor, frozen: bool) -> torch.Tensor:
        if frozen and not tensor.is_cuda:
            return tensor
        held = self._held.get(key)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held if frozen else held.copy_(tensor, non_blocking=True)
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._held[key] = held
        return held.copy_(tensor, non_blocking=True)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same of two tensors that are one."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def copied_bytes(contents: Contents) -> int:
    """Host memory that :class:`HostCopies` takes for them."""
    return sum(pinned_bytes(tensor.nbytes) if tensor.is_cuda else tensor.nbytes
               for tensors in contents.groups.values()
               for tensor in {_identity(one): one for one in tensors.values()}.values()
               if tensor.is_cuda or tensor.data_ptr() not in contents.frozen)
