"""``model.peft``: which adapter trains in place of the model, checked against a table of PEFT's
fields: importing PEFT loads torch, which takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from ppocli.config.schema import ModelConfig, TrainConfig, reference_kind
from ppocli.text import did_you_mean

_CLASSES = {"lora": "LoraConfig", "prefix": "PrefixTuningConfig", "prompt": "PromptTuningConfig"}
_VIRTUAL = {"int": ("num_virtual_tokens", "token_dim"),
            "": ("num_transformer_submodules", "num_attention_heads", "num_layers",
                 "modules_to_save")}
FIELDS: dict[str, tuple[dict[str, tuple[str, ...]], ...]] = {
    "lora": ({
        "int": ("r", "lora_alpha", "qalora_group_size"), "float": ("lora_dropout",),
        "bool": ("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias",
                 "ensure_weight_tying"),
        "": ("target_modules", "exclude_modules", "bias", "modules_to_save", "init_lora_weights",
             "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
             "megatron_config", "megatron_core", "trainable_token_indices",
             "alora_invocation_tokens", "layer_replication", "target_parameters")},),
    "prefix": (_VIRTUAL, {"int": ("encoder_hidden_size",), "bool": ("prefix_projection",),
                          "": ("init_weights",)}),
    "prompt": (_VIRTUAL, {"": ("prompt_tuning_init", "prompt_tuning_init_text",
                               "tokenizer_name_or_path", "tokenizer_kwargs")})}
"""fields of PEFT's configurations that a user may give, by their type, "" where it isn't checked;
a test holds them against the installed PEFT"""
_PEFT_NAMES = {"prefix_tuning": "prefix", "prompt_tuning": "prompt"}
TYPE_KEYS = ("type", "peft_type")
FILLED_IN = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path",
         "revision", "inference_mode")
"""fields of every PEFT config that ppocli fills in"""
_INITS = (True, False, "gaussian", "orthogonal")
"""of ``init_lora_weights``: those that leave the base as it is and need no data"""
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,),
                                       "str": (str,)}

Found = Iterator[tuple[tuple[str, ...], str]]


def adapter_kind(model: ModelConfig) -> str | None:
    """``lora``, ``prefix`` or ``prompt``; None where no adapter is asked for, or no such one."""
    given = next((str(model.peft[name]).lower() for name in TYPE_KEYS
                  if (model.peft or {}).get(name) is not None), None) if model.peft else None
    kind = _PEFT_NAMES.get(given or "", given)
    return kind if kind in _CLASSES else None


def adapter_settings(model: ModelConfig) -> dict[str, Any]:
    """The fields given for the PEFT config, without what says its class."""
    return {name: value for name, value in (model.peft or {}).items()
            if name not in (*TYPE_KEYS, "task_type")}


def field_types(kind: str) -> dict[str, str]:
    """Name -> type of every field that a user may give; "" where the type isn't checked."""
    return {name: hint for table in FIELDS[kind] for hint, names in table.items()
            for name in names}


def adapter_problems(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    """What is wrong with ``model.peft``, ``model.quantization`` and what doesn't go with them."""
    model = config.model
    if not model.peft:
        if model.reference.kind == "adapter":
            yield (("model.reference.kind", "model.peft"),
                   "the reference is an adapter switched off, and there is none: give model.peft "
                   "or another kind")
        if model.quantization is not None:
            yield (("model.quantization", "model.peft"),
                   f"{model.quantization} weights can't be trained: train an adapter on them, e.g. "
                   "model.peft.type=lora")
        return
    yield from _contents(model)
    yield from _beside_adapter(config)
    yield from _quantization(config)


def _contents(model: ModelConfig) -> Found:
    """The mapping itself."""
    given = [name for name in TYPE_KEYS if (model.peft or {}).get(name) is not None]
    kind = adapter_kind(model)
    if not given:
        yield (("model.peft",), "type is missing; it must be given: model.peft.type=lora "
               "(or prefix, prompt)")
        return
    if kind is None:
        name, value = given[0], str((model.peft or {})[given[0]])
        yield ((f"model.peft.{name}",), f"{value} must be one of {', '.join(_CLASSES)}"
               + did_you_mean(value, list(_CLASSES)))
        return
    task = (model.peft or {}).get("task_type")
    if task not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):
        yield (("model.peft.task_type",), f"{task} must be CAUSAL_LM or SEQ_2_SEQ_LM; the model "
               "says which, so it can be left out")
    if importlib.util.find_spec("peft") is None:
        yield ("model.peft",), 'needs the library PEFT: pip install "ppocli[peft]"'
        return
    fields = field_types(kind)
    for name, value in adapter_settings(model).items():
        key = (f"model.peft.{name}",)
        if name in FILLED_IN:
            yield key, "is filled in by ppocli; leave it out"
        elif name not in fields:
            yield key, (f"unknown key: {_CLASSES[kind]} of PEFT has no such field"
                        + did_you_mean(name, list(fields)))
        elif (text := _wrong_type(fields[name], value)) is not None:
            yield key, text
    if kind == "lora":
        yield from _lora(model, adapter_settings(model))
    else:
        yield from _virtual_tokens(kind, model)


def _wrong_type(hint: str, value: Any) -> str | None:
    takes = _TYPES.get(hint)
    if takes is None or (isinstance(value, takes) and isinstance(value, bool) == (hint == "bool")):
        return None
    return f"{value!r} must be of the type {hint}"


def _lora(model: ModelConfig, settings: Mapping[str, Any]) -> Found:
    if settings.get("lora_dropout"):
        yield (("model.peft.lora_dropout",), "must be 0: with dropout the ratio would not be 1 "
               "before the first update")
    r = settings.get("r", 8)
    if isinstance(r, int) and r < 1:
        yield ("model.peft.r",), f"{r} must be >= 1"
    if settings.get("init_lora_weights", True) not in _INITS:
        yield (("model.peft.init_lora_weights",), f"{settings['init_lora_weights']} must be one of "
               "true, false, gaussian, orthogonal: others change the base, or need data")
    if settings.get("layer_replication"):
        yield (("model.peft.layer_replication",), "changes the base, which has to stay as it is")
    if settings.get("bias", "none") != "none" and reference_kind(model) == "adapter":
        yield (("model.peft.bias", "model.reference.kind"), "biases of the base would train, and "
               "the adapter switched off would not be the starting policy any more: leave bias out "
               "or set model.reference.kind=copy")


def _virtual_tokens(kind: str, model: ModelConfig) -> Found:
    count = (model.peft or {}).get("num_virtual_tokens")
    if count is None:
        yield (("model.peft.num_virtual_tokens",), "missing; it must be given: "
               "model.peft.num_virtual_tokens=16")
    elif isinstance(count, int) and count < 1:
        yield ("model.peft.num_virtual_tokens",), f"{count} must be >= 1"
    if kind == "prefix" and model.gradient_checkpointing:
        yield (("model.peft", "model.gradient_checkpointing"), "prefix tuning puts its tokens into "
               "the cache, which gradient checkpointing doesn't use: set "
               "model.gradient_checkpointing=false")


def _beside_adapter(config: TrainConfig) -> Found:
    model = config.model
    if model.num_layers_unfrozen >= 0:
        yield (("model.num_layers_unfrozen", "model.peft"), "with an adapter the whole base is "
               "frozen: leave num_layers_unfrozen at -1")
    if model.value.kind == "branch":
        yield (("model.value.kind", "model.peft"), "a branch would copy and train layers of the "
               "frozen base: set model.value.kind=head or =model")
    if model.reference.kind == "shared":
        yield (("model.reference.kind", "model.peft"), "with an adapter the reference is the "
               "policy with the adapter switched off: kind=adapter (or auto), or a copy")
    if model.reference.offload and reference_kind(model) == "adapter":
        yield (("model.reference.offload", "model.peft"), "there is nothing to offload: the "
               "reference is the policy with its adapter switched off")


def _quantization(config: TrainConfig) -> Found:
    model, hardware = config.model, config.hardware
    if model.quantization is None:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        yield (("model.quantization",), 'needs the library bitsandbytes: pip install "ppocli[8bit]"'
               )
    if hardware.device == "cpu":
        yield (("model.quantization", "hardware.device"), f"a {model.quantization} base is "
               "computed with on a GPU: set hardware.device=cuda")
    if hardware.zero_stage == 3:
        yield (("model.quantization", "hardware.zero_stage"), "ZeRO 3 can't shard quantized "
               "weights: use zero_stage 0 to 2")
    if model.dtype is not None and reference_kind(model) == "adapter":
        yield (("model.quantization", "model.dtype"), f"the base is stored in {model.quantization}:"
               " leave model.dtype out")
