"""``model.peft``: which adapter trains in place of the model, checked against the installed PEFT.

Importing PEFT loads torch, which takes seconds. So its configuration classes are read as source.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ppocli.config.schema import ModelConfig, TrainConfig, reference_kind
from ppocli.text import did_you_mean

_CLASSES = {"lora": ("tuners/lora/config.py", "LoraConfig"),
            "prefix": ("tuners/prefix_tuning/config.py", "PrefixTuningConfig"),
            "prompt": ("tuners/prompt_tuning/config.py", "PromptTuningConfig")}
_PEFT_NAMES = {"prefix_tuning": "prefix", "prompt_tuning": "prompt"}
TYPE_KEYS = ("type", "peft_type")
_OURS = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path",
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


def peft_folder() -> Path | None:
    """Where PEFT is installed; None where it isn't."""
    spec = importlib.util.find_spec("peft")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def _fields_of(folder: Path, kind: str) -> Mapping[str, str]:
    """Name -> annotation of every field that a user may give."""
    file, name = _CLASSES[kind]
    found: dict[str, str] = {}
    if kind != "lora":
        found |= _annotations(folder / "config.py", "PromptLearningConfig")
    found |= _annotations(folder / file, name)
    return {field: hint for field, hint in found.items()
            if field not in _OURS and "Config" not in hint}


def _annotations(file: Path, name: str) -> dict[str, str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {line.target.id: ast.unparse(line.annotation) for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)}


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
    folder = peft_folder()
    if folder is None:
        yield ("model.peft",), 'needs the library PEFT: pip install "ppocli[peft]"'
        return
    fields = _fields_of(folder, kind)
    for name, value in adapter_settings(model).items():
        key = (f"model.peft.{name}",)
        if name in _OURS:
            yield key, "is filled in by ppocli; leave it out"
        elif name not in fields:
            yield key, (f"unknown key: {_CLASSES[kind][1]} of PEFT has no such field"
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
