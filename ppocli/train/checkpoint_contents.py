"""What a checkpoint of one process holds: gathered from a session, copied, written.

The same function writes the tensors that train and copies of them, so that the files are the same.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from ppocli.estimate.parts import pinned_bytes
from ppocli.models.loading.adapters import adapter_tensors, describe_adapter
from ppocli.models.policy import Policy
from ppocli.models.virtual_tokens import virtual_tokens
from ppocli.parallel.ranks import Ranks
from ppocli.storage.adapter_files import WEIGHTS
from ppocli.storage.atomic import TEMPORARY_PREFIX, walk_files
from ppocli.storage.model_files import POLICY, VALUE_HEAD, VALUE_TRUNK
from ppocli.tasks.ppo.session import Session
from ppocli.train import random_state as generators
from ppocli.train.optimizers import named_trainable
from ppocli.train.random_state import Generators
from ppocli.zero.sharded_weights import optimizer_slots

Tensors = dict[str, torch.Tensor]
PROMPT_ENCODER = "prompt_encoder.safetensors"
OPTIMIZER = "optimizer.safetensors"


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
    frozen: frozenset[int]
    """addresses of weights that don't train: a copy can share them"""
    described: dict[str, bytes] | None = None
    """the small files of ``policy/`` by name; None: as the session describes itself when it is
    written"""

    @property
    def groups(self) -> dict[str, Tensors]:
        """All tensors, by what they belong to."""
        return {POLICY: self.policy, OPTIMIZER: self.slots, **self.modules}


def contents_of(session: Session, state: Generators) -> Contents:
    """The tensors that train, as they are: what is made of them must be done before they change.

    Args:
        session: of one process that shards nothing.
        state: of the global generators when the training state was committed.
    """
    policy, adapter = session.policy, session.loaded.adapter
    return Contents(
        policy=policy.lm.state_dict() if adapter is None else adapter_tensors(adapter),
        modules={name: module.state_dict() for name, module in
                 {**value_modules(policy), **prompt_encoders(policy)}.items()},
        slots=optimizer_slots(named_trainable(policy), session.optimizer, 0, Ranks()),
        generators=state,
        frozen=frozenset(p.data_ptr() for p in policy.parameters() if not p.requires_grad))


def value_modules(policy: Policy) -> dict[str, torch.nn.Module]:
    """File name -> what the value function is made of; empty without one."""
    found: dict[str, Any] = {VALUE_HEAD: policy.value_head, VALUE_TRUNK: policy.value_trunk}
    return {name: module for name, module in found.items() if module is not None}


def prompt_encoders(policy: Policy) -> dict[str, torch.nn.Module]:
    """File name -> what trained virtual tokens are made by; PEFT's own file holds the result, from
    which a projection can't be found again."""
    virtual = virtual_tokens(policy.lm)
    return {} if virtual is None else {PROMPT_ENCODER: virtual.prompt_encoder}


def write_contents(session: Session, contents: Contents, folder: Path) -> None:
    """Put all of it into ``folder``; safetensors and JSON only.

    Of ``session`` what never changes is read: of a copy this can be done while it trains.
    """
    write_weights(session, folder / POLICY, contents.policy)
    if contents.described is None:
        describe_policy(session, folder / POLICY)
    else:
        for name, raw in contents.described.items():
            path = folder / POLICY / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(raw)
    for name, tensors in contents.modules.items():
        save_tensors(tensors, folder / name)
    save_tensors(contents.slots, folder / OPTIMIZER)
    generators.write(contents.generators, folder)


def write_weights(session: Session, folder: Path, weights: Tensors | None = None) -> None:
    """Write the policy's weights as transformers would, or an adapter's as PEFT would.

    Args:
        weights: as :attr:`Contents.policy`; None: those that the modules hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapter = session.loaded.adapter
    if adapter is None:
        session.policy.lm.save_pretrained(folder, safe_serialization=True,
                                          state_dict=None if weights is None else dict(weights))
    else:
        save_file(adapter_tensors(adapter) if weights is None else weights, folder / WEIGHTS,
                  metadata={"format": "pt"})


def describe_policy(session: Session, folder: Path) -> None:
    """Write what goes with the policy's weights: configuration as it came or PEFT's, tokenizer, and
    the sampling of the training as generation config."""
    lm, adapter = session.policy.lm, session.loaded.adapter
    if adapter is None:
        config = copy.deepcopy(session.loaded.export_config)
        config.architectures = [type(lm).__name__]
        config.dtype = str(next(lm.parameters()).dtype).removeprefix("torch.")
        config.save_pretrained(folder)
    else:
        describe_adapter(adapter, folder)
    session.tokenizer.save_pretrained(folder)
    _generation_config(session).save_pretrained(folder)


def _generation_config(session: Session) -> Any:
    spec, own = session.sampling, session.loaded.generation_config
    config = type(own)(
        bos_token_id=own.bos_token_id, pad_token_id=session.tokenizer.pad_token_id,
        eos_token_id=list(spec.stop_ids) if len(spec.stop_ids) != 1 else spec.stop_ids[0],
        do_sample=spec.do_sample, max_new_tokens=spec.max_new_tokens,
        decoder_start_token_id=session.loaded.decoder_start)
    if spec.do_sample:
        config.temperature, config.top_k, config.top_p = spec.temperature, spec.top_k, spec.top_p
    return config


def save_tensors(tensors: Tensors, path: Path) -> None:
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

    def copy(self, session: Session, contents: Contents, scratch: Path) -> Contents:
        """The contents as they are now, of which nothing changes any more until the next call.

        Args:
            scratch: a folder in which small files can be put for a moment.

        Raises:
            OSError: they can't.
            RuntimeError: there is no memory.
        """
        with TemporaryDirectory(dir=scratch, prefix=TEMPORARY_PREFIX) as place:
            describe_policy(session, Path(place))
            described = {name: Path(place, name).read_bytes() for name in walk_files(Path(place))}
        groups = {group: self._copied(group, tensors, contents.frozen)
                  for group, tensors in contents.groups.items()}
        if session.backend.device.type == "cuda":
            torch.cuda.synchronize(session.backend.device)
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
