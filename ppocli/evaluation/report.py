"""The contents of settings.json and eval.json."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ppocli.evaluation.figures import Row, compare, figures_of
from ppocli.evaluation.frontier import Frontier
from ppocli.evaluation.judges import judge_digests
from ppocli.runs.target import Target
from ppocli.tasks.ppo.digests import reference_digest, weights_digest
from ppocli.tasks.ppo.session import EvalSession
from ppocli.train.recorder import torch_versions
from ppocli.train.task import PythonObjects

SCHEMA = 1
"""of eval.json; raised when a name in it comes to mean something else"""
_REWARD_KEYS = ("fn", "kwargs", "fns", "metric_fn", "on_invalid")


def identity_of(session: EvalSession, targets: Sequence[Target], frontier: bool,
                objects: PythonObjects) -> dict[str, Any]:
    """All that makes the samples, for telling whether two evaluations are the same one.

    Args:
        session: of the policy; the weights of other models join ``models`` as they are loaded.
        objects: what took the place of reward and metric.
    """
    cfg = session.cfg
    judges = [*session.reward.code_files, *(session.metric.code_files if session.metric else [])]
    return {
        "seed": cfg.seed,
        "targets": [target.model for target in targets],
        "frontier": frontier,
        "generation": sampling_of(session),
        "prompts": {**asdict(cfg.prompts), "digest": session.eval_prompts.digest(),
                    "count": len(session.eval_prompts)},
        "reward": {key: value for key, value in asdict(cfg.reward).items() if key in _REWARD_KEYS},
        "code": {path: _sha256(path) for path in dict.fromkeys(judges)},
        "judges": judge_digests(session, objects),
        "model": asdict(cfg.model),
        "base_digest": reference_digest(session),
        "chunk_size": session.chunk_size, "forward_rows": session.forward_rows,
        "logprobs_from": cfg.ppo.logprobs_from,
        "device": session.backend.device.type, "precision": session.backend.precision,
        "models": {"policy": weights_digest(session.policy.lm)},
    }


def sampling_of(session: EvalSession) -> dict[str, Any]:
    """How responses are sampled."""
    spec = asdict(session.eval_sampling)
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in spec.items()}


def _sha256(path: str) -> str | None:
    """Of a file of code; None for code that was typed in and has no file."""
    file = Path(path)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def report_of(identity: dict[str, Any], targets: dict[str, Target], rows: dict[str, list[Row]],
              frontier: Frontier | None, *, session: EvalSession, name: str, started: str,
              seconds: float) -> dict[str, Any]:
    """The contents of eval.json, from the rows of samples.jsonl; docs/eval.md explains each name.

    Args:
        identity: with the weights of every model.
        targets, rows: by model: policy, against, base.
        session: of any of the models.
        seconds: what this process took.
    """
    cfg, policy = session.cfg, targets["policy"]
    against = None
    if "against" in targets:
        against = {"model": _model(targets["against"], identity["models"]["against"]),
                   **figures_of(rows["against"]).to_json()}
    base = None
    if identity["base_digest"] is not None:
        base = {"path": cfg.model.path, "digest": identity["base_digest"]}
    count = identity["prompts"]["count"]
    return {
        "schema": SCHEMA,
        "name": name,
        "run": None if policy.run_dir is None else str(policy.run_dir),
        "step": policy.step,
        "model": _model(policy, identity["models"]["policy"]),
        **figures_of(rows["policy"]).to_json(),
        "against": against,
        "win_rate": compare(rows["policy"], rows["against"]) if against else None,
        "frontier": None if frontier is None else {
            **frontier.to_json(), "base": figures_of(rows["base"]).to_json()},
        "base": base,
        "prompts": {"digest": identity["prompts"]["digest"], "count": count,
                    "samples_each": len(rows["policy"]) // count},
        "generation": identity["generation"],
        "seed": identity["seed"],
        "settings": {key: value for key, value in identity.items()
                     if key not in ("generation", "seed", "models", "base_digest")},
        "versions": torch_versions(),
        "time": {"started": started, "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                 "seconds": seconds},
        "hardware": _hardware(session),
    }


def _model(target: Target, digest: str) -> dict[str, Any]:
    return {"name": target.name, "path": target.model, "step": target.step, "digest": digest}


def _hardware(session: EvalSession) -> dict[str, Any]:
    device = session.backend.device
    name = (torch.cuda.get_device_name(device) if device.type == "cuda"
            else platform.processor() or platform.machine())
    return {"device": device.type, "name": name, "threads": torch.get_num_threads(),
            "precision": session.backend.precision,
            "peak_memory_mib": session.backend.peak_memory_mib()}
