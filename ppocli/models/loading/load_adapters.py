"""Adapters of PEFT on a frozen causal LM: attached, switched off, saved, loaded, merged.

The causal LM keeps its own class: LoRA's layers stand inside it, virtual tokens become a part of
it. PEFT's model around it is kept for the format of PEFT's files.
"""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ppocli.config.text import error_line
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.models.loading import peft_internals
from ppocli.models.trunk import VirtualTokens
from ppocli.runs.model_files import ADAPTER_BASE, ADAPTER_WEIGHTS, BaseIdentity

SCORE = "score.weight"
"""the weight of the head by which transformers' decoders score a text"""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on a causal LM."""

    model: Any
    """PEFT's model around the causal LM"""
    base: BaseIdentity


def base_tensors(lm: Any) -> dict[str, torch.Tensor]:
    """The weights and buffers of a causal LM without its adapter, by the names of a bare one."""
    return {peft_internals.bare_name(name): tensor
            for name, tensor in lm.state_dict(keep_vars=True).items()
            if not peft_internals.belongs_to_adapter(name)}


def tensors_digest(tensors: Mapping[str, torch.Tensor],
                   whole: Callable[[torch.Tensor], AbstractContextManager[Any]] = nullcontext
                   ) -> str:
    """SHA-256 over each tensor's name, shape, type and the sum of its bytes as integers.

    A sum of integers does not depend on the order of summation, so the digest is the same for any
    number of threads and on any device; it notices another model, not a malicious one.

    Args:
        whole: context in which a tensor that lies in parts on several ranks is whole.
    """
    parts = []
    for name, tensor in tensors.items():
        with whole(tensor):
            bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
            total = int(bits.sum(dtype=torch.int64))
            parts.append((name, list(tensor.shape), str(tensor.dtype), total))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def identify(lm: Any, path: str, revision: str | None) -> BaseIdentity:
    """The identity of a bare causal LM's weights as they are in memory; the head of one that scores
    texts belongs to its adapter."""
    storage = str(getattr(lm, "quantization_method", None) or lm.dtype).removeprefix("torch.")
    tensors = {name: tensor for name, tensor in lm.state_dict().items() if name != SCORE}
    return BaseIdentity(path, revision, storage, tensors_digest(tensors))


def peft_config(kind: str, settings: Mapping[str, Any], *, pair: bool, revision: str | None,
                tokenizer: str, scores: bool = False) -> Any:
    """PEFT's configuration of an adapter.

    Args:
        kind: lora, prefix or prompt.
        pair: for an encoder-decoder.
        tokenizer: that encodes a ``prompt_tuning_init_text``.
        scores: for a model that scores texts.

    Raises:
        ConfigError: PEFT refuses the settings, or they don't apply to an encoder-decoder.
    """
    import peft

    classes = {"lora": peft.LoraConfig, "prefix": peft.PrefixTuningConfig,
               "prompt": peft.PromptTuningConfig}
    if pair and kind != "lora":
        raise ConfigError(f"An encoder-decoder takes no {kind} adapter here.",
                          where="model.peft.type", fix="set model.peft.type=lora")
    fields = dict(settings)
    if str(fields.get("prompt_tuning_init", "")).upper() == "TEXT":
        fields.setdefault("tokenizer_name_or_path", tokenizer)
    try:
        task = "SEQ_2_SEQ_LM" if pair else "SEQ_CLS" if scores else "CAUSAL_LM"
        return classes[kind](task_type=task, revision=revision, **fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"PEFT refuses the adapter: {error}", where="model.peft", fix="see the "
                          "fields of its configuration in PEFT's documentation") from error


def attach(lm: Any, config: Any, *, seed: int) -> Any:
    """Freeze a causal LM and attach a new adapter in fp32; equal seeds give equal adapters.

    Returns:
        PEFT's model around it.

    Raises:
        ConfigError: the adapter doesn't fit the model.
    """
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = peft_internals.wrap(lm, config)
            if config.is_prompt_learning:
                # moved, trained and sharded with the model
                lm.virtual_tokens = VirtualTokens(
                    model, in_cache=config.peft_type.value == "PREFIX_TUNING")
    except (ValueError, TypeError, AttributeError) as error:
        fix = "for LoRA name the layers: model.peft.target_modules=all-linear, or =[NAME,...]"
        if needed := re.search(r"specify `(num_\w+|token_dim)`", str(error)):
            fix = f"give it: model.peft.{needed[1]}=N"
        raise ConfigError(f"The adapter does not fit {type(lm).__name__}: {error}",
                          where="model.peft", fix=fix) from error
    # logits are computed from the output embedding's own weights, only where they are needed; an
    # input embedding that is tied to it has them too, and merging its adapter would change both
    embeddings = lm.get_output_embeddings()  # None of a model that scores texts
    embedding_ids = set() if embeddings is None else {id(p) for p in embeddings.parameters()}
    if any(id(p) in embedding_ids and (peft_internals.belongs_to_adapter(name)
                                       or peft_internals.bare_name(name) != name)
           for name, p in lm.named_parameters(remove_duplicate=False)):
        raise ConfigError("The adapter covers the output embedding, which ppocli can't train.",
                          where="model.peft.target_modules, model.peft.modules_to_save",
                          fix="leave it out, and the input embedding that is tied to it; an "
                          "adapter that covers it is merged where model.peft is left out")
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def adapter_tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The adapter's weights by the names that PEFT writes."""
    tensors = peft_internals.saved_tensors(adapter.model)
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def describe_adapter(adapter: Adapter, folder: Path) -> None:
    """Write the files that belong to an adapter's weights: PEFT's configuration, and the identity
    of the base."""
    config = copy.deepcopy(adapter.model.active_peft_config)
    config.inference_mode = True
    for name, value in vars(config).items():
        if isinstance(value, set):  # PEFT would write it in an order of this process
            setattr(config, name, sorted(value))
    config.save_pretrained(str(folder))
    (folder / ADAPTER_BASE).write_text(json.dumps(asdict(adapter.base), indent=2) + "\n",
                                       encoding="utf-8")


def fill_adapter(adapter: Adapter, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Replace an adapter's weights by saved ones.

    Raises:
        CheckpointError: names or shapes are not those of this adapter.
    """
    from peft import set_peft_model_state_dict

    expected, saved = ({name: tuple(tensor.shape) for name, tensor in state.items()}
                       for state in (peft_internals.saved_tensors(adapter.model), tensors))
    if wrong := sorted(name for name in expected.keys() | saved.keys()
                       if expected.get(name) != saved.get(name)):
        in_file, here = (shapes.get(wrong[0], "not there") for shapes in (saved, expected))
        raise CheckpointError(
            f"The adapter in {where} does not fit: {wrong[0]} is {in_file} in the file, "
            f"{here} here.",
            where="model.peft", fix="use the model.peft that it was trained with")
    set_peft_model_state_dict(adapter.model, tensors)


def merged_tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The state dict of the causal LM with LoRA's products added to its weights, in its own type.
    The model stays as it is: one layer at a time is copied and merged."""
    lm = adapter.model.base_model.model
    tensors = {name: tensor.detach() for name, tensor in base_tensors(lm).items()}
    for name, module in lm.named_modules():
        tensors |= {f"{peft_internals.bare_name(name)}.{part}": tensor
                    for part, tensor in peft_internals.merged_layer(module).items()}
    return tensors


def _check_goes_on(config: Any, settings: Mapping[str, Any], folder: Path) -> None:
    """Refuse settings that contradict the adapter that is to be trained further."""
    for name, value in settings.items():
        if name == "target_modules" and str(value).lower() == "all-linear":
            config.target_modules = value  # PEFT finds them on the base; the weights must fit those
            continue
        adapter_value = (config.peft_type.value.lower().partition("_")[0] if name == "type" else
                         getattr(config, name))
        both = [sorted(each) if isinstance(each, set | list) else each
                for each in (adapter_value, value)]
        if name != "lora_dropout" and both[0] != both[1]:
            raise ConfigError(f"model.peft.{name} is {value}, but the adapter in {folder} has "
                              f"{both[0]}, and goes on with it.", where=f"model.peft.{name}",
                              fix=f"model.peft.{name}={both[0]}, or leave model.peft out to merge "
                              "the adapter")


def changes_embeddings(lm: Any, folder: Path) -> bool:
    """Whether the adapter in a folder changes or replaces an embedding of ``lm``."""
    from safetensors import safe_open

    ends = [part for part in (lm.get_input_embeddings(), lm.get_output_embeddings())
            if part is not None]
    names = tuple(f"base_model.model.{name}." for name, module in lm.named_modules()
                  if any(module is part for part in ends))
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        return any(key.startswith(names) for key in file.keys())  # noqa: SIM118


def merged_from(lm: Any, folder: Path) -> Any:
    """``lm`` with the adapter in a folder merged into it, whichever layers it changes.

    Raises:
        InputError: the files are damaged, or don't fit.
    """
    try:
        return peft_internals.merge(peft_internals.load_frozen(lm, folder)).eval()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise InputError(f"The adapter in {folder} can't be merged: {error_line(error)}",
                         where=str(folder), fix="copy the folder again") from error


def load_adapter(lm: Any, folder: Path, base: BaseIdentity,
                 goes_on: Mapping[str, Any] | None = None) -> Adapter:
    """Put a saved adapter on its base, frozen unless it ``goes_on``.

    Args:
        goes_on: type and settings of ``model.peft``, if the adapter is to be trained further.

    Raises:
        ConfigError: these are not the adapter's own.
        InputError: the files are missing, damaged, or of an adapter of another kind.
        CheckpointError: the adapter doesn't fit the base.
    """
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise InputError(f"The adapter in {folder} can't be loaded: {error}", where=str(folder),
                         fix="copy the folder again") from error
    config.inference_mode = goes_on is None
    if goes_on is not None:
        _check_goes_on(config, goes_on, folder)
    if hasattr(config, "lora_dropout"):
        config.lora_dropout = (goes_on or {}).get("lora_dropout", 0.0)
    adapter = Adapter(attach(lm, config, seed=0), base)
    fill_adapter(adapter, tensors, str(folder))
    if goes_on is None:
        lm.requires_grad_(False)
    lm.eval()
    return adapter
