"""The private parts of PEFT that ppocli uses: its wrappers inside a model, the names that they give
to weights, and the virtual tokens of its models. No other module touches them."""

import copy
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ppocli.models.layer_stack import with_modules, without_hooks
from ppocli.models.transformers_internals import conv1d
from ppocli.runs.environment import check_parts

_PARTS = ("peft.tuners.tuners_utils:BaseTunerLayer.enable_adapters",
          "peft.utils:AuxiliaryTrainingWrapper.enable_adapters", "peft:PeftModelForSeq2SeqLM",
          "peft:PeftModelForSequenceClassification", "peft:PeftModelForCausalLM.get_prompt",
          "peft:PeftModelForCausalLM.active_peft_config", "peft:get_peft_model_state_dict",
          "peft:set_peft_model_state_dict")
_OWN_PARTS = ("modules_to_save", "virtual_tokens")
_WRAPPING_PARTS = ("base_layer", "original_module")
"""in names of weights: what belongs to an adapter, beside LoRA's, and what stands around the
base's"""


@cache
def probe() -> None:
    """Check that the installed PEFT has these parts.

    Raises:
        ConfigError: one is missing.
    """
    check_parts("peft", _PARTS)


def wrap(lm: Any, config: Any) -> Any:
    """PEFT's model around a causal LM, an encoder-decoder or a model that scores texts, whose head
    then trains as a whole; it replaces their layers."""
    import peft

    probe()
    if hasattr(config, "fan_in_fan_out") and any(isinstance(m, conv1d()) for m in lm.modules()):
        config.fan_in_fan_out = True  # PEFT would set it too, with a warning for every layer
    config.base_model_name_or_path = lm.config.name_or_path or None
    with warnings.catch_warnings():
        # warnings of several adapters on one model, which is not the case, and of old names in
        # transformers
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        warnings.filterwarnings("ignore", category=FutureWarning)
        kinds = {"SEQ_2_SEQ_LM": peft.PeftModelForSeq2SeqLM,
                 "SEQ_CLS": peft.PeftModelForSequenceClassification}
        return kinds.get(config.task_type, peft.PeftModelForCausalLM)(lm, config)


def belongs_to_adapter(name: str) -> bool:
    """Whether a weight of this name is an adapter's own."""
    return any(part.startswith("lora_") or part in _OWN_PARTS for part in name.split("."))


def bare_name(name: str) -> str:
    """The name that a weight of the base has without the adapter."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPING_PARTS)


def enable_adapter(lm: Any, enabled: bool) -> None:
    """Switch virtual tokens and adapters inside a model's layers on or off, without changing which
    parameters train."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    if hasattr(lm, "virtual_tokens"):
        lm.virtual_tokens.enabled = enabled
    trains = {name: p.requires_grad for name, p in lm.named_parameters()}
    for module in lm.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            module.enable_adapters(enabled)
    for name, parameter in lm.named_parameters():  # PEFT changes them on the way
        parameter.requires_grad_(trains[name])


def merged_layer(module: Any) -> dict[str, torch.Tensor]:
    """The weights of a base layer with its adapter merged, by their names in the layer; empty if it
    has no adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        merged = module.modules_to_save[module.active_adapters[0]]
    elif isinstance(module, BaseTunerLayer):
        layer = copy.deepcopy(module)
        layer.merge()
        merged = layer.get_base_layer()
    else:
        return {}
    return {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def load_frozen(lm: Any, folder: Path) -> Any:
    """PEFT's model around ``lm``, with the adapter in a folder, whatever it covers."""
    import peft

    probe()
    with warnings.catch_warnings():
        # of old names in transformers, and of tied weights, which :func:`merge` parts
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        return peft.PeftModel.from_pretrained(lm, str(folder))


def merge(peft_model: Any) -> Any:
    """The base with the adapter merged into its weights. If an adapter changes one of two layers
    that share a weight, such as input and output embedding, they are untied and
    ``config.tie_word_embeddings`` is cleared: PEFT would change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    lm: Any = peft_model.base_model.model
    shared = Counter(id(p) for _, p in lm.named_parameters(remove_duplicate=False))
    for module in lm.modules():
        layer: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else None
        weight = getattr(layer, "weight", None)
        if weight is not None and shared[id(weight)] > 1:
            layer.weight = torch.nn.Parameter(weight.detach().clone(), weight.requires_grad)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        lm = peft_model.merge_and_unload()
    ends = [part for part in (lm.get_input_embeddings(), lm.get_output_embeddings())
            if part is not None]
    if len(ends) == 2 and lm.config.get_text_config(decoder=True).tie_word_embeddings:
        if torch.equal(ends[0].weight, ends[1].weight):
            lm.tie_weights()
        else:
            untie(lm.config)
    return lm


def untie(config: Any) -> None:
    """Mark embeddings as untied in a model's configuration."""
    for part in (config, config.get_text_config(decoder=True)):
        part.tie_word_embeddings = False


def prompt(peft_model: Any, encoder: torch.nn.Module, rows: int) -> Any:
    """Virtual tokens for a number of rows: a cache of keys and values, or embeddings [rows, count,
    D].

    Args:
        encoder: makes them, in place of PEFT's own.
    """
    return with_modules(peft_model, {"prompt_encoder": encoder}).get_prompt(batch_size=rows)


def saved_tensors(peft_model: Any) -> dict[str, torch.Tensor]:
    """The adapter's weights by the names that PEFT writes."""
    from peft import get_peft_model_state_dict

    if peft_model.active_peft_config.is_prompt_learning:
        # PEFT runs what makes the tokens, on rank 0 alone, where hooks would wait for the others
        peft_model = with_modules(peft_model, {
            "prompt_encoder": without_hooks(peft_model.prompt_encoder)})
    return get_peft_model_state_dict(peft_model, save_embedding_layers=False)
