"""What is trained as a plain Hugging Face folder (weights, configuration, tokenizer), and what a
checkpoint holds, gathered from a task and written: by one process, or by all ranks into one folder.

One process writes the tensors that train and copies of them with the same function, so that the
files are the same.
"""

import copy
import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ppocli.errors import PpocliError
from ppocli.models.loading.load_adapters import (
    Adapter,
    adapter_tensors,
    describe_adapter,
    merged_tensors,
)
from ppocli.models.sharded_weights import gathered, host_weights, optimizer_slots
from ppocli.runs.model_files import ADAPTER_WEIGHTS, POLICY
from ppocli.training.optimizers import named_trainable
from ppocli.training.state import TrainState
from ppocli.training.task import Task

Tensors = dict[str, torch.Tensor]
OPTIMIZER = "optimizer.safetensors"
TASK_STATE = "task_state.safetensors"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """How a model of transformers, or an adapter of PEFT on one, is written. Of all this only the
    weights ever change."""

    lm: Any
    config: Any
    """the model's configuration as it came"""
    generation_config: Any
    """for whoever samples from it later; None of a model that isn't sampled from"""
    tokenizer: Any
    adapter: Adapter | None = None
    merges: bool = False
    """whether :meth:`write` merges the adapter into its base"""

    def tensors(self) -> Tensors:
        """The state dict of the model, or its adapter's tensors as PEFT names them."""
        return self.lm.state_dict() if self.adapter is None else adapter_tensors(self.adapter)

    def write(self, folder: Path, weights: Tensors | None = None) -> None:
        """The whole folder, as transformers would write it; of an adapter, as PEFT would.

        Args:
            weights: as of :meth:`tensors`, where the modules don't hold them whole.
        """
        if self.merges and self.adapter is not None:
            replace(self, adapter=None).write(folder, merged_tensors(self.adapter))
            return
        self.write_weights(folder, weights)
        self.describe(folder)

    def write_weights(self, folder: Path, weights: Tensors | None = None) -> None:
        """The weights alone; see :meth:`write`."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapter is None:
            self.lm.save_pretrained(folder, safe_serialization=True,
                                    state_dict=None if weights is None else dict(weights))
        else:
            save_file(self.tensors() if weights is None else weights, folder / ADAPTER_WEIGHTS,
                      metadata={"format": "pt"})

    def describe(self, folder: Path) -> None:
        """What goes with the weights: configuration as it came or PEFT's, tokenizer, and generation
        config."""
        if self.adapter is None:
            config = copy.deepcopy(self.config)
            config.architectures = [type(self.lm).__name__]
            config.dtype = str(next(self.lm.parameters()).dtype).removeprefix("torch.")
            config.save_pretrained(folder)
        else:
            describe_adapter(self.adapter, folder)
        self.tokenizer.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)


def module_files(task: Task) -> dict[str, torch.nn.Module]:
    """File name -> what trains in addition to the model itself."""
    return {f"{name}.safetensors": module for name, module in task.modules().items()}


def _write_weights(task: Task, state: TrainState, folder: Path, whole: Tensors | None) -> None:
    """Write all but the optimizer's state into ``folder``: the policy's model or adapter, state
    dicts of what trains in addition, the task's own tensors, and rank 0's generators.

    Args:
        whole: as of :func:`whole_weights`.
    """
    task.saved.write_weights(folder / POLICY, within("lm", whole) or task.saved.tensors())
    for name, module in module_files(task).items():
        save_tensors(within(Path(name).stem, whole) or module.state_dict(), folder / name)
    if state.tensors:
        save_tensors(state.tensors, folder / TASK_STATE)
    task.saved.describe(folder / POLICY)
    state.generators.write(folder)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors of any device; those that share memory are written once each."""
    plain: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        on_host = tensor.detach().cpu().contiguous()
        if on_host.untyped_storage().data_ptr() in seen:
            on_host = on_host.clone()
        seen.add(on_host.untyped_storage().data_ptr())
        plain[name] = on_host
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

    with whole_weights(task) as whole:
        if ranks.first:
            attempt(partial(_write_weights, task, state, folder, whole))
    del whole  # the optimizer's state needs the room
    slots = optimizer_slots(named_trainable(trained.module), trained.optimizer, stage, ranks)
    share = OPTIMIZER if ranks.world == 1 else (
        f"{Path(OPTIMIZER).stem}-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors")
    attempt(lambda: save_tensors(slots, folder / share))
    if not ranks.first:
        attempt(lambda: state.generators.write(folder, ranks.rank))
    # number and text, as those of an OSError
    failures = ranks.gather(None if problem is None else (
        getattr(problem, "errno", None) or errno.EIO, str(problem)))
    if problem is not None:
        raise problem
    for failure in failures:
        if failure is not None:
            raise OSError(*failure)


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

    message: Any = None
    if ranks.first:
        try:
            put(fill)
        except PpocliError as error:
            message = error
        ranks.broadcast(message)
    else:
        while isinstance(message := ranks.broadcast(None), str):
            with suppress(Exception):  # rank 0 gets to know of it and decides
                fill(Path(message))
    if message is not None:
        raise message
