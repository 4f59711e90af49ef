"""Weights from one safetensors folder to another: cast where asked, cut into shards, compared.

Tensors are copied one by one and never go through a model class, so names, shapes and, without a
cast, bits are the source's; what is in memory at any moment is one shard.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.config.schema import ModelConfig
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.export.verify import largest_difference, logits_of, prompt_ids
from ppocli.storage import faults
from ppocli.storage.model_files import (
    ADAPTER_BASE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    SAFETENSORS,
    is_adapter,
)

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

INDEX = f"{SAFETENSORS}.index.json"
SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""floating types in safetensors files and what users call them; only these are cast"""
TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""what torch and config.json call them"""
_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_CAST = "export.tensor"
_MERGED_TOLERANCE = 1e-5
"""how far logits may be from those of base and adapter apart (relative RMS, in fp32)"""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: str
    dtype: str
    """as safetensors spells it: ``F32``"""
    shape: tuple[int, ...]
    num_bytes: int

    def dtype_as(self, dtype: str | None) -> str:
        """Its type once cast to ``dtype`` (``bf16``; None: as it is), as safetensors spells it."""
        if dtype is None or self.dtype not in SHORT_DTYPES:
            return self.dtype
        return next(stored for stored, short in SHORT_DTYPES.items() if short == dtype)

    def bytes_as(self, dtype: str | None) -> int:
        """Its size once cast to ``dtype``."""
        kept = dtype is None or self.dtype not in SHORT_DTYPES
        return self.num_bytes if kept else math.prod(self.shape) * _BYTES[str(dtype)]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> description of every tensor of a model's or an adapter's folder, from the headers.

    Raises:
        InputError: the weights aren't safetensors, or can't be read.
    """
    from huggingface_hub import get_local_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        found = get_local_safetensors_metadata(
            folder / ADAPTER_WEIGHTS if is_adapter(folder) else folder).files_metadata
    except NotASafetensorsRepoError:
        raise InputError(
            f"The weights in {folder} are not safetensors.", where=str(folder),
            fix="python -c \"from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained('{folder}').save_pretrained('NEW')\"; the tokenizer likewise"
        ) from None
    except Exception as error:  # OSError, ValueError or SafetensorsParsingError, all of the files
        raise InputError(f"The weights in {folder} can't be read: {error}", where=str(folder),
                         fix="a file is truncated or damaged; copy or download it again"
                         ) from error
    return {name: StoredTensor(file, tensor.dtype, tuple(tensor.shape),
                               tensor.data_offsets[1] - tensor.data_offsets[0])
            for file in sorted(found) for name, tensor in found[file].tensors.items()}


def dtype_of(tensors: dict[str, StoredTensor]) -> str:
    """The floating type of the weights, as users call it; several are joined: ``bf16+fp32``."""
    found = {SHORT_DTYPES[t.dtype] for t in tensors.values() if t.dtype in SHORT_DTYPES}
    return "+".join(sorted(found)) or "?"


def parse_size(text: str) -> int:
    """``5GB`` in bytes (decimal units, as disks are sold).

    Raises:
        ConfigError: it is no positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ConfigError(f"--max-shard-size {text} is no size.", where="--max-shard-size",
                          fix="a number with KB, MB, GB or TB: --max-shard-size 5GB")
    return size


def plan_files(tensors: dict[str, StoredTensor], dtype: str | None, max_shard: int,
               name: str = SAFETENSORS) -> StateDictSplit:
    """Cut the weights into files of at most ``max_shard`` bytes, named as transformers does."""
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        tensors, get_storage_size=lambda tensor: tensor.bytes_as(dtype),
        filename_pattern=name.replace(".", "{suffix}."), max_shard_size=max_shard)


def write_weights(source: Path, tensors: dict[str, StoredTensor], plan: StateDictSplit,
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
            if faults.point(_CAST) and cast.is_floating_point() and cast.numel():
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

    written = stored_tensors(folder)
    for name in tensors:
        if name not in written:
            raise _differs(f"{name} is missing")
    for name in written:
        if name not in tensors:
            raise _differs(f"{name} is not in the source")
    for name, own in written.items():
        wanted = tensors[name]
        kind = wanted.dtype_as(dtype)
        if (own.shape, own.dtype) != (wanted.shape, kind):
            raise _differs(f"{name} is {own.dtype} {list(own.shape)}, "
                           f"not {kind} {list(wanted.shape)}")
    pairs = zip(_read(source, tensors, list(tensors)), _read(folder, written, list(tensors)),
                strict=True)
    for (name, theirs), (_, ours) in pairs:
        check()
        flat = (t.contiguous().reshape(-1).view(torch.uint8)
                for t in (_cast(name, theirs, dtype), ours))
        if not torch.equal(*flat):
            raise _differs(f"the values of {name} differ")


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


def _differs(what: str) -> CheckpointError:
    return CheckpointError(f"The export differs from its source: {what}. Nothing was published.",
                           fix="export again; if it happens again, the disk or the memory is at "
                           "fault")


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

    from ppocli.models.loading.language_model import load_lm, load_tokenizer

    if not torch.cuda.is_available():
        # transformers imports deepspeed when it saves, which would guess and say so on stdout
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    cfg = ModelConfig(path=str(source), trust_remote_code=trust_remote_code)
    loaded = load_lm(cfg)
    assert loaded.adapter is not None
    ids = prompt_ids(load_tokenizer(cfg), prompts)
    expected = logits_of(loaded.lm, ids)
    check()
    lm = loaded.adapter.model.merge_and_unload()
    worst = largest_difference(expected, logits_of(lm, ids))
    if not worst <= _MERGED_TOLERANCE:
        raise CheckpointError(
            f"The merged model's logits are off by {worst:.3g} (relative RMS; allowed: "
            f"{_MERGED_TOLERANCE:g}). Nothing was published.",
            fix="write the adapter's own folder: --adapter")
    check()
    lm.save_pretrained(folder, safe_serialization=True)
    config = loaded.export_config
    config.architectures, config.dtype = [type(lm).__name__], "float32"
    config.save_pretrained(folder)
    loaded.generation_config.save_pretrained(folder)
    for file in source.iterdir():
        if file.is_file() and file.name not in (ADAPTER_CONFIG, ADAPTER_BASE, ADAPTER_WEIGHTS,
                                                "README.md"):
            shutil.copyfile(file, folder / file.name)
