"""Loading a sequence classifier and its tokenizer by a name or from a folder; an adapter is merged
into its base. Models with missing weights, such as those of the head, are refused."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from ppocli.config.text import counted, error_line
from ppocli.errors import InputError
from ppocli.runs import atomic, model_files

MODEL_KEY = "reward.kwargs.model"
UNBOUNDED = 1_000_000
"""a tokenizer without a limit reports one far above this"""


@contextmanager
def _file_errors(what: str, fix: str) -> Iterator[None]:
    """Turn what transformers, PEFT and safetensors raise, of many kinds, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what} can't be loaded: {error_line(error)}", where=MODEL_KEY, fix=fix
                         ) from error


def load_scorer(name: str, dtype: torch.dtype, *, revision: str | None, trust_remote_code: bool
                ) -> tuple[Any, Any, int | None]:
    """The model that ``reward.kwargs.model`` names, its tokenizer, and the maximum tokens of its
    input (None: without limit).

    Raises:
        InputError: missing or broken files, no vocabulary, a tokenizer that doesn't fit, or weights
            that the files lack.
    """
    model_files.quiet_transformers()
    needs: dict[str, Any] = {"key": MODEL_KEY, "revision": revision}
    source = model_files.find_model(name, adapters=True, **needs)
    hub = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    if model_files.is_adapter(source):
        base, base_revision = model_files.find_whole(
            name, needs="model and tokenizer", **needs)
        place = source if model_files.has_tokenizer(source) else base
        tokenizer = _load_tokenizer(name, place, hub)
        model = _load_adapter(name, Path(source), base, dtype,
                              {**hub, "revision": base_revision or "main"})
    else:
        tokenizer = _load_tokenizer(name, source, hub)
        model = _load_model(name, source, dtype, hub)
    embeddings = model.get_input_embeddings()
    if embeddings is not None and len(tokenizer) > embeddings.weight.shape[0]:
        raise InputError(f"The tokenizer in {name} knows {len(tokenizer)} tokens, "
                         f"but its model has only {embeddings.weight.shape[0]} embeddings.",
                         where=MODEL_KEY, fix="put the model's own tokenizer into its folder")
    return model, tokenizer, _position_limit(model, tokenizer)


def _load_tokenizer(name: str, source: str, options: dict[str, Any]) -> Any:
    fix = "save the model's own tokenizer into its folder"
    with _file_errors(f"The tokenizer of {name}", fix):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    if len(tokenizer) == 0 or tokenizer.vocab_size == 0:
        raise InputError(f"No tokenizer in {name} (expected tokenizer.json, or a vocabulary file).",
                         where=MODEL_KEY, fix=fix)
    return tokenizer


def _load_model(name: str, source: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    model, info = _from_files(name, source, dtype, options)
    head = next((sizes for sizes in info["mismatched_keys"]
                 if sizes[0].endswith(model_files.HEADS)), None)
    if head is not None:
        rows = int(head[1][0])
        if model_files.states_labels(source, options["revision"]):
            raise InputError(
                f"The head of {name} ({head[0]}) has {counted(rows, 'row')}, one per output, and "
                f"its config.json has {model.config.num_labels} labels.", where=MODEL_KEY,
                fix=f'write the {counted(rows, "label")} that it was trained on into config.json, '
                    f'as "id2label": {json.dumps({i: f"LABEL_{i}" for i in range(rows)})}')
        model, info = _from_files(name, source, dtype, {**options, "num_labels": rows})
    _refuse_absent(name, info, set())
    return model


def _from_files(name: str, source: str, dtype: torch.dtype, options: dict[str, Any]
                ) -> tuple[Any, dict[str, Any]]:
    with _file_errors(f"The model in {name}",
                      "give a folder or Hub name of a sequence-classification model"):
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            source, dtype=dtype, output_loading_info=True,
            ignore_mismatched_sizes=True,  # the caller refuses them, with names and sizes
            **options)


def _refuse_absent(name: str, info: dict[str, Any], new: set[str]) -> None:
    """Refuse a model with random weights: the files lack them or have them in another size.

    Args:
        new: names of weights that come from other files.
    """
    sizes = {key: f"{key} ({list(stored)} in the files, {list(here)} by config.json)"
             for key, stored, here in info["mismatched_keys"] if key not in new}
    if absent := sorted((set(info["missing_keys"]) - new) | sizes.keys()):
        shown = ", ".join(sizes.get(key, key) for key in absent[:5])
        raise InputError(
            f"{name} has no fitting weights for {shown}{', ...' * (len(absent) > 5)}; they would "
            "be random numbers.", where=MODEL_KEY, fix="correct the sizes in config.json, or copy "
            "the weights that belong to it" if absent[0] in sizes else
            "give a model trained for sequence classification, not its base")


def _load_adapter(name: str, folder: Path, base: str, dtype: torch.dtype, options: dict[str, Any]
                  ) -> Any:
    """The base with the adapter merged into it, computed in fp32."""
    import peft
    from safetensors.torch import load_file

    kind = (atomic.read_json(folder / model_files.ADAPTER_CONFIG) or {}).get("task_type") or ""
    if kind not in ("SEQ_CLS", ""):
        raise InputError(f"{name} is an adapter for {kind}, not for the scores or labels of texts "
                         "(SEQ_CLS).", where=MODEL_KEY, fix="give an adapter of a reward model or "
                         "of a classifier")
    with _file_errors(f"The adapter in {name}", "copy the folder again, or merge it where it was "
                      "made"):
        tensors = load_file(folder / model_files.ADAPTER_WEIGHTS)
        heads = {key: tensor for key, tensor in tensors.items() if key.endswith(model_files.HEADS)}
        labels = {"num_labels": len(next(iter(heads.values())))} if heads else {}
        model, info = _from_files(name, base, torch.float32, {**options, **labels})
        stored = {key.removeprefix("base_model.model.") for key in tensors}
        _refuse_absent(name, info, {key for key in (
            *info["missing_keys"], *(one[0] for one in info["mismatched_keys"])) if key in stored})
        with warnings.catch_warnings():
            # warnings about old names in transformers, and about layers that PEFT adjusts itself
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="peft")
            on_base = peft.PeftModel.from_pretrained(model, str(folder))
            if getattr(on_base.active_peft_config, "is_prompt_learning", False):
                raise InputError(f"{name} has virtual tokens, which a reward can't use.",
                                 where=MODEL_KEY, fix="give a LoRA adapter or a whole model")
            return on_base.merge_and_unload().to(dtype)


def _position_limit(model: Any, tokenizer: Any) -> int | None:
    """Maximum tokens that tokenizer and position embeddings allow; None without a limit."""
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < UNBOUNDED else []
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        for name, module in model.named_modules():
            # RoBERTa counts positions from padding_idx + 1 and so loses that many
            if name.endswith("position_embeddings") and getattr(
                    module, "padding_idx", None) is not None:
                positions -= module.padding_idx + 1
        limits.append(positions)
    return min(limits) if limits else None
