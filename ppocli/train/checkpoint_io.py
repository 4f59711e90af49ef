"""A session's tensors to and from a checkpoint, and the policy as a plain Hugging Face folder."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ppocli.errors import CheckpointError, PpocliError
from ppocli.models.loading.adapters import fill_adapter
from ppocli.models.policy import Policy
from ppocli.parallel.deepspeed_internals import whole_shape
from ppocli.parallel.ranks import Ranks
from ppocli.storage.run_logs import JsonlWriter
from ppocli.tasks.ppo.records import Experience
from ppocli.tasks.ppo.session import Session
from ppocli.train import random_state as generators
from ppocli.train.checkpoint_contents import (
    OPTIMIZER,
    POLICY,
    VALUE_HEAD,
    VALUE_TRUNK,
    Tensors,
    contents_of,
    describe_policy,
    prompt_encoders,
    save_tensors,
    value_modules,
    write_contents,
    write_weights,
)
from ppocli.train.optimizers import named_trainable
from ppocli.train.random_state import Generators
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



def save_policy(session: Session, folder: Path, weights: Tensors | None = None) -> None:
    """Write the policy as transformers would: weights, configuration as it came, tokenizer, and
    the sampling of the training as generation config. Of an adapter its own files, as PEFT would.

    Args:
        weights: those of the policy where its modules don't hold them, whole.
    """
    write_weights(session, folder, _below("lm", weights))
    describe_policy(session, folder)


@contextmanager
def whole_policy(session: Session) -> Iterator[Tensors | None]:
    """What :func:`save_policy` needs on rank 0, which alone may call it: its modules' weights, or
    None where they hold them. All ranks enter and leave in step.

    An adapter's own files are made from its modules: those are put together on every rank.
    """
    stage, first = session.backend.zero_stage, session.backend.ranks.first
    if session.loaded.adapter is None:
        yield host_weights(session.policy, stage, keep=first)
        return
    with gathered(session.policy, stage):
        yield None


def _below(prefix: str, weights: Tensors | None) -> Tensors | None:
    """The weights of the module of that name, by their names in it."""
    if weights is None:
        return None
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in weights.items()
            if name.startswith(start)}


def write_checkpoint(session: Session, folder: Path, state: Generators) -> None:
    """Put everything that ``read_checkpoint`` needs into ``folder``; safetensors and JSON only.

    All ranks call it in step and write into the same folder: rank 0 the weights, each rank its
    share of the optimizer state and its own generators. Whole tensors are written whatever the
    ZeRO stage, so that any number of ranks, under any stage, can read them.

    Args:
        state: of this rank's global generators when the training state was committed.
    """
    ranks, stage = session.backend.ranks, session.backend.zero_stage
    if ranks.world == 1 and stage == 0:
        write_contents(session, contents_of(session, state), folder)
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
        save_policy(session, folder / POLICY, whole)
        for name, module in {**value_modules(session.policy),
                             **prompt_encoders(session.policy)}.items():
            own = _below(Path(name).stem, whole)
            save_tensors(module.state_dict() if own is None else own, folder / name)

    with whole_policy(session) as whole:
        if ranks.first:
            attempt(partial(weights, whole))
    del whole  # the optimizer's state needs the room
    slots = optimizer_slots(named_trainable(session.policy), session.optimizer, stage, ranks)
    attempt(lambda: save_tensors(slots, folder / _part(OPTIMIZER, ranks)))
    attempt(lambda: generators.write(state, folder, ranks.rank))
    if problem is not None:
        raise problem


def save_together(session: Session, state: Generators,
                  put: Callable[[Callable[[Path], None]], None]) -> None:
    """Let rank 0 save a checkpoint into which all ranks write. All ranks call it in step.

    Args:
        put: called on rank 0 with a function that fills a folder, as often as it calls that.

    Raises:
        PpocliError: whatever ``put`` raised, on all ranks.
    """
    ranks = session.backend.ranks
    if ranks.world == 1:
        put(lambda folder: write_checkpoint(session, folder, state))
        return

    def fill(folder: Path) -> None:
        problem: Exception | None = None
        try:
            write_checkpoint(session, folder, state)
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


def write_experience(folder: Path, experience: Experience, samples: list[dict[str, Any]]) -> None:
    """A rollout for later inspection: its tensors, and one JSON line a sample."""
    tensors = {f.name: value.contiguous() for f in fields(experience)
               if isinstance(value := getattr(experience, f.name), torch.Tensor)}
    save_file(tensors, folder / "experience.safetensors")
    with JsonlWriter(folder / "samples.jsonl") as lines:
        lines.append(samples)


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


def _load_value_function(policy: Policy, folder: Path) -> None:
    wanted = value_modules(policy)
    there = {name for name in (VALUE_HEAD, VALUE_TRUNK) if (folder / name).exists()}
    if there != set(wanted):
        raise CheckpointError(
            "The value function of the checkpoint is of another kind: it has "
            f"{', '.join(sorted(there)) or 'none'}, the run needs "
            f"{', '.join(sorted(wanted)) or 'none'}", where="model.value, ppo.advantage",
            fix="resume with the value function the run was started with")
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


def _restore_optimizer(session: Session, folder: Path) -> None:
    """Fill the optimizer's state by name; every parameter must find what it had."""
    parameters = named_trainable(session.policy)
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
        fill_optimizer(parameters, session.optimizer, session.backend.zero_stage, {
            name: {slot: partial(file.get_tensor, key)
                   for slot, (file, key) in slots.items()} for name, slots in found.items()})


def read_checkpoint(session: Session, folder: Path) -> None:
    """Load weights, value head, optimizer and generators from a verified checkpoint folder. All
    ranks call it in step.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    stage, ranks = session.backend.zero_stage, session.backend.ranks
    weights = _read_shards(folder / POLICY)
    if session.loaded.adapter is None:
        _load_module(session.policy.lm, weights, "policy",
                     _tied_names(session.policy.lm, set(weights)))
    elif encoders := prompt_encoders(session.policy):
        for name, module in encoders.items():
            _load_module(module, load_file(folder / name), "adapter", set())
    else:
        with gathered(session.policy, stage, modify=True):
            fill_adapter(session.loaded.adapter, weights, str(folder / POLICY))
    del weights
    _load_value_function(session.policy, folder)
    adopt_weights(session.policy, session.optimizer, stage)
    _restore_optimizer(session, folder)
    own = generators.read(folder, ranks.rank)
    if own is None:
        log.info("the checkpoint has no random generators of rank %d: those of rewards start anew",
                 ranks.rank)
        generators.seed(session.cfg.seed + ranks.rank)
    else:
        generators.restore(own, session.backend.device)
