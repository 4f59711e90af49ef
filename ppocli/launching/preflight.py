"""Is everything there that a run names? Asked before torch is loaded, answered all at once.

Loading torch and transformers takes seconds, and a missing model would be noticed one at a time;
a user without network should read within a few seconds everything that has to be put in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppocli.config.algorithm import require_optimizer, value_optimizer
from ppocli.config.hub import hub_reachable, offline_hint
from ppocli.config.keys import is_import_path
from ppocli.config.schema import TrainConfig
from ppocli.data.sources import names_hub_dataset
from ppocli.errors import InputError
from ppocli.rewards.resolve import MODEL_REWARDS
from ppocli.storage.model_files import Needs, find_model


def check_inputs(cfg: TrainConfig) -> None:
    """Look for every model, data set and tracker the configuration names.

    Raises:
        InputError: lists all that are missing, each with the key that takes a local folder.
    """
    problems = missing_inputs(cfg)
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    lines = [f"  {p.where}: {p.what}\n    fix: {p.fix}" for p in problems]
    raise InputError("\n".join([f"{len(problems)} inputs are missing:", *lines]),
                     fix="give local folders and files for them, or run once with network")


def missing_inputs(cfg: TrainConfig) -> list[InputError]:
    """Every package, model and data set that isn't there, each with its key in ``where``."""
    return [*_missing_packages(cfg), *_missing_models(cfg), *_missing_data(cfg)]


def _missing_packages(cfg: TrainConfig) -> Iterator[InputError]:
    try:
        require_optimizer(cfg.ppo.optimizer)
        require_optimizer(value_optimizer(cfg.ppo))
    except InputError as error:
        yield error
    for name in cfg.tracking.trackers:
        if is_import_path(name):
            continue
        found = find_spec(name)
        # a folder of that name, as wandb makes one for its files, is no package of that name
        if found is None or found.origin is None:
            yield InputError(f"The tracker {name} is not installed.", where="tracking.trackers",
                             fix=f'pip install "ppocli[{name}]", or leave it out')


def _named_models(cfg: TrainConfig) -> Iterator[tuple[str, str, str | None, Needs]]:
    """(key, name, revision, needs) of every model """
    if cfg.model.tokenizer_path:
        yield "model.path", cfg.model.path, cfg.model.revision, "model"
        yield "model.tokenizer_path", cfg.model.tokenizer_path, None, "tokenizer"
    else:
        yield "model.path", cfg.model.path, cfg.model.revision, "model and tokenizer"
    for key, path in (("model.value.path", cfg.model.value.path),
                      ("model.reference.path", cfg.model.reference.path)):
        if path is not None:
            yield key, path, None, "model"
    rewards: dict[str, tuple[Any, Any]] = {"reward.kwargs": (cfg.reward.fn, cfg.reward.kwargs)}
    for name, entry in cfg.reward.fns.items():
        if isinstance(entry, dict):
            rewards[f"reward.fns.{name}.kwargs"] = (entry.get("fn"), entry.get("kwargs"))
    for key, (fn, kwargs) in rewards.items():
        model = kwargs.get("model") if isinstance(kwargs, dict) else None
        if fn in MODEL_REWARDS and isinstance(model, str):
            yield f"{key}.model", model, kwargs.get("revision"), "model and tokenizer"


def _missing_models(cfg: TrainConfig) -> Iterator[InputError]:
    for key, name, revision, needs in _named_models(cfg):
        try:
            find_model(name, key=key, revision=revision, needs=needs)
        except InputError as error:
            named = error.where is not None and error.where.startswith(key)
            yield error if named else error.reworded(where=key)


def _missing_data(cfg: TrainConfig) -> Iterator[InputError]:
    for key, path in (("prompts.path", cfg.prompts.path),
                      ("prompts.eval.path", cfg.prompts.eval.path)):
        if path is None or path.startswith("<") or not names_hub_dataset(path):
            continue
        if not hub_reachable() and not _in_cache(path):
            yield InputError(f"Data set {path!r} is not on this machine and {offline_hint()}.",
                             where=key, fix=f"give a file or folder: {key}=/path, or run once with "
                             f"network: hf download --repo-type dataset {path} --local-dir DIR")


def _in_cache(name: str) -> bool:
    """Whether a data set's folder is in either cache that `datasets` may load it from offline."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    raw = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = name.replace("/", "___")
    return ((prepared / folder).is_dir() or (prepared / folder.lower()).is_dir()
            or (raw / f"datasets--{name.replace('/', '--')}").is_dir())
