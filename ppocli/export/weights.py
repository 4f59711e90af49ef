"""Weights from one safetensors folder to another: cast where asked, cut into shards, compared.

Tensors are copied one by one and never go through a model class, so names, shapes and, without a
cast, bits are the source's; what is in memory at any moment is one shard.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.storage import faults
from ppocli.storage.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from ppocli.storage.adapter_files import is_adapter
from ppocli.storage.model_files import SAFETENSORS

INDEX = f"{SAFETENSORS}.index.json"
SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""floating types in safetensors files and what users call them; only these are cast"""
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_STORED = {short: stored for stored, short in SHORT_DTYPES.items()}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_CAST = "export.tensor"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: str
    dtype: str
    """as safetensors spells it: ``F32``"""
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def floating(self) -> bool:
        """Whether a cast applies to it."""
        return self.dtype in SHORT_DTYPES

    def bytes_as(self, dtype: str | None) -> int:
        """Its size once stored as ``dtype`` (``bf16``; None: as it is)."""
        if dtype is None or not self.floating:
            return self.num_bytes
        return math.prod(self.shape) * _BYTES[_STORED[dtype]]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> description of every tensor of a model folder, from the headers alone.

    Raises:
        InputError: the weights aren't safetensors, or can't be read.
    """
    if is_adapter(folder):
        files = [ADAPTER_WEIGHTS]
    elif (folder / SAFETENSORS).is_file():
        files = [SAFETENSORS]
    elif (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
    else:
        raise InputError(
            f"The weights in {folder} are not safetensors.", where=str(folder),
            fix="python -c \"from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained('{folder}').save_pretrained('NEW')\"; the tokenizer likewise")
    found: dict[str, StoredTensor] = {}
    for file in files:
        header = _header(folder / file)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            found[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), end - start)
    return found


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, which begins with its length in 8 bytes."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise InputError(f"{path} can't be read: {error}", where=str(path),
                         fix="the file is truncated or damaged; copy or download it again"
                         ) from error
    header.pop("__metadata__", None)
    return dict(header)


def dtype_of(tensors: dict[str, StoredTensor]) -> str:
    """The floating type of the weights, as users call it; several are joined: ``bf16+fp32``."""
    return "+".join(sorted({SHORT_DTYPES[t.dtype] for t in tensors.values() if t.floating})) or "?"


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


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which tensor goes to which file."""

    files: dict[str, list[str]]
    """file name -> tensor names, in order"""
    sizes: dict[str, int]
    """file name -> bytes of its tensors"""

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes.values())


def plan_files(tensors: dict[str, StoredTensor], dtype: str | None, max_shard: int) -> WeightFiles:
    """Cut the weights into files of at most ``max_shard`` bytes, named as transformers does."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        tensors, get_storage_size=lambda tensor: tensor.bytes_as(dtype),
        filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard)
    return WeightFiles(split.filename_to_tensors, {
        file: sum(tensors[name].bytes_as(dtype) for name in names)
        for file, names in split.filename_to_tensors.items()})


def write_weights(source: Path, tensors: dict[str, StoredTensor], plan: WeightFiles,
                  dtype: str | None, folder: Path, check: Callable[[], None]) -> None:
    """Write the planned files, and an index where there are several.

    Args:
        check: called between tensors; may raise to stop.

    Raises:
        CheckpointError: a value doesn't fit the type it is cast to.
    """
    from safetensors.torch import save_file

    for file, names in plan.files.items():
        shard = {}
        for name, tensor in _read(source, tensors, names):
            check()
            shard[name] = _cast(name, tensor, dtype if tensors[name].floating else None)
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(plan.files) > 1:
        index = {"metadata": {"total_size": plan.total},
                 "weight_map": {name: file for file, names in plan.files.items()
                                for name in names}}
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
        kind = _STORED[dtype] if dtype is not None and wanted.floating else wanted.dtype
        if (own.shape, own.dtype) != (wanted.shape, kind):
            raise _differs(f"{name} is {own.dtype} {list(own.shape)}, "
                           f"not {kind} {list(wanted.shape)}")
    pairs = zip(_read(source, tensors, list(tensors)), _read(folder, written, list(tensors)),
                strict=True)
    for (name, theirs), (_, ours) in pairs:
        check()
        expected = _cast(name, theirs, dtype if tensors[name].floating else None, poison=False)
        flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (expected, ours))
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


def _cast(name: str, tensor: Any, dtype: str | None, *, poison: bool = True) -> Any:
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
             "fp64": torch.float64}
    result = tensor if dtype is None else tensor.to(kinds[dtype])
    if result.dtype != tensor.dtype and torch.isfinite(tensor).all() != torch.isfinite(
            result).all():
        largest = float(tensor.abs().max())
        raise CheckpointError(f"{name} holds values up to {largest:.3g}, which {dtype} can't hold.",
                              where="--dtype", fix="--dtype bf16 has the range of fp32")
    if poison and faults.point(_CAST) and result.is_floating_point() and result.numel():
        result = result.clone()
        result.view(-1)[0] = float("nan")
    return result


def _differs(what: str) -> CheckpointError:
    return CheckpointError(f"The export differs from its source: {what}. Nothing was published.",
                           fix="export again; if it happens again, the disk or the memory is at "
                           "fault")
