"""The models of a run without weights, from their configurations alone, and what each of them
takes: the one list that everything else here is worked out from.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from ppocli.config import adapters, algorithm, schema, schema_training, tasks
from ppocli.errors import PpocliError
from ppocli.models import policy, transformers_internals
from ppocli.models.layer_stack import layer_stack, stack_path
from ppocli.models.loading import model_config
from ppocli.models.loading.adapters import attach, peft_config
from ppocli.models.loading.language_model import DTYPES, frozen_dtype
from ppocli.models.trunk import RELATIVE_POSITIONS, state_width
from ppocli.rewards.resolve import BUILTIN_REWARDS, MODEL_REWARDS
from ppocli.storage import model_files
from ppocli.storage.checkpoints import value_start

QUANTIZED_BITS = {"8bit": 8, "4bit": 4 + 8 / 64 + 32 / (64 * 256)}
"""of each number: LLM.int8() (arXiv 2208.07339), but for a scale of each row; QLoRA's double
quantization (arXiv 2305.14314), with 8 bits of scale for 64 numbers and 32 for 64 * 256"""
Kind = Literal["policy", "value", "reference", "reward"]
Place = Literal["device", "offloaded", "host", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Models:
    """What a run trains, on torch's meta device: every shape and type, frozen where it is frozen.

    It is what :mod:`ppocli.tasks.building` builds.
    """

    lm: Any
    value_head: nn.Module | None
    branch: nn.ModuleList | None = None
    """a value branch's own layers, and what follows them"""
    value_lm: Any = None
    """the trunk of a value model"""

    @property
    def trunks(self) -> list[Any]:
        """The language model, and the trunk of a value model if there is one."""
        return [lm for lm in (self.lm, self.value_lm) if lm is not None]

    @property
    def head(self) -> Any:
        """What makes logits of the model's states, or the one score of a reward model."""
        return self.lm.get_output_embeddings() or self.lm.score

    @property
    def heads(self) -> list[nn.Module]:
        """That, and the value head."""
        return [m for m in (self.head, self.value_head) if m is not None]

    @property
    def value_modules(self) -> list[nn.Module]:
        """Everything of the value function."""
        return [m for m in (self.branch, self.value_lm, self.value_head) if m is not None]


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
    """parameters with a gradient and optimizer state"""
    gradients: int = 0
    """bytes of the gradients, as many as of the weights that train"""
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

    @property
    def saved(self) -> int:
        """Bytes in a checkpoint."""
        return (self.gradients if self.adapter else self.size) + self.state


# Shapes -------------------------------------------------------------------------------------------

def read_config(name: str, *, key: str, revision: str | None = None, trust_remote_code: bool = False
                ) -> Any:
    """A model's configuration; of a folder nothing but ``config.json`` has to be there.

    Raises:
        InputError: no such model, or its configuration can't be read.
    """
    source: str = str(Path(name).expanduser())
    if not (Path(source) / "config.json").is_file():
        source, revision = model_files.find_whole(name, key=key, revision=revision)
    section = "model" if key.startswith("model.") else key.rpartition(".")[0]
    with model_config.loading(f"configuration of {name}", key, f"{section}.trust_remote_code=true"):
        return transformers.AutoConfig.from_pretrained(source, revision=revision,
                                                       trust_remote_code=trust_remote_code)


def models_of(cfg: schema.TrainConfig, config: Any | None = None) -> Models:
    """What a run trains, without weights.

    Args:
        config: of ``model.path``, if it has been read already.

    Raises:
        InputError: a model is missing, transformers can't make a language model of it, or its
            layers can't be told apart.
        ConfigError: the adapter doesn't fit the model.
    """
    model, kind, value = cfg.model, adapters.adapter_kind(cfg.model), cfg.model.value
    scores = tasks.task_name(cfg) == "reward_model"
    lm = _empty(model, config, None, "model.path", dtype=DTYPES[
        cfg.hardware.weights if kind is None else model.dtype or cfg.hardware.precision],
        kind="AutoModelForSequenceClassification" if scores else None)
    model_config.check_text_alone(lm)
    head = branch = value_lm = None
    with model_config.loading(f"outline of {model.path}", "model.path"):
        if kind is not None:
            settings = peft_config(kind, adapters.adapter_settings(model), revision=model.revision,
                                   tokenizer=model.path, pair=lm.config.is_encoder_decoder)
            with torch.device("meta"):
                attach(lm, settings, seed=0)
        policy.freeze_lower_layers(lm, model.num_layers_unfrozen)
        with torch.device("meta"):
            if algorithm.needs_critic(cfg) and value.kind == "model":
                value_lm, head = _value_model(model)
                policy.freeze_lower_layers(value_lm, value.num_layers_unfrozen)
            elif algorithm.needs_critic(cfg):
                head = policy.build_value_head(lm, 0)
                branch = _branch(lm, value.num_layers_unfrozen) if value.kind == "branch" else None
            own = value_lm or branch
            if own is not None and value.freeze_attention:
                policy.freeze_attention(own)
    return Models(lm, head, branch, value_lm)


def _empty(cfg: schema.ModelConfig, config: Any | None, path: str | None, key: str,
           kind: str | None = None, dtype: torch.dtype | None = None) -> Any:
    """A model on the meta device.

    Args:
        path: where it is (default: ``model.path``).
        key: where the path comes from, for messages.
        kind: the class of transformers' that makes it (default: of language models).
        dtype: of its weights (default: fp32).
    """
    name, trust = path or cfg.path, cfg.trust_remote_code
    if config is None:
        config = read_config(name, key=key, revision=None if path else cfg.revision,
                             trust_remote_code=trust)
    auto = getattr(transformers, kind or ("AutoModelForSeq2SeqLM" if config.is_encoder_decoder
                                          else "AutoModelForCausalLM"))
    if kind == "AutoModelForSequenceClassification" and path is None:  # a language model's
        config = copy.deepcopy(config)
        config.num_labels = 1
    with model_config.loading(f"outline of {name}", key), torch.device("meta"):
        model = auto.from_config(config, dtype=dtype or torch.float32, trust_remote_code=trust,
                                 **model_config.attention_wanted(cfg, config))
        model.tie_weights()
    return model


def _value_model(cfg: schema.ModelConfig) -> tuple[Any, nn.Module]:
    """As :func:`ppocli.models.loading.reference_and_value.load_value_model`."""
    key = "model.value.path" if cfg.value.path else "model.path"
    cfg = value_start(cfg)
    config = read_config(cfg.path, key=key, revision=cfg.revision,
                         trust_remote_code=cfg.trust_remote_code)
    scores = model_files.scores(config)
    whole = _empty(cfg, config, cfg.path, key,
                   "AutoModelForSequenceClassification" if scores else "AutoModel")
    trunk, score = whole.base_model, getattr(whole, "score", None)
    if scores and config.num_labels == 1 and isinstance(score, nn.Linear):
        return trunk, policy.ScoreHead(score)
    return trunk, policy.ValueHead(state_width(trunk), torch.Generator())


def _branch(lm: Any, count: int) -> nn.ModuleList:
    """As :class:`ppocli.models.policy.ValueBranch`: copies of the top layers and of what
    follows them, which is what freezing the layers below leaves to train."""
    if lm.config.is_encoder_decoder or not 0 < count < len(layer_stack(lm)):
        raise ValueError(f"no branch of {count} layers fits it")
    lm = copy.deepcopy(lm)
    policy.freeze_lower_layers(lm, count)
    stack: nn.ModuleList = layer_stack(lm)
    owner = lm.get_submodule(stack_path(lm).rpartition(".")[0])
    after = [m for m in owner.children()
             if m is not stack and any(p.requires_grad for p in m.parameters())]
    return nn.ModuleList([*list(stack)[-count:], *after]).requires_grad_(True)


# Parts --------------------------------------------------------------------------------------------

def parts_of(cfg: schema.TrainConfig, models: Models, *, rewards: bool = True
             ) -> tuple[tuple[Part, ...], dict[str, str]]:
    """Everything that holds weights in a run of ``cfg``, and what of it can't be told, and why.

    Args:
        models: of ``cfg``.
        rewards: whether those of the rewards are among them.
    """
    parts, unknown = list(_trained_parts(cfg, models)), {}

    def add(name: str, find: Callable[..., Iterable[Part]], *arguments: Any) -> None:
        try:
            parts.extend(find(*arguments))
        except PpocliError as error:
            unknown[name] = error.what

    if tasks.task_name(cfg) not in tasks.DATA_TASKS:
        add("reference", _reference_parts, cfg, models.lm)
    for key, fn, kwargs in schema.rewards_of(cfg.reward) if rewards else []:
        if fn in MODEL_REWARDS and isinstance(kwargs, dict) and "model" in kwargs:
            add(f"reward {kwargs['model']}", _reward_parts, cfg.model, f"{key}.kwargs.model",
                kwargs)
        elif fn is not None and fn not in BUILTIN_REWARDS:
            unknown[f"reward {fn}"] = "your function"
    return tuple(parts), unknown


def _trained_parts(cfg: schema.TrainConfig, models: Models) -> Iterator[Part]:
    lm = models.lm
    # heads cast their own weights where they need them, or never; embeddings are looked up
    tables = [m for whole in (lm, *models.value_modules) for m in whole.modules()
              if isinstance(m, nn.Embedding)]
    apart = {id(p) for m in (*models.heads, *tables) for p in m.parameters()}
    quantized = quantized_weights(cfg, models)
    pieces: list[tuple[Kind, str, list[Any], schema_training.OptimizerConfig]] = [
        ("policy", "policy", [lm], tasks.updates_of(cfg).optimizer),
        ("value", f"value {cfg.model.value.kind}", models.value_modules,
         algorithm.value_optimizer(cfg.ppo))]
    for kind, name, modules, optimizer in pieces:
        if not (parameters := [p for m in modules for p in m.parameters()]):
            continue
        trained = [p for p in parameters if p.requires_grad]
        adapter = kind == "policy" and bool(cfg.model.peft)
        state = [size for p in trained for size in state_sizes(optimizer, p.shape)]
        # what a master copy holds beside a weight in bf16
        state += [2 * p.numel() for p in trained if p.dtype == torch.bfloat16]
        yield Part(
            kind=kind, name=name, parameters=count(parameters), trained=count(trained),
            gradients=sum(p.nbytes for p in trained),
            size=sum(quantized.get(id(p), p.nbytes) for p in parameters),
            state=sum(state), sharded=True, adapter=adapter,
            cast=count([p for p in trained if p.dim() == 2 and id(p) not in apart
                        and p.dtype == torch.float32]),
            largest=max((p.numel() for p in trained), default=0))


def count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def state_sizes(optimizer: schema_training.OptimizerConfig, shape: torch.Size) -> tuple[int, ...]:
    """Bytes of each tensor that an optimizer keeps for a weight, as
    :mod:`ppocli.training.optimizers` builds it.

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


def quantized_weights(cfg: schema.TrainConfig, models: Models) -> dict[int, int]:
    """Bytes of each weight, by its id, that ``model.quantization`` changes: those of linear layers,
    but of the output embedding; transformers keeps one of T5's in fp32."""
    if cfg.model.quantization is None:
        return {}
    lm, head = models.lm, models.head.weight
    exact = "wo" if lm.config.model_type in RELATIVE_POSITIONS else None
    found = {}
    for name, module in lm.named_modules():
        if isinstance(module, (nn.Linear, transformers_internals.conv1d())) and "lora_" not in name:
            weight = module.weight
            if weight is not head and not weight.requires_grad:
                bits = 32 if exact in name.split(".") else QUANTIZED_BITS[cfg.model.quantization]
                found[id(weight)] = round(weight.numel() * bits / 8)
    return found


def _reference_parts(cfg: schema.TrainConfig, lm: Any) -> Iterator[Part]:
    """As :mod:`ppocli.models.policy` keeps it."""
    model, wanted = cfg.model, cfg.model.reference
    if (kind := model_config.reference_kind(model)) in ("none", "adapter"):
        return
    if kind == "shared":  # copies of what trains
        number = count(p for p in lm.parameters() if p.requires_grad)
        size = number * DTYPES[cfg.hardware.weights].itemsize
        in_parts = cfg.hardware.zero_stage == 3
    else:
        whole = _empty(model, lm.config if wanted.path is None else None, wanted.path,
                       "model.reference.path")
        number = count(whole.parameters())
        size = number * frozen_dtype(model, cfg.hardware).itemsize
        in_parts = cfg.hardware.zero_stage == 3 and algorithm.reference_sharded(cfg)
    place: Place = "offloaded" if wanted.offload else "device" if wanted.device is None else (
        "host" if wanted.device == "cpu" else "elsewhere")
    yield Part(kind="reference", name="reference", parameters=number, size=size, in_parts=in_parts,
               place=place)


def _reward_parts(cfg: schema.ModelConfig, key: str, kwargs: dict[str, Any]) -> Iterator[Part]:
    name = str(kwargs["model"])
    config = read_config(name, key=key, revision=kwargs.get("revision"),
                         trust_remote_code=bool(kwargs.get("trust_remote_code")))
    number = count(_empty(
        cfg, config, name, key, "AutoModelForSequenceClassification").parameters())
    yield Part(kind="reward", name=f"reward {name}", parameters=number,
               size=number * DTYPES.get(str(kwargs.get("dtype", "fp32")), torch.float32).itemsize,
               place="host" if str(kwargs.get("device", "auto")) == "cpu" else "device")
