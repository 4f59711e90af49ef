"""The models of a run and their sizes, from configurations alone: the one list that everything else
here is worked out from.

A kind of model that is new (adapters, a critic of its own, a reference that shares a trunk) is one
more :class:`Part`, or another count in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ppocli.config.schema import ModelConfig, TrainConfig, reference_kind
from ppocli.errors import InputError
from ppocli.models.loading import without_dropout
from ppocli.models.policy import Policy, build_value_head, freeze_bottom

BYTES = {"fp32": 4, "bf16": 2}
MODEL_REWARDS = ("classifier", "reward_model")
"""short names of the rewards that hold a model of their own"""
Kind = Literal["policy", "value", "reference", "reward"]


@dataclass(frozen=True, slots=True)
class Part:
    """A model, or a piece of one, that lies in memory during a run."""

    kind: Kind
    name: str
    parameters: int
    """tied ones once"""
    trained: int = 0
    """of these, those with a gradient and optimizer state; they and their gradients are fp32"""
    bytes_each: int = 4
    """of a stored parameter"""
    sharded: bool = False
    """whether DeepSpeed divides it over ranks; else every rank holds the whole"""
    cast: int = 0
    """trained parameters that autocast copies to bf16 for each pass: weights of linear layers"""
    largest: int = 0
    """elements of the largest trained tensor"""
    on_host: bool = False
    """whether it lies in host memory while it isn't used"""

    @property
    def stored(self) -> int:
        """Bytes of the weights as they are kept."""
        return self.parameters * self.bytes_each


def read_config(name: str, *, key: str, revision: str | None = None, trust_remote_code: bool = False
                ) -> Any:
    """A model's configuration; of a folder nothing but ``config.json`` has to be there.

    Raises:
        InputError: no such model, or its configuration can't be read.
    """
    from transformers import AutoConfig

    from ppocli.assets.model_files import find_model

    source: str = str(Path(name).expanduser())
    if not (Path(source) / "config.json").is_file():
        source, _ = find_model(name, key=key, revision=revision, needs="model")
    try:
        return AutoConfig.from_pretrained(source, revision=revision,
                                          trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds, all about this file
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"The configuration of {name} can't be read: {first}", where=key,
                         fix="check config.json, or give another model") from error


def outline(cfg: ModelConfig, config: Any | None = None, *, critic: bool = True) -> Policy:
    """The policy as a module on torch's meta device: every shape and no memory.

    Args:
        config: of the model, if it has been read already.
        critic: whether there is a value function.

    Raises:
        InputError: transformers can't make a causal language model of it, or its layers can't be
            told apart for ``model.num_layers_unfrozen``.
    """
    from transformers import AutoModelForCausalLM

    if config is None:
        config = read_config(cfg.path, key="model.path", revision=cfg.revision,
                             trust_remote_code=cfg.trust_remote_code)
    _refuse_unknown(cfg, config, critic)
    attention = {"attn_implementation": cfg.attn_implementation} if cfg.attn_implementation else {}
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(without_dropout(config), dtype=torch.float32,
                                                  trust_remote_code=cfg.trust_remote_code,
                                                  **attention)
            lm.tie_weights()
            policy = Policy(lm, build_value_head(lm, 0) if critic else None)
        policy.eval()
        freeze_bottom(lm, cfg.num_layers_unfrozen)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"The model {cfg.path} can't be outlined: {first}", where="model.path",
                         fix="give a causal language model") from error
    return policy


def _refuse_unknown(cfg: ModelConfig, config: Any, critic: bool) -> None:
    """Kinds of models that are not estimated yet."""
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{cfg.path} is an encoder-decoder, whose memory can't be told yet.",
                         where="model.path", fix="try it: ppocli train ... --dry-run")
    if cfg.peft or cfg.quantization:
        raise InputError("The memory of adapters and quantized weights can't be told yet.",
                         where="model.peft, model.quantization",
                         fix="try it: ppocli train ... --dry-run")
    if critic and cfg.value.kind != "head":
        raise InputError(f"The memory of a value function of the kind {cfg.value.kind} can't be "
                         "told yet.", where="model.value.kind",
                         fix="try it: ppocli train ... --dry-run")


def parts_of(cfg: TrainConfig, policy: Policy) -> tuple[Part, ...]:
    """Everything that holds weights in a run of ``cfg``.

    Args:
        policy: the outline of ``cfg.model``.

    Raises:
        InputError: a reward's model is missing.
    """
    return (*_policy_parts(policy), *_reference_parts(cfg, policy), *_reward_parts(cfg))


def _policy_parts(policy: Policy) -> Iterator[Part]:
    embedding = {id(p) for m in policy.modules() if isinstance(m, nn.Embedding)
                 for p in m.parameters()}
    head = policy.lm.get_output_embeddings()
    # the head casts its own weight where it needs it, and drops the copy
    apart = embedding | {id(p) for p in head.parameters()}
    pieces: list[tuple[Any, str, Any]] = [("policy", "policy", policy.lm),
                                          ("value", "value head", policy.value_head)]
    for kind, name, module in pieces:
        if module is None:
            continue
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        cast = [p for p in trained if p.dim() == 2 and id(p) not in apart] \
            if kind == "policy" else []
        yield Part(kind=kind, name=name,
                   parameters=_count(parameters), trained=_count(trained), sharded=True,
                   cast=_count(cast), largest=max((p.numel() for p in trained), default=0))


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _reference_parts(cfg: TrainConfig, policy: Policy) -> Iterator[Part]:
    """As :mod:`ppocli.models.reference` keeps it: whole on every rank."""
    model = cfg.model
    kind = reference_kind(model)
    if kind == "none":
        return
    on_host = model.reference.offload
    if kind == "shared":  # fp32 copies of what trains
        yield Part(kind="reference", name="reference", on_host=on_host, parameters=_count(
            [p for p in policy.lm.parameters() if p.requires_grad]))
        return
    lm = policy.lm
    if model.reference.path is not None:
        lm = outline(replace(model, path=model.reference.path, revision=None), critic=False).lm
    yield Part(kind="reference", name="reference", on_host=on_host,
               parameters=_count(list(lm.parameters())),
               bytes_each=BYTES[model.dtype or cfg.hardware.precision])


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


def _reward_parts(cfg: TrainConfig) -> Iterator[Part]:
    from transformers import AutoModelForSequenceClassification

    for key, name, kwargs in reward_models(cfg):
        config = read_config(name, key=f"{key}.model", revision=kwargs.get("revision"),
                             trust_remote_code=bool(kwargs.get("trust_remote_code")))
        try:
            with torch.device("meta"):
                model = AutoModelForSequenceClassification.from_config(config)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"The model {name} can't be outlined: {first}", where=f"{key}.model",
                             fix="give a model for sequence classification") from error
        stored = BYTES.get(str(kwargs.get("dtype", "fp32")), 4)
        yield Part(kind="reward", name=f"reward {name}", bytes_each=stored,
                   parameters=_count(list(model.parameters())),
                   on_host=str(kwargs.get("device", "auto")) == "cpu")
