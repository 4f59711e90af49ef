"""What tells one model's weights from another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
