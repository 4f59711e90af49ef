"""What a run may not silently change under itself: prompts, reference weights, the judge."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch

from ppocli.config.schema import TrainConfig
from ppocli.engine.session import EvalSession, Session


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(module: torch.nn.Module) -> str:
    """SHA-256 over each tensor's name, shape, type and the sum of its bytes as integers.

    A sum of integers does not depend on the order of summation, so the digest is the same for any
    number of threads and on any device; it notices another model, not a malicious one.
    """
    parts = []
    for name, tensor in module.state_dict().items():
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = tensor.detach().contiguous().view(kind[tensor.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        parts.append((name, list(tensor.shape), str(tensor.dtype), total))
    return _sha256(parts)


def session_digests(session: Session) -> dict[str, str]:
    """Digests of the training prompts, the evaluation prompts and the reference's weights."""
    found = {"prompts": session.prompts.digest(),
             "evaluation prompts": session.eval_prompts.digest()}
    if (digest := reference_digest(session)) is not None:
        found["reference model"] = digest
    return found


def reference_digest(session: EvalSession) -> str | None:
    """Digest of the reference's weights; None without one."""
    if session.reference is None:
        return None
    with session.reference.view(session.policy.lm) as view:
        return weights_digest(view)


def judge_digest(cfg: TrainConfig) -> str:
    """Digest of everything an evaluation's figure depends on beside policy and prompts: under
    another one, figures are not comparable with the best so far."""
    return _sha256([asdict(cfg.reward), asdict(cfg.generation), cfg.checkpoint.metric,
                    cfg.prompts.eval.repeat])
