"""The evaluation among a run's that is of the exported weights, under the run's own settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ppocli.config.resolved import PYTHON_OBJECT
from ppocli.config.schema import TrainConfig
from ppocli.runs.target import Target

EVALUATION = "eval.json"
_PLACES = frozenset({"run", "name", "path", "tokenizer_path", "fn", "metric_fn", "targets"})
"""keys of eval.json under which a folder of this machine may stand"""
_LOCAL = re.compile(r"(?:[/~]|\.\.?/)(?:.*/)?(?=[^/])", re.DOTALL)


def own_evaluation(target: Target, config: TrainConfig) -> dict[str, Any] | None:
    """The newest ``eval/*/eval.json`` of exactly these weights under the run's own reward,
    prompts and sampling, whatever its random numbers and the number of responses; else None.

    Only where one could be it are the weights loaded, to compare their digest.
    """
    assert target.run_dir is not None
    found = [value for value in _newest_first(target.run_dir)
             if value.get("step") == target.step and _own_settings(value, config, target)]
    if not found:
        return None
    digest, sampling = _loaded(target, config)
    return next((value for value in found if value["model"].get("digest") == digest
                 and value.get("generation") == sampling), None)


def _newest_first(run_dir: Path) -> Iterator[dict[str, Any]]:
    found = []
    for path in run_dir.glob(f"eval/*/{EVALUATION}"):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            found.append((path.stat().st_mtime_ns, path.parent.name, value))
        except (OSError, ValueError, RecursionError):
            continue
    for _, _, value in sorted(found, key=lambda entry: entry[:2], reverse=True):
        if isinstance(value, dict):
            yield value


def _own_settings(evaluation: dict[str, Any], config: TrainConfig, target: Target) -> bool:
    """Whether reward, prompts and the base of the KL are those of the run."""
    model, told = evaluation.get("model"), evaluation.get("settings")
    if not (isinstance(model, dict) and isinstance(told, dict)
            and all(isinstance(told.get(part), dict) for part in ("reward", "prompts", "model"))):
        return False
    own = json.loads(json.dumps(asdict(config), default=str))
    if PYTHON_OBJECT in json.dumps([told["reward"], told["prompts"]]):
        return False  # which object it was is not known
    digest = _prompts_digest(target)
    return ({"fn", "fns", "kwargs"} <= told["reward"].keys()
            and told["reward"] == {name: own["reward"].get(name) for name in told["reward"]}
            and _prompts(told["prompts"]) == _prompts(own["prompts"])
            and digest in (None, told["prompts"].get("digest"))
            and all(told["model"].get(name) == own["model"][name]
                    for name in ("path", "revision", "tokenizer_path")))


def _prompts(told: dict[str, Any]) -> dict[str, Any]:
    """Settings of prompts without what says how many responses there are to each."""
    kept = {name: value for name, value in told.items() if name not in ("digest", "count")}
    of_eval = told.get("eval")
    if isinstance(of_eval, dict):
        kept["eval"] = {name: value for name, value in of_eval.items() if name != "repeat"}
    return kept


def _prompts_digest(target: Target) -> str | None:
    """Of the run's evaluation prompts, as a checkpoint tells it; None where none does."""
    assert target.run_dir is not None
    for path in sorted(target.run_dir.glob("checkpoints/step-*/state.json"), reverse=True):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["digests"]["evaluation prompts"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return str(found)
    return None


def _loaded(target: Target, config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """Digest of the weights and the run's sampling at evaluation, as an evaluation tells them."""
    from transformers.utils import logging as transformers_logging

    from ppocli.models.loading.language_model import load_lm, load_tokenizer
    from ppocli.tasks.ppo.digests import weights_digest
    from ppocli.tasks.ppo.session import sampling_specs

    transformers_logging.disable_progress_bar()
    own = replace(config.model, path=target.model, tokenizer_path=None, revision=None)
    loaded = load_lm(own)
    spec = sampling_specs(config.generation, load_tokenizer(own), loaded)[1]
    return weights_digest(loaded.lm), json.loads(json.dumps(asdict(spec)))


def without_folders(value: Any, key: str = "") -> Any:
    """The contents of eval.json with folders of this machine cut down to their last part."""
    if isinstance(value, dict):
        # digests of the files of rewards, by path
        return {_last_part(name) if key == "code" else name: without_folders(item, name)
                for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item, key) for item in value]
    return _last_part(value) if isinstance(value, str) and key in _PLACES else value


def _last_part(text: str) -> str:
    return _LOCAL.sub("", text, count=1) if _LOCAL.match(text) else text
