"""What a checkpoint holds, gathered from a task and written: by one process, or by all ranks into
one folder.

One process writes the tensors that train and copies of them with the same function, so that the
files are the same.
"""

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ppocli.errors import PpocliError
from ppocli.models.sharded_weights import gathered, host_weights, optimizer_slots
from ppocli.runs.model_files import POLICY
from ppocli.training.optimizers import named_trainable
from ppocli.training.saved_model import SavedModel, Tensors
from ppocli.training.state import Generators, TrainState
from ppocli.training.task import Task

OPTIMIZER = "optimizer.safetensors"
TASK_STATE = "task_state.safetensors"


@dataclass(frozen=True, slots=True)
class Contents:
    """Tensors by name, and what else goes with them."""

    saved: SavedModel
    files: dict[str, Tensors]
    """by file: optimizer state by ``NAME/slot``, state dicts of what trains beside the model, the
    task's own tensors; for the folder of the policy its model's state dict, or its adapter's
    tensors as PEFT names them"""
    generators: Generators


def _weights(task: Task, state: TrainState, whole: Tensors | None) -> dict[str, Tensors]:
    """The files of :class:`Contents` without that of the optimizer.

    Args:
        whole: as of :func:`whole_weights`.
    """
    found = {POLICY: within("lm", whole) or task.saved.tensors(), **{
        name: within(Path(name).stem, whole) or module.state_dict()
        for name, module in module_files(task).items()}}
    return found | ({TASK_STATE: dict(state.tensors)} if state.tensors else {})


def module_files(task: Task) -> dict[str, torch.nn.Module]:
    """File name -> what trains beside the model itself."""
    return {f"{name}.safetensors": module for name, module in
            {**task.modules(), **task.saved.prompt_encoders()}.items()}


def write_contents(contents: Contents, folder: Path) -> None:
    """Put all of it into ``folder``; safetensors and JSON only."""
    saved = contents.saved
    for name, tensors in contents.files.items():
        if name == POLICY:
            saved.write_weights(folder / name, tensors)
        else:
            save_tensors(tensors, folder / name)
    saved.describe(folder / POLICY)
    contents.generators.write(folder)


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


@contextmanager
def whole_weights(task: Task) -> Iterator[Tensors | None]:
    """All that trains, by the names in ``trained.module``, or None where its modules hold it, for
    rank 0, which alone may write it. All ranks enter and leave in step.

    An adapter's own files are made from its modules: those are put together on every rank.
    """
    stage, first = task.backend.zero_stage, task.backend.ranks.first
    if task.saved.adapter is None:
        yield host_weights(task.trained.module, stage, keep=first)
        return
    with gathered(task.trained.module, stage):
        yield None


def within(prefix: str, weights: Tensors | None) -> Tensors | None:
    """Of :func:`whole_weights` those of the module of that name, by their names in it."""
    start = f"{prefix}."
    return None if weights is None else {
        name.removeprefix(start): tensor for name, tensor in weights.items()
        if name.startswith(start)}


def write_checkpoint(task: Task, folder: Path, state: TrainState) -> None:
    """Put everything that ``read_checkpoint`` needs into ``folder``; safetensors and JSON only.

    All ranks call it in step and write into the same folder: rank 0 the weights, each rank its
    share of the optimizer state and its own generators. Whole tensors are written whatever the
    ZeRO stage, so that any number of ranks, under any stage, can read them.

    Raises:
        OSError: another rank couldn't write its part; what went wrong here is raised as it is.
    """
    ranks, stage, trained = task.backend.ranks, task.backend.zero_stage, task.trained
    problem: Exception | None = None

    def attempt(work: Callable[[], None]) -> None:
        """A disk that refuses one rank must not leave the others waiting in a collective."""
        nonlocal problem
        if problem is None:
            try:
                work()
            except Exception as error:
                problem = error

    def write_weights(whole: Tensors | None) -> None:
        write_contents(Contents(task.saved, _weights(task, state, whole), state.generators), folder)

    with whole_weights(task) as whole:
        if ranks.first:
            attempt(partial(write_weights, whole))
    del whole  # the optimizer's state needs the room
    slots = optimizer_slots(named_trainable(trained.module), trained.optimizer, stage, ranks)
    share = OPTIMIZER if ranks.world == 1 else (
        f"{Path(OPTIMIZER).stem}-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors")
    attempt(lambda: save_tensors(slots, folder / share))
    if not ranks.first:
        attempt(lambda: state.generators.write(folder, ranks.rank))
    # its number and text, as those of an OSError
    found = ranks.gather(None if problem is None else (
        getattr(problem, "errno", None) or errno.EIO, str(problem)))
    if problem is not None:
        raise problem
    for other in found:
        if other is not None:
            raise OSError(*other)


def save_together(task: Task, state: TrainState,
                  put: Callable[[Callable[[Path], None]], None]) -> None:
    """Let rank 0 save a checkpoint into which all ranks write. All ranks call it in step.

    Args:
        put: called on rank 0 with a function that fills a folder, as often as it calls that.

    Raises:
        PpocliError: whatever ``put`` raised, on all ranks.
    """
    ranks = task.backend.ranks

    def fill(folder: Path) -> None:
        if ranks.first:
            ranks.broadcast(str(folder))
        write_checkpoint(task, folder, state)

    told: Any = None
    if ranks.first:
        try:
            put(fill)
        except PpocliError as error:
            told = error
        ranks.broadcast(told)
    else:
        while isinstance(told := ranks.broadcast(None), str):
            with suppress(Exception):  # rank 0 has heard of it and decides
                fill(Path(told))
    if told is not None:
        raise told
