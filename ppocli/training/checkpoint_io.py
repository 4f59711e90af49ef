"""A session's tensors to and from a checkpoint, and the policy as a plain Hugging Face folder."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ppocli.errors import CheckpointError, PpocliError
from ppocli.models.loading.adapters import fill_adapter
from ppocli.parallel.deepspeed_internals import whole_shape
from ppocli.parallel.ranks import Ranks
from ppocli.training import random_state as generators
from ppocli.training.checkpoint_contents import (
    OPTIMIZER,
    POLICY,
    TASK_STATE,
    contents_of,
    module_files,
    save_tensors,
    write_contents,
    write_task_state,
)
from ppocli.training.optimizers import named_trainable
from ppocli.training.random_state import Generators
from ppocli.training.saved_model import PROMPT_ENCODER, Tensors
from ppocli.training.task import Task
from ppocli.zero.sharded_weights import (
    adopt_weights,
    fill_optimizer,
    gathered,
    host_weights,
    one_gathered,
    optimizer_slots,
    slot_fits,
)

log = logging.getLogger("ppocli")


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank adds of its own to a checkpoint, as it was when the training state was
    committed."""

    generators: Generators
    """the states of its global random generators"""
    tensors: Mapping[str, torch.Tensor]
    """the task's own, the same on all ranks"""





@contextmanager
def whole_model(task: Task) -> Iterator[Tensors | None]:
    """What ``task.saved.write`` needs on rank 0, which alone may call it: the model's weights, or
    None where its modules hold them. All ranks enter and leave in step.

    An adapter's own files are made from its modules: those are put together on every rank.
    """
    with whole_weights(task) as weights:
        yield _within("lm", weights)


@contextmanager
def whole_weights(task: Task) -> Iterator[Tensors | None]:
    """As :func:`whole_model`, of all that trains, by the names in ``trained.module``."""
    stage, first = task.backend.zero_stage, task.backend.ranks.first
    if task.saved.adapter is None:
        yield host_weights(task.trained.module, stage, keep=first)
        return
    with gathered(task.trained.module, stage):
        yield None


def _within(prefix: str, weights: Tensors | None) -> Tensors | None:
    """The weights of the module of that name, by their names in it."""
    if weights is None:
        return None
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in weights.items()
            if name.startswith(start)}


def write_checkpoint(task: Task, folder: Path, own: RankState) -> None:
    """Put everything that ``read_checkpoint`` needs into ``folder``; safetensors and JSON only.

    All ranks call it in step and write into the same folder: rank 0 the weights, each rank its
    share of the optimizer state and its own generators. Whole tensors are written whatever the
    ZeRO stage, so that any number of ranks, under any stage, can read them.
    """
    ranks, stage, trained = task.backend.ranks, task.backend.zero_stage, task.trained
    if ranks.world == 1 and stage == 0:
        write_contents(task.saved, contents_of(task, own.generators, own.tensors), folder)
        return
    problem: Exception | None = None

    def attempt(work: Callable[[], None]) -> None:
        """A disk that refuses one rank must not leave the others waiting in a collective."""
        nonlocal problem
        if problem is None:
            try:
                work()
            except Exception as error:
                problem = error

    def weights(whole: Tensors | None) -> None:
        task.saved.write(folder / POLICY, _within("lm", whole))
        for name, module in module_files(task).items():
            part = _within(Path(name).stem, whole)
            save_tensors(module.state_dict() if part is None else part, folder / name)
        write_task_state(own.tensors, folder)

    with whole_weights(task) as whole:
        if ranks.first:
            attempt(partial(weights, whole))
    del whole  # the optimizer's state needs the room
    slots = optimizer_slots(named_trainable(trained.module), trained.optimizer, stage, ranks)
    attempt(lambda: save_tensors(slots, folder / _part(OPTIMIZER, ranks)))
    attempt(lambda: generators.write(own.generators, folder, ranks.rank))
    if problem is not None:
        raise problem


def save_together(task: Task, own: RankState, put: Callable[[Callable[[Path], None]], None]
                  ) -> None:
    """Let rank 0 save a checkpoint into which all ranks write. All ranks call it in step.

    Args:
        put: called on rank 0 with a function that fills a folder, as often as it calls that.

    Raises:
        PpocliError: whatever ``put`` raised, on all ranks.
    """
    ranks = task.backend.ranks
    if ranks.world == 1:
        put(lambda folder: write_checkpoint(task, folder, own))
        return

    def fill(folder: Path) -> None:
        problem: Exception | None = None
        try:
            write_checkpoint(task, folder, own)
        except Exception as error:
            problem = error
        found = ranks.gather(None if problem is None else _told(problem))
        if problem is not None:
            raise problem
        if (other := next((told for told in found if told is not None), None)) is not None:
            raise OSError(*other)

    def command(folder: Path) -> None:
        ranks.broadcast(str(folder))
        fill(folder)

    if ranks.first:
        ended: PpocliError | None = None
        try:
            put(command)
        except PpocliError as error:
            ended = error
        ranks.broadcast(ended)
        if ended is not None:
            raise ended
        return
    message: Any
    while isinstance(message := ranks.broadcast(None), str):
        with suppress(Exception):  # rank 0 has heard of it and decides
            fill(Path(message))
    if message is not None:
        raise message


def _told(problem: Exception) -> tuple[int, str]:
    """A rank's failure to write as the number and text of an ``OSError``."""
    number = problem.errno if isinstance(problem, OSError) and problem.errno else errno.EIO
    return number, str(problem)


def _part(name: str, ranks: Ranks) -> str:
    if ranks.world == 1:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{ranks.rank + 1:05d}-of-{ranks.world:05d}{dot}{suffix}"


def _load_module(module: torch.nn.Module, tensors: dict[str, torch.Tensor], what: str,
                 allowed_missing: set[str]) -> None:
    own = module.state_dict(keep_vars=True)
    wrong = [f"{name}: {tuple(tensors[name].shape)} saved, {tuple(whole_shape(own[name]))} here"
             for name in tensors if name in own and tensors[name].shape != whole_shape(own[name])]
    missing = [f"{name} is not saved" for name in own
               if name not in tensors and name not in allowed_missing]
    extra = [f"{name} is not in the model" for name in tensors if name not in own]
    if problems := wrong + missing + extra:
        raise CheckpointError(f"The {what} of the checkpoint does not fit the model: "
                              f"{'; '.join(problems[:3])}", where="model.path",
                              fix="resume with the model the run was started with")
    with torch.no_grad():
        for name, tensor in tensors.items():
            with one_gathered(own[name], modify=True):
                own[name].copy_(tensor)


def _load_modules(task: Task, folder: Path) -> None:
    wanted = {f"{name}.safetensors": module for name, module in task.modules().items()}
    beside = {OPTIMIZER, TASK_STATE, generators.TENSORS, f"{PROMPT_ENCODER}.safetensors"}
    there = {path.name for path in folder.glob("*.safetensors")
             if path.name not in beside and not path.name.startswith(("optimizer-", "rng-"))}
    if there != set(wanted):
        raise CheckpointError(
            "What trains beside the model (a value function, say) is of another kind in the "
            f"checkpoint: it has {', '.join(sorted(there)) or 'none'}, the run needs "
            f"{', '.join(sorted(wanted)) or 'none'}", where="model.value, ppo.advantage",
            fix="resume with what the run was started with")
    for name, module in wanted.items():
        _load_module(module, load_file(folder / name), Path(name).stem.replace("_", " "), set())


def _tied_names(lm: Any, saved: set[str]) -> set[str]:
    """Names of state-dict entries that share memory with an entry that is saved."""
    seen: dict[int, list[str]] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), []).append(name)
    return {name for names in seen.values() if saved & set(names) for name in names}


def _read_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def _restore_optimizer(task: Task, folder: Path) -> None:
    """Fill the optimizer's state by name; every parameter must find what it had."""
    parameters = named_trainable(task.trained.module)
    with ExitStack() as files:
        found: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob(f"{Path(OPTIMIZER).stem}*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            for key in file.keys():  # noqa: SIM118 - no dict
                name, slot = key.rsplit("/", 1)
                found.setdefault(name, {})[slot] = (file, key)
        extra = sorted(set(found) - set(parameters))
        # parameters that never had a gradient (critic warm-up) have no state; else all have it
        wrong = [n for n, slots in found.items() if n in parameters and any(
            not slot_fits(slot, tuple(file.get_slice(key).get_shape()),
                          tuple(whole_shape(parameters[n])))
            for slot, (file, key) in slots.items())]
        if extra or wrong:
            raise CheckpointError(
                "The optimizer state of the checkpoint does not fit: "
                f"{', '.join((extra + wrong)[:3])}",
                where="model.num_layers_unfrozen, ppo.optimizer",
                fix="resume with the model and optimizer the run was started with")
        fill_optimizer(parameters, task.trained.optimizer, task.backend.zero_stage, {
            name: {slot: partial(file.get_tensor, key)
                   for slot, (file, key) in slots.items()} for name, slots in found.items()})


def read_checkpoint(task: Task, folder: Path) -> Tensors:
    """Load weights, modules, optimizer and generators from a verified checkpoint folder. All ranks
    call it in step.

    Returns:
        the task's own tensors.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    stage, ranks, saved = task.backend.zero_stage, task.backend.ranks, task.saved
    module = task.trained.module
    weights = _read_shards(folder / POLICY)
    if saved.adapter is None:
        _load_module(saved.lm, weights, "policy", _tied_names(saved.lm, set(weights)))
    elif encoders := saved.prompt_encoders():
        for name, encoder in encoders.items():
            _load_module(encoder, load_file(folder / f"{name}.safetensors"), "adapter", set())
    else:
        with gathered(module, stage, modify=True):
            fill_adapter(saved.adapter, weights, str(folder / POLICY))
    del weights
    _load_modules(task, folder)
    adopt_weights(module, task.trained.optimizer, stage)
    _restore_optimizer(task, folder)
    own = generators.read(folder, ranks.rank)
    if own is None:
        log.info("the checkpoint has no random generators of rank %d: those of rewards start anew",
                 ranks.rank)
        generators.seed(task.cfg.seed + ranks.rank)
    else:
        generators.restore(own, task.backend.device)
    path = folder / TASK_STATE
    return load_file(path) if path.is_file() else {}
