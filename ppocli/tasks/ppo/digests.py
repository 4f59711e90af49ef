"""What a run may not silently change under itself: prompts, reference weights, the judge."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch

from ppocli.config.schema import TrainConfig
from ppocli.models.loading.adapters import base_tensors, tensors_digest
from ppocli.tasks.ppo.session import EvalSession, Session
from ppocli.zero.sharded_weights import one_gathered


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(module: torch.nn.Module) -> str:
    """Of all weights and buffers of a module; see :func:`tensors_digest`."""
    return tensors_digest(module.state_dict())


def session_digests(session: Session) -> dict[str, str]:
    """Digests of the training prompts, the evaluation prompts and the reference's weights."""
    found = {"prompts": session.prompts.digest(),
             "evaluation prompts": session.eval_prompts.digest()}
    if (digest := reference_digest(session)) is not None:
        found["reference model"] = digest
    return found


def reference_digest(session: EvalSession) -> str | None:
    """Digest of the reference's weights; None without one. All ranks call it in step."""
    if session.reference is None:
        return None
    with session.acting() as acting, session.reference.view(acting.policy.lm) as view:
        return tensors_digest(base_tensors(view), one_gathered)


def judge_digest(cfg: TrainConfig) -> str:
    """Digest of everything an evaluation's figure depends on beside policy and prompts: under
    another one, figures are not comparable with the best so far."""
    return _sha256([asdict(cfg.reward), asdict(cfg.generation), cfg.checkpoint.metric,
                    cfg.prompts.eval.repeat])
