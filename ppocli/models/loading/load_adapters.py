"""Adapters of PEFT on a frozen causal LM: attached, switched off, saved, loaded, merged.

The causal LM keeps its own class: LoRA's layers stand inside it. PEFT's model around it is kept for
the format of PEFT's files. No other module touches PEFT's
private parts: its wrappers inside a model, and the names that they give to weights.
"""

import copy
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.models.layout import SequenceBatch
from ppocli.models.transformers_internals import conv1d
from ppocli.models.trunk import response_hidden, with_modules
from ppocli.runs.model_files import ADAPTER_BASE, ADAPTER_WEIGHTS, BaseIdentity

SCORE = "score.weight"
"""the weight of the head by which transformers' decoders score a text"""
_OWN_PARTS = ("modules_to_save",)
_WRAPPING_PARTS = ("base_layer", "original_module")
"""in names of weights: what belongs to an adapter, beside LoRA's, and what stands around the
base's"""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on a causal LM."""

    model: Any
    """PEFT's model around the causal LM"""
    base: BaseIdentity


class ValueAdapter(torch.nn.Module):
    """A second adapter on the policy's base, of the same shape and start as the policy's: the trunk
    of a value function that shares every frozen weight with the policy.

    It holds the adapter's parts alone. A pass runs a second view of the policy's model whose layers
    have these parts in place of the policy's, so that activations can be recomputed in the backward
    pass, and no switch is left behind.

    Args:
        lm: the policy's model, with its adapter in it.
    """

    split = None

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({
            name.replace(".", "/"): torch.nn.ModuleDict(
                {part: copy.deepcopy(child) for part, child in layer.named_children()
                 if belongs_to_adapter(part)})
            for name, layer in adapted_layers(lm).items()})

    def forward(self, lm: Any, batch: SequenceBatch, shared: list[torch.Tensor]) -> torch.Tensor:
        """[N, D] states that a value head reads, at the positions that predict the response tokens.

        Args:
            lm: the policy's model.
            shared: not read.
        """
        layers = adapted_layers(lm)
        modules = {}
        for key, parts in self.layers.items():
            layer = modules[key.replace("/", ".")] = copy.copy(layers[key.replace("/", ".")])
            layer._modules = {**layer._modules, **cast(torch.nn.ModuleDict, parts)}
        return response_hidden(with_modules(lm, modules), batch)


def peft_names(value_trunk: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The saved tensors of a :class:`ValueAdapter` by the names that PEFT writes."""
    return {".".join(("base_model.model", *(
        part.replace("/", ".") for part in name.split(".")[1:]
        if part not in ("default", *_OWN_PARTS)))): tensor
        for name, tensor in value_trunk.items()}


def adapted_layers(lm: Any) -> dict[str, Any]:
    """The layers of PEFT inside a model, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return {name: module for name, module in lm.named_modules()
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)}


def belongs_to_adapter(name: str) -> bool:
    """Whether a weight of this name is an adapter's own."""
    return any(part.startswith("lora_") or part in _OWN_PARTS for part in name.split("."))


def bare_name(name: str) -> str:
    """The name that a weight of the base has without the adapter."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPING_PARTS)


def base_tensors(lm: Any) -> dict[str, torch.Tensor]:
    """The weights and buffers of a causal LM without its adapter, by the names of a bare one."""
    return {bare_name(name): tensor
            for name, tensor in lm.state_dict(keep_vars=True).items()
            if not belongs_to_adapter(name)}


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


def peft_config(settings: Mapping[str, Any], *, pair: bool, revision: str | None,
                scores: bool = False) -> Any:
    """PEFT's configuration of a LoRA adapter.

    Args:
        pair: for an encoder-decoder.
        scores: for a model that scores texts.

    Raises:
        ConfigError: PEFT refuses the settings.
    """
    import peft

    try:
        task = "SEQ_2_SEQ_LM" if pair else "SEQ_CLS" if scores else "CAUSAL_LM"
        return peft.LoraConfig(task_type=task, revision=revision, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"PEFT refuses the adapter: {error}", where="model.peft", fix="see the "
                          "fields of its configuration in PEFT's documentation") from error


def _wrap(lm: Any, config: Any) -> Any:
    """PEFT's model around a causal LM, an encoder-decoder or a model that scores texts, whose head
    then trains as a whole; it replaces their layers."""
    import peft

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
            model = _wrap(lm, config)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"The adapter does not fit {type(lm).__name__}: {error}",
                          where="model.peft", fix="name the layers: "
                          "model.peft.target_modules=all-linear, or =[NAME,...]") from error
    # logits are computed from the output embedding's own weights, only where they are needed; an
    # input embedding that is tied to it has them too, and merging its adapter would change both
    embeddings = lm.get_output_embeddings()  # None of a model that scores texts
    embedding_ids = set() if embeddings is None else {id(p) for p in embeddings.parameters()}
    if any(id(p) in embedding_ids and (belongs_to_adapter(name)
                                       or bare_name(name) != name)
           for name, p in lm.named_parameters(remove_duplicate=False)):
        raise ConfigError("The adapter covers the output embedding, which ppocli can't train.",
                          where="model.peft.target_modules, model.peft.modules_to_save",
                          fix="leave it out, and the input embedding that is tied to it; an "
                          "adapter that has it can be merged first: ppocli export")
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


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


def write_adapter(adapter: Adapter, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write an adapter's weights, by the names that PEFT writes, and what belongs to them."""
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    describe_adapter(adapter, folder)


def fill_adapter(adapter: Adapter, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Replace an adapter's weights by saved ones.

    Raises:
        CheckpointError: names or shapes are not those of this adapter.
    """
    from peft import set_peft_model_state_dict

    expected, saved = ({name: tuple(tensor.shape) for name, tensor in state.items()}
                       for state in (adapter_tensors(adapter), tensors))
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
        tensors |= {f"{bare_name(name)}.{part}": tensor
                    for part, tensor in merged_layer(module).items()}
    return tensors


def _check_goes_on(config: Any, settings: Mapping[str, Any], folder: Path) -> None:
    """Refuse settings that contradict the adapter that is to be trained further."""
    for name, value in settings.items():
        if name == "target_modules" and str(value).lower() == "all-linear":
            config.target_modules = value  # PEFT finds them on the base; the weights must fit those
            continue
        adapter_value = getattr(config, name)
        both = [sorted(each) if isinstance(each, set | list) else each
                for each in (adapter_value, value)]
        if name != "lora_dropout" and both[0] != both[1]:
            raise ConfigError(f"model.peft.{name} is {value}, but the adapter in {folder} has "
                              f"{both[0]}, and goes on with it.", where=f"model.peft.{name}",
                              fix=f"model.peft.{name}={both[0]}, or leave model.peft out to merge "
                              "the adapter")


def load_adapter(lm: Any, folder: Path, base: BaseIdentity,
                 goes_on: Mapping[str, Any] | None = None) -> Adapter:
    """Put a saved adapter on its base, frozen unless it ``goes_on``.

    Args:
        goes_on: settings of ``model.peft``, if the adapter is to be trained further.

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
    if not isinstance(config, peft.LoraConfig):
        raise InputError(f"The adapter in {folder} is no LoRA.", where=str(folder),
                         fix="give a LoRA adapter or a whole model")
    config.inference_mode = goes_on is None
    if goes_on is not None:
        _check_goes_on(config, goes_on, folder)
    config.lora_dropout = (goes_on or {}).get("lora_dropout", 0.0)
    adapter = Adapter(attach(lm, config, seed=0), base)
    fill_adapter(adapter, tensors, str(folder))
    if goes_on is None:
        lm.requires_grad_(False)
    lm.eval()
    return adapter


def enable_adapter(lm: Any, enabled: bool) -> None:
    """Switch adapters inside a model's layers on or off, without changing which parameters
    train."""
    trains = {name: p.requires_grad for name, p in lm.named_parameters()}
    for module in adapted_layers(lm).values():
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


def adapter_tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Copies of the adapter's weights on the CPU, by the names that PEFT writes."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(adapter.model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
