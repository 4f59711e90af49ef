"""The models of a run and their sizes, from configurations alone: the one list that everything else
here is worked out from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ppocli.config.algorithm import value_optimizer
from ppocli.config.schema import OptimizerConfig, TrainConfig, reference_kind
from ppocli.config.sharding import reference_sharded
from ppocli.errors import InputError, PpocliError
from ppocli.estimate.outline import outline_lm, read_config
from ppocli.models.loading.language_model import DTYPES, reference_dtype
from ppocli.models.loading.model_config import first_line
from ppocli.models.policy import Policy
from ppocli.models.transformers_internals import conv1d

BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
MODEL_REWARDS = ("classifier", "reward_model")
"""short names of the rewards that hold a model of their own"""
Kind = Literal["policy", "value", "reference", "reward"]
Place = Literal["device", "offloaded", "host", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Part:
    """A model, or a piece of one, that lies in memory during a run."""

    kind: Kind
    name: str
    parameters: int
    """tied ones once"""
    size: int
    """bytes of the weights as they are kept"""
    trained: int = 0
    """parameters with a gradient and optimizer state; they and their gradients are fp32"""
    state: int = 0
    """bytes of optimizer state, its counts of steps apart"""
    sharded: bool = False
    """whether DeepSpeed divides it over ranks; else every rank holds the whole"""
    cast: int = 0
    """trained parameters that autocast copies to bf16 for each pass: weights of linear layers"""
    largest: int = 0
    """elements of the largest trained tensor"""
    in_parts: bool = False
    """whether each rank keeps a part of it and gathers it while it is run: a reference, under
    ZeRO 3"""
    place: Place = "device"
    """where it lies: ``offloaded`` is in host memory while it isn't run"""
    adapter: bool = False
    """whether what trains is an adapter, which is all that is saved of it"""
    pinned: int = 0
    """bytes of pinned host memory that a copy of what a checkpoint holds of it takes"""

    @property
    def saved(self) -> int:
        """Bytes in a checkpoint."""
        return (4 * self.trained if self.adapter else self.size) + self.state


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something of a run whose memory can't be told, and why."""

    name: str
    why: str


def parts_of(cfg: TrainConfig, policy: Policy, *, rewards: bool = True
             ) -> tuple[tuple[Part, ...], tuple[Unknown, ...]]:
    """Everything that holds weights in a run of ``cfg``, and what of it can't be told.

    Args:
        policy: the outline of ``cfg``.
        rewards: whether those of the rewards are among them.
    """
    parts, unknown = list(_policy_parts(cfg, policy)), []
    sources: list[tuple[str, Callable[[], Iterator[Part]]]] = [
        ("reference", partial(_reference_parts, cfg, policy))]
    if rewards:
        sources += [(f"reward {name}", partial(_reward_parts, key, name, kwargs))
                    for key, name, kwargs in reward_models(cfg)]
    for name, find in sources:
        try:
            parts += find()
        except PpocliError as error:
            unknown.append(Unknown(name, error.what))
    if rewards:
        unknown += [Unknown(f"reward {name}", "your function") for name in own_functions(cfg)]
    return tuple(parts), tuple(unknown)


def _policy_parts(cfg: TrainConfig, policy: Policy) -> Iterator[Part]:
    embedding = {id(p) for m in policy.modules() if isinstance(m, nn.Embedding)
                 for p in m.parameters()}
    # heads cast their own weights where they need them, or never
    heads = [policy.lm.get_output_embeddings(), policy.value_head]
    apart = embedding | {id(p) for m in heads if m is not None for p in m.parameters()}
    pieces: list[tuple[Kind, str, list[Any], OptimizerConfig]] = [
        ("policy", "policy", [policy.lm], cfg.ppo.optimizer),
        ("value", f"value {cfg.model.value.kind}", [policy.value_trunk, policy.value_head],
         value_optimizer(cfg.ppo))]
    quantized = packed(cfg, policy.lm)
    for kind, name, modules, optimizer in pieces:
        parameters = [p for m in modules if m is not None for p in m.parameters()]
        if not parameters:
            continue
        trained = [p for p in parameters if p.requires_grad]
        adapter = kind == "policy" and bool(cfg.model.peft)
        copied = [p.numel() * p.element_size() for p in (trained if adapter else parameters)]
        copied += [size for p in trained for size in state_sizes(optimizer, p.shape)]
        yield Part(
            kind=kind, name=name, parameters=_count(parameters), trained=_count(trained),
            size=sum(quantized.get(id(p), p.numel() * p.element_size()) for p in parameters),
            state=sum(sum(state_sizes(optimizer, p.shape)) for p in trained), sharded=True,
            cast=_count([p for p in trained if p.dim() == 2 and id(p) not in apart]),
            largest=max((p.numel() for p in trained), default=0),
            adapter=adapter, pinned=sum(map(pinned_bytes, copied)))


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def state_sizes(optimizer: OptimizerConfig, shape: torch.Size) -> tuple[int, ...]:
    """Bytes of each tensor that an optimizer keeps for a weight, as :mod:`ppocli.train.optimizers`
    builds it.

    Adafactor keeps sums of rows and columns in place of a matrix (Shazeer and Stern 2018, arXiv
    1804.04235); AdamW of bitsandbytes 8 bits a number and a scale for 256 of them, and 32 bits for
    weights below 4096 numbers (Dettmers et al. 2022, arXiv 2110.02861).
    """
    count = math.prod(shape)
    match optimizer.name:
        case "sgd":
            return (4 * count,) if optimizer.momentum else ()
        case "adafactor" if len(shape) > 1:
            return 4 * (count // shape[-1]), 4 * (count // shape[-2])
        case "adafactor":
            return (4 * count,)
        case "adamw_8bit" if count >= 4096:
            return (count, 4 * -(-count // 256)) * 2
    return 4 * count, 4 * count


def pinned_bytes(size: int) -> int:
    """What torch takes of host memory for a pinned tensor of so many bytes: a power of two
    (``ATen/core/CachingHostAllocator.h``)."""
    return 1 << (size - 1).bit_length() if size else 0


def packed(cfg: TrainConfig, lm: Any) -> dict[int, int]:
    """Bytes of each weight, by its id, that ``model.quantization`` changes: those of linear layers,
    but of the output embedding and what the model wants in fp32."""
    if cfg.model.quantization is None:
        return {}
    exact = tuple(getattr(lm, "_keep_in_fp32_modules", None) or ())
    head = lm.get_output_embeddings().weight
    found = {}
    for name, module in lm.named_modules():
        if isinstance(module, (nn.Linear, conv1d())) and "lora_" not in name \
                and module.weight is not head and not module.weight.requires_grad:
            kept = any(part in exact for part in name.split("."))
            weight = module.weight
            found[id(weight)] = (4 * weight.numel() if kept else
                                 quantized_bytes(cfg.model.quantization, weight.shape))
    return found


def quantized_bytes(how: str, shape: torch.Size) -> int:
    """Bytes of a weight in 8 bits, with a fp32 scale for each row (LLM.int8(), arXiv 2208.07339),
    or in 4 bits, with 8 bits of scale for 64 numbers and 32 for 64 * 256 (QLoRA's double
    quantization, arXiv 2305.14314)."""
    count = math.prod(shape)
    if how == "8bit":
        return count + 4 * shape[0]
    blocks = -(-count // 64)
    return -(-count // 2) + blocks + 4 * -(-blocks // 256)


def _reference_parts(cfg: TrainConfig, policy: Policy) -> Iterator[Part]:
    """As :mod:`ppocli.models.reference` keeps it."""
    model = cfg.model
    kind = reference_kind(model)
    if kind in ("none", "adapter"):
        return
    if kind == "shared":  # fp32 copies of what trains
        count = _count([p for p in policy.lm.parameters() if p.requires_grad])
        size, in_parts = 4 * count, cfg.hardware.zero_stage == 3
    else:
        path = model.reference.path
        lm = outline_lm(model, policy.lm.config if path is None else None, path=path,
                        key="model.reference.path")
        count = _count(list(lm.parameters()))
        size = count * reference_dtype(model, cfg.hardware).itemsize
        in_parts = cfg.hardware.zero_stage == 3 and reference_sharded(cfg)
    yield Part(kind="reference", name="reference", parameters=count, size=size, in_parts=in_parts,
               place=_reference_place(cfg))


def _reference_place(cfg: TrainConfig) -> Place:
    wanted = cfg.model.reference
    if wanted.device is not None and not wanted.offload:
        return "host" if wanted.device == "cpu" else "elsewhere"
    return "offloaded" if wanted.offload else "device"


def reward_models(cfg: TrainConfig) -> list[tuple[str, str, dict[str, Any]]]:
    """(key of its arguments, name of the model, arguments) of each reward with a model."""
    rewards: list[tuple[str, Any, Any]] = [("reward.kwargs", cfg.reward.fn, cfg.reward.kwargs)]
    rewards += [(f"reward.fns.{name}.kwargs", entry.get("fn"), entry.get("kwargs"))
                for name, entry in cfg.reward.fns.items() if isinstance(entry, dict)]
    return [(key, str(kwargs["model"]), kwargs) for key, fn, kwargs in rewards
            if fn in MODEL_REWARDS and isinstance(kwargs, dict) and "model" in kwargs]


def own_functions(cfg: TrainConfig) -> list[str]:
    """Rewards of the user's own, whose memory can't be known."""
    from ppocli.rewards.builtin import BUILTIN_REWARDS

    names = [cfg.reward.fn] if not cfg.reward.fns else [
        entry.get("fn") for entry in cfg.reward.fns.values() if isinstance(entry, dict)]
    return [str(name) for name in names if name is not None and name not in BUILTIN_REWARDS]


def _reward_parts(key: str, name: str, kwargs: dict[str, Any]) -> Iterator[Part]:
    from transformers import AutoModelForSequenceClassification

    config = read_config(name, key=f"{key}.model", revision=kwargs.get("revision"),
                         trust_remote_code=bool(kwargs.get("trust_remote_code")))
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except Exception as error:
        raise InputError(f"The model {name} can't be outlined: {first_line(error)}",
                         where=f"{key}.model",
                         fix="give a model for sequence classification") from error
    count = _count(list(model.parameters()))
    yield Part(kind="reward", name=f"reward {name}", parameters=count,
                size=count * BYTES.get(str(kwargs.get("dtype", "fp32")), 4),
                place="host" if str(kwargs.get("device", "auto")) == "cpu" else "device")
