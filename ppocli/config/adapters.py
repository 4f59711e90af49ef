"""``model.peft``: the adapter that trains in place of the model. It is checked against a table of
PEFT's fields, since importing PEFT loads torch, which takes seconds."""

from collections.abc import Mapping
from typing import Any

from ppocli.builtin.names import shipped_table
from ppocli.config import extras, keys, schema
from ppocli.config.text import did_you_mean

_CLASSES = {"lora": "LoraConfig", "prefix": "PrefixTuningConfig", "prompt": "PromptTuningConfig"}
_PEFT_NAMES = {"prefix_tuning": "prefix", "prompt_tuning": "prompt"}
TYPE_KEYS = ("type", "peft_type")
FILLED_IN = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path",
             "revision", "inference_mode")
"""fields of every PEFT config that ppocli fills in"""
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}


def peft_fields(kind: str) -> dict[str, str]:
    """Fields of PEFT's configuration that a user may set -> their types; ``any`` isn't checked."""
    table: dict[str, list[str]] = shipped_table("library_keys.yaml")["peft"][kind]
    return {name: takes for takes, names in table.items() for name in names}


def adapter_kind(model: schema.ModelConfig) -> str | None:
    """``lora``, ``prefix`` or ``prompt``; None without an adapter, or for an unknown kind."""
    _, type_name = _type(model)
    kind = _PEFT_NAMES.get(type_name.lower(), type_name.lower())
    return kind if kind in _CLASSES else None


def _type(model: schema.ModelConfig) -> tuple[str, str]:
    """The key that names the adapter's kind, and its value; "" for both if there is none."""
    return next(((name, str(model.peft[name])) for name in TYPE_KEYS
                 if model.peft and model.peft.get(name) is not None), ("", ""))


def adapter_settings(model: schema.ModelConfig) -> dict[str, Any]:
    """The fields for PEFT's configuration, without its class."""
    return {name: value for name, value in (model.peft or {}).items()
            if name not in (*TYPE_KEYS, "task_type")}


def adapter_rules(config: schema.TrainConfig) -> keys.Rules:
    """Rules on ``model.peft``, ``model.quantization`` and settings that they exclude."""
    model = config.model
    if not model.peft:
        yield (model.reference.kind == "adapter", "model.reference.kind, model.peft",
               "the reference is an adapter switched off, and there is none: give model.peft or "
               "another kind")
        yield (model.quantization is not None, "model.quantization, model.peft",
               f"{model.quantization} weights can't be trained: train an adapter on them, e.g. "
               "model.peft.type=lora")
        return
    if (kind := adapter_kind(model)) is None or not extras.installed("peft"):
        key, type_name = _type(model)
        yield (not type_name, "model.peft",
               "type is missing; it must be given: model.peft.type=lora (or prefix, prompt)")
        yield (type_name and kind is None, f"model.peft.{key}", f"{type_name} must be one of "
               f"{', '.join(_CLASSES)}{did_you_mean(type_name, _CLASSES)}")
        yield kind, "model.peft", f"needs the library PEFT: {extras.pip_line('peft')}"
    else:
        yield from _fields(kind, model)
    yield from _adapter_conflicts(model)
    yield (config.hardware.zero_stage == 3 and adapter_settings(model).get("use_dora"),
           "model.peft.use_dora, hardware.zero_stage", "DoRA reads the norms of whole weights, "
           "which ZeRO 3 shards: use zero_stage 0 to 2")
    if model.quantization is not None:
        yield from _quantization(config)


def _fields(kind: str, model: schema.ModelConfig) -> keys.Rules:
    """Rules on the fields for PEFT's configuration."""
    settings, fields = adapter_settings(model), peft_fields(kind)
    task = (model.peft or {}).get("task_type")
    yield (task not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"), "model.peft.task_type",
           f"{task} must be CAUSAL_LM or SEQ_2_SEQ_LM; the model says which, so it can be left out")
    for name, value in settings.items():
        key, takes = f"model.peft.{name}", _TYPES.get(fields.get(name, ""))
        yield name in FILLED_IN, key, "is filled in by ppocli; leave it out"
        yield (name not in (*FILLED_IN, *fields), key, "unknown key: "
               f"{_CLASSES[kind]} of PEFT has no such field" + did_you_mean(name, fields))
        yield (takes and (not isinstance(value, takes)
                          or isinstance(value, bool) != (bool in takes)), key,
               f"{value!r} must be of the type {fields.get(name)}")
    count = "r" if kind == "lora" else "num_virtual_tokens"
    size = settings.get(count)
    yield isinstance(size, int) and size < 1, f"model.peft.{count}", f"{size} must be >= 1"
    yield (kind != "lora" and size is None, f"model.peft.{count}",
           f"missing; it must be given: model.peft.{count}=16")
    if kind == "lora":
        yield from _lora(model, settings)


def _lora(model: schema.ModelConfig, settings: Mapping[str, Any]) -> keys.Rules:
    dropout = settings.get("lora_dropout", 0.0)
    yield (isinstance(dropout, (int, float)) and not 0 <= dropout < 1, "model.peft.lora_dropout",
           f"{dropout} must be >= 0 and < 1")
    init = settings.get("init_lora_weights", True)
    yield (init not in (True, False, "gaussian", "orthogonal"), "model.peft.init_lora_weights",
           f"{init} must be one of true, false, gaussian, orthogonal: others change the base, or "
           "need data")
    yield (settings.get("layer_replication"), "model.peft.layer_replication",
           "changes the base, which has to stay as it is")
    yield (settings.get("bias", "none") != "none" and schema.reference_kind(model) == "adapter",
           "model.peft.bias, model.reference.kind", "biases of the base would train, and the "
           "adapter switched off would not be the starting policy any more: leave bias out or set "
           "model.reference.kind=copy")


def _adapter_conflicts(model: schema.ModelConfig) -> keys.Rules:
    yield (adapter_kind(model) == "prefix" and model.gradient_checkpointing,
           "model.peft, model.gradient_checkpointing", "prefix tuning puts its tokens into the "
           "cache, which gradient checkpointing doesn't use: set "
           "model.gradient_checkpointing=false")
    yield (model.num_layers_unfrozen >= 0, "model.num_layers_unfrozen, model.peft",
           "with an adapter the whole base is frozen: leave num_layers_unfrozen at -1")
    yield (model.value.kind == "branch", "model.value.kind, model.peft", "a branch would copy and "
           "train layers of the frozen base: set model.value.kind=head or =model")
    yield (model.reference.kind == "shared", "model.reference.kind, model.peft", "with an adapter "
           "the reference is the policy with the adapter switched off: "
           "model.reference.kind=adapter (or auto), or copy")
    yield (model.reference.offload and schema.reference_kind(model) == "adapter",
           "model.reference.offload, model.peft", "there is nothing to offload: the reference is "
           "the policy with its adapter switched off")


def _quantization(config: schema.TrainConfig) -> keys.Rules:
    model, hardware = config.model, config.hardware
    yield (not extras.installed("bitsandbytes"), "model.quantization",
           f"needs the library bitsandbytes: {extras.pip_line('bitsandbytes')}")
    yield (hardware.device == "cpu", "model.quantization, hardware.device",
           f"a {model.quantization} base is computed with on a GPU: set hardware.device=cuda")
    yield (hardware.zero_stage == 3, "model.quantization, hardware.zero_stage",
           "ZeRO 3 can't shard quantized weights: use zero_stage 0 to 2")
    yield (model.dtype is not None and schema.reference_kind(model) == "adapter",
           "model.quantization, model.dtype",
           f"the base is stored in {model.quantization}: leave model.dtype out")
