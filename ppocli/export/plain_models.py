"""Models and adapters as transformers and PEFT load them: what they say, and adapters merged."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppocli.errors import CheckpointError, InputError, PpocliError
from ppocli.storage import model_files
from ppocli.text import error_line

GENERATION = "generation_config.json"
_AUTO_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
                 "SEQ_CLS": "AutoModelForSequenceClassification",
                 "TOKEN_CLS": "AutoModelForTokenClassification"}
"""PEFT's types of tasks and transformers' classes for them"""
_MERGED_TOLERANCE = 1e-5
"""how far logits may be from those of base and adapter apart (relative RMS, in fp32)"""


def base_of(folder: Path) -> Path:
    """The folder of an adapter's base; an InputError where it names none, or that isn't there."""
    return Path(model_files.find_whole(str(folder), key=str(folder))[0])


def write_merged(source: Path, folder: Path, prompts: list[str], trust_remote_code: bool,
                 check: Callable[[], None]) -> None:
    """Write a whole model: the adapter in ``source`` merged into its base, in fp32.

    Args:
        prompts: to compare the logits before and after on.
        check: called between the parts; may raise to stop.

    Raises:
        CheckpointError: the merged model says something else than base and adapter.
    """
    import torch
    import transformers

    from ppocli.models.loading import peft_internals

    if not torch.cuda.is_available():
        # transformers imports deepspeed when it saves, which would guess and say so on stdout
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    hub = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source if model_files.has_tokenizer(source) else base_of(source), **hub)
        ids = prompt_ids(tokenizer, prompts)
        model = load_model(source, hub).float()
    except PpocliError:
        raise
    except Exception as error:  # of many kinds, all about the folders
        fix = "if you trust that code: --trust" if "trust_remote_code" in str(error) else None
        raise InputError(f"The adapter in {source} can't be put on its base: {error_line(error)}",
                         where=str(source), fix=fix) from error
    expected = logits_of(model, ids)
    check()
    lm = peft_internals.merge(model).eval()
    worst = largest_difference(expected, logits_of(lm, ids))
    if not worst <= _MERGED_TOLERANCE:
        raise CheckpointError(f"The merged model's logits are off by {worst:.3g} (relative RMS; "
                              f"allowed: {_MERGED_TOLERANCE:g}). Nothing was published.",
                              fix="write the adapter's own folder: --adapter")
    check()
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (source / GENERATION).is_file():  # of the training; what is loaded has that of the base
        shutil.copyfile(source / GENERATION, folder / GENERATION)


def prompt_ids(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Token ids of each prompt; of one without any, a single token."""
    return [list(tokenizer(prompt)["input_ids"]) or [tokenizer.eos_token_id or 0]
            for prompt in prompts]


def load_model(folder: Path, hub: dict[str, Any]) -> Any:
    """The model in a folder, or the adapter there on its base, by transformers and PEFT alone."""
    import transformers

    adapter = model_files.is_adapter(folder)
    place = base_of(folder) if adapter else folder
    config = transformers.AutoConfig.from_pretrained(place, **hub)
    kind: Any = getattr(transformers, _AUTO_CLASSES[model_files.task_type(folder, config)])
    heads = _stored_heads(folder) if adapter else {}
    rows = [count for count in heads.values() if count is not None][:1]
    model, info = kind.from_pretrained(
        place, output_loading_info=True, dtype="auto", ignore_mismatched_sizes=True,
        **dict(zip(["num_labels"], rows, strict=False)), **hub)
    wrong = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])} - heads.keys()
    if wrong:
        raise ValueError(f"the weights do not fit the model: {min(wrong)}")
    if adapter:
        from ppocli.models.loading import peft_internals

        model = peft_internals.load_frozen(model, folder)
    # Tensors may be views of the file, aligned as it happens; kernels round by alignment.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def _stored_heads(folder: Path) -> dict[str, int | None]:
    """Names, in the base, of whole weights that an adapter brings, and of those that make outputs
    of classifiers how many."""
    from safetensors import safe_open

    heads: dict[str, int | None] = {}
    with safe_open(folder / model_files.ADAPTER_WEIGHTS, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            name = key.removeprefix("base_model.model.")
            heads[name] = file.get_slice(key).get_shape()[0] \
                if name.endswith(model_files.HEADS) else None
    return heads


def logits_of(model: Any, ids: list[list[int]]) -> list[Any]:
    """Logits [T, V] of each prompt, fp32, those of virtual tokens left out."""
    import torch

    found = []
    with torch.inference_mode():
        for row in ids:
            given = {"input_ids": torch.tensor([row])}
            if getattr(model.config, "is_encoder_decoder", False):
                # what the decoder says after its start and the same tokens
                start = int(getattr(model.config, "decoder_start_token_id", None) or 0)
                given["decoder_input_ids"] = torch.tensor([[start, *row[:-1]]])
            found.append(model(**given).logits[0][-len(row):].float().clone())
    return found


def largest_difference(expected: list[Any], found: list[Any]) -> float:
    """The largest relative root-mean-square difference of two lists of tensors; infinite where
    shapes differ or one isn't finite."""
    import torch

    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape:
            return math.inf
        if not torch.equal(a, b):
            gap = float((a - b).double().norm() / a.double().norm().clamp_min(1e-30))
            worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst
