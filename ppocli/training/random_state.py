"""State of the global random generators, which belong to the user's reward function.

ppocli's own randomness is counter-based and needs none. The state is taken whenever a training
state is committed, so that work dropped by a stop can be done again with the same numbers.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TENSORS = "rng.safetensors"
NUMBERS = "rng.json"


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of torch's, Python's and numpy's global generators."""

    tensors: dict[str, torch.Tensor]
    """``torch`` and, on a GPU, ``cuda``: uint8"""
    numbers: dict[str, Any]
    """``python`` and ``numpy``: JSON types"""


def capture(device: torch.device) -> Generators:
    """The states now."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return Generators(tensors, {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached]})


def restore(generators: Generators, device: torch.device) -> None:
    """Put the states back."""
    torch.set_rng_state(generators.tensors["torch"])
    if "cuda" in generators.tensors and device.type == "cuda":
        torch.cuda.set_rng_state(generators.tensors["cuda"], device)
    version, numbers, gauss = generators.numbers["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = generators.numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def seed(number: int) -> None:
    """Seed all of them."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def write(generators: Generators, folder: Path, rank: int = 0) -> None:
    """Save as safetensors and JSON, those of other ranks than 0 beside them."""
    save_file(generators.tensors, folder / _named(TENSORS, rank))
    (folder / _named(NUMBERS, rank)).write_text(json.dumps(generators.numbers))


def read(folder: Path, rank: int = 0) -> Generators | None:
    """What ``write`` saved; None where this rank saved none."""
    tensors, numbers = folder / _named(TENSORS, rank), folder / _named(NUMBERS, rank)
    if rank > 0 and not tensors.is_file():
        return None
    return Generators(load_file(tensors), json.loads(numbers.read_text()))


def _named(name: str, rank: int) -> str:
    return name if rank == 0 else name.replace("rng.", f"rng-rank-{rank:05d}.")
