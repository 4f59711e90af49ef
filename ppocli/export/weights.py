"""Weights from one safetensors folder to another: cast where asked, cut into shards, verified.

Tensors are copied one by one and never go through a model class, so names, shapes and, without a
cast, bits are the source's; what is in memory at any moment is one shard. The result is compared
tensor by tensor, and as a model that plain transformers reads back from the folder alone.
"""

import gc
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.errors import CheckpointError, InputError, PpocliError
from ppocli.export.plain_models import (
    GENERATION,
    largest_difference,
    load_model,
    logits_of,
    prompt_ids,
)
from ppocli.storage import atomic, faults, model_files
from ppocli.text import first_line

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

INDEX = f"{model_files.SAFETENSORS}.index.json"
_SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""floating types in safetensors files and what users call them; only these are cast"""
TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""what torch and config.json call them"""
_DIGITS = {"bf16": 8, "fp16": 11}
"""bits of the significand, the hidden one included"""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: str
    dtype: str
    """a floating type as users call it, ``fp32``; another as safetensors spells it, ``I64``"""
    num_bytes: int

    def bytes_as(self, dtype: str | None) -> int:
        """Its size once cast to ``dtype`` (``bf16``; None: as it is)."""
        if dtype is None or self.dtype not in TORCH_DTYPES:
            return self.num_bytes
        return self.num_bytes * int(dtype[2:]) // int(self.dtype[2:])


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> description of every tensor of a model's or an adapter's folder, from the headers.

    Raises:
        InputError: the weights aren't safetensors, or can't be read.
    """
    from huggingface_hub import get_local_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        place = folder / model_files.ADAPTER_WEIGHTS if model_files.is_adapter(folder) else folder
        found = get_local_safetensors_metadata(place).files_metadata
    except NotASafetensorsRepoError:
        raise InputError(f"The weights in {folder} are not safetensors.", where=str(folder),
                         fix="python -c \"from transformers import AutoModelForCausalLM as M; "
                         f"M.from_pretrained('{folder}').save_pretrained('NEW')\"; the tokenizer "
                         "likewise") from None
    except Exception as error:  # OSError, ValueError or SafetensorsParsingError, all of the files
        raise InputError(f"The weights in {folder} can't be read: {error}", where=str(folder),
                         fix="a file is truncated or damaged; copy or download it again") from error
    return {name: StoredTensor(file, _SHORT_DTYPES.get(tensor.dtype, tensor.dtype),
                               tensor.data_offsets[1] - tensor.data_offsets[0])
            for file in sorted(found) for name, tensor in found[file].tensors.items()}


def dtype_of(tensors: dict[str, StoredTensor]) -> str:
    """The floating type of the weights, as users call it; several are joined: ``bf16+fp32``."""
    return "+".join(sorted({t.dtype for t in tensors.values()} & TORCH_DTYPES.keys())) or "?"


def plan_files(tensors: dict[str, StoredTensor], dtype: str | None, max_shard: int,
               name: str = model_files.SAFETENSORS) -> "StateDictSplit":
    """Cut the weights into files of at most ``max_shard`` bytes, named as transformers does."""
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        tensors, get_storage_size=lambda tensor: tensor.bytes_as(dtype),
        filename_pattern=name.replace(".", "{suffix}."), max_shard_size=max_shard)


def write_weights(source: Path, tensors: dict[str, StoredTensor], plan: "StateDictSplit",
                  dtype: str | None, folder: Path, check: Callable[[], None]) -> None:
    """Write the planned files, and an index where there are several.

    Args:
        check: called between tensors; may raise to stop.

    Raises:
        CheckpointError: a value doesn't fit the type it is cast to.
    """
    from safetensors.torch import save_file

    for file, names in plan.filename_to_tensors.items():
        shard = {}
        for name, tensor in _read(source, tensors, names):
            check()
            shard[name] = cast = _cast(name, tensor, dtype)
            if faults.point("export.tensor") and cast.is_floating_point() and cast.numel():
                shard[name] = cast.clone()
                shard[name].view(-1)[0] = float("nan")
        save_file(shard, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n",
                                    encoding="utf-8")


def compare_weights(source: Path, tensors: dict[str, StoredTensor], dtype: str | None,
                    folder: Path, check: Callable[[], None]) -> None:
    """Compare what lies in ``folder`` with the source: names, shapes, types, and every bit.

    Raises:
        CheckpointError: names the first tensor that differs, and how.
    """
    import torch

    fix = "export again; if it happens again, the disk or the memory is at fault"
    written = stored_tensors(folder)
    if missing := tensors.keys() - written.keys():
        raise _differs(f"{min(missing)} is missing", fix)
    if added := written.keys() - tensors.keys():
        raise _differs(f"{min(added)} is not in the source", fix)
    pairs = zip(_read(source, tensors, list(tensors)), _read(folder, written, list(tensors)),
                strict=True)
    for (name, stored), (_, ours) in pairs:
        check()
        theirs = _cast(name, stored, dtype)
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise _differs(f"{name} is {ours.dtype} {list(ours.shape)}, "
                           f"not {theirs.dtype} {list(theirs.shape)}", fix)
        if not torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8)
                             for tensor in (theirs, ours))):
            raise _differs(f"the values of {name} differ", fix)


def _read(folder: Path, tensors: dict[str, StoredTensor], names: list[str]
          ) -> Iterator[tuple[str, Any]]:
    """(name, tensor) in the order of ``names``; every file is opened once."""
    from safetensors import safe_open

    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name in names:
            file = tensors[name].file
            if file not in files:
                files[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
            yield name, files[file].get_tensor(name)


def _cast(name: str, tensor: Any, dtype: str | None) -> Any:
    """``tensor`` as ``dtype``; whole numbers stay what they are, and so do float8 weights."""
    import torch

    if dtype is None or str(tensor.dtype).removeprefix("torch.") not in TORCH_DTYPES.values():
        return tensor
    result = tensor.to(getattr(torch, TORCH_DTYPES[dtype]))
    if torch.isfinite(tensor).all() != torch.isfinite(result).all():
        largest = float(tensor.abs().max())
        raise CheckpointError(f"{name} holds values up to {largest:.3g}, which {dtype} can't hold.",
                              where="--dtype", fix="--dtype bf16 has the range of fp32")
    return result


def _differs(what: str, fix: str = "please report this with the model's config.json"
             ) -> CheckpointError:
    return CheckpointError(f"The export differs from its source: {what}. Nothing was published.",
                           fix=fix)


def tolerance(dtype: str, layers: int) -> float:
    """How much rounding the weights to ``dtype`` may change logits, as relative RMS.

    Rounding to nearest with p significant bits changes a weight by at most u = 2^-p of itself
    (Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 2.2). The 2L + 2
    matrices on the way through L layers contribute independent errors of that size, which add up
    as a random walk does; 4 times that leaves room for networks that amplify. A wrong, swapped or
    transposed weight gives differences of order 1.
    """
    return 4 * 2.0 ** -_DIGITS[dtype] * math.sqrt(2 * layers + 2)


def verify_model(source: Path, folder: Path, prompts: list[str], *, cast: str | None,
                 trust_remote_code: bool, check: Callable[[], None]) -> dict[str, Any]:
    """Reload ``folder`` as any user would and compare it with ``source``.

    One model is in memory at a time. Returned is what was compared, for the record: the number of
    ``prompts``, the relative root-mean-square difference of the ``logits`` (0 where nothing was
    rounded), what was ``allowed``, and the version of ``transformers``.

    Args:
        prompts: to compare logits and tokenizers on.
        cast: the type the weights were converted to, None where they were kept as stored.
        check: called between the parts; may raise to stop.

    Raises:
        CheckpointError: something differs; the message says what.
        InputError: the source itself can't be loaded.
    """
    import transformers

    hub = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    tokenizers: list[Any] = []
    found = []
    # in fp32 nothing but rounded weights counts, nor a type that config.json told wrong before
    in_fp32 = cast is not None or _stated_type(source) != _stated_type(folder)
    for place, failure in ((source, InputError), (folder, CheckpointError)):
        check()
        try:
            tokenizers.append(transformers.AutoTokenizer.from_pretrained(place, **hub))
            ids = prompt_ids(tokenizers[0], prompts)  # where settings of a tokenizer are damaged
            model = load_model(place, hub)
        except PpocliError:
            raise
        except Exception as error:  # of many kinds, all about the folder
            fix = "if you trust that code: --trust" if "trust_remote_code" in str(error) else None
            raise failure(f"transformers can't load {place}: {first_line(error)}",
                          where=str(place), fix=fix) from error
        if in_fp32:
            model.float()
        found.append(logits_of(model, ids))
        layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1) or 1)
        del model
        gc.collect()
    check()
    compare_tokenizers(tokenizers[0], tokenizers[1], prompts)
    allowed = 0.0 if cast in (None, "fp32") else tolerance(str(cast), layers)
    worst = largest_difference(*found)
    if not worst <= allowed:
        raise _differs(f"logits are off by {worst:.3g} (relative RMS; allowed: {allowed:.3g})")
    generation = source / GENERATION
    if generation.is_file() and generation.read_bytes() != (folder / generation.name).read_bytes():
        raise _differs(f"{generation.name} is another")
    return {"prompts": len(prompts), "logits": worst, "allowed": allowed,
            "transformers": transformers.__version__}


def _stated_type(folder: Path) -> str | None:
    """The type that ``config.json`` says the weights have."""
    config = atomic.read_json(folder / "config.json") or {}
    return config.get("dtype") or config.get("torch_dtype")


def compare_tokenizers(own: Any, ours: Any, prompts: list[str]) -> None:
    """Ids, special tokens and the chat template must be the same.

    Raises:
        CheckpointError: they are not.
    """
    if (len(own), own.special_tokens_map) != (len(ours), ours.special_tokens_map):
        raise _differs("the tokenizer has another size or other special tokens")
    if own.chat_template != ours.chat_template:
        raise _differs("the chat template is another")
    special = " ".join(own.all_special_tokens)
    for text in (*prompts, special, *(f"{prompt}{special}" for prompt in prompts)):
        for plain in (True, False):
            a = own(text, add_special_tokens=plain)["input_ids"]
            b = ours(text, add_special_tokens=plain)["input_ids"]
            if a != b or own.decode(a) != ours.decode(b):
                raise _differs(f"the tokenizer gives other ids for {text[:60]!r}")
