"""Checks before torch is loaded that everything exists that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ppocli.builtin.names import LIBRARIES, TOOLS
from ppocli.config import config_yaml, import_guard, keys, schema, tasks
from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.keys import row_paths
from ppocli.config.user_code import CodeSetting, Kind, refuse_absent
from ppocli.data import chat_text, gym_tasks, sources
from ppocli.environments.registry import ENVIRONMENT, TOOL
from ppocli.errors import ConfigError, InputError
from ppocli.models.loading.tokenizer import read_template
from ppocli.rewards.resolve import MODEL_REWARDS, REWARD, STEPS
from ppocli.runs import checkpoints, environment, hub, model_files


def check_inputs(cfg: schema.TrainConfig) -> None:
    """Look for every model, data set, tracker and function the configuration names, and for the
    prompts' columns, before torch is loaded.

    Loading torch and transformers takes seconds, and a missing model would be noticed one at a
    time; a user without network should read within a few seconds everything that is missing. No
    code of the user's runs.

    Raises:
        ConfigError: a DeepSpeed file can't be read or contradicts a setting.
        InputError: lists all that are missing, each with the key that takes a local folder; or the
            first prompt can't be read.
        PpocliError: of its kind: an import path leads nowhere.
    """
    if cfg.hardware.zero_stage > 0:
        deepspeed_config(cfg)
    if not (missing := missing_inputs(cfg)):
        for code in named_code(cfg):
            refuse_absent(code)
        if tasks.task_name(cfg) not in tasks.DATA_TASKS:
            _check_first_prompts(cfg.prompts)
        return
    if len(missing) == 1:
        raise missing[0]
    lines = [f"  {p.where}: {p.what}\n    fix: {p.fix}" for p in missing]
    raise InputError("\n".join([f"{len(missing)} inputs are missing:", *lines]),
                     fix="give local folders and files for them, or run once with network")


def named_code(cfg: schema.TrainConfig) -> list[CodeSetting]:
    """Every import path or built-in's name, with the key that it came from."""
    reward, env, code = cfg.reward, cfg.env, list[tuple[str | None, str, Kind]]()
    if tasks.task_name(cfg) not in tasks.DATA_TASKS:
        code += [(path, f"{key}.fn", REWARD) for key, path, _ in schema.rewards_of(reward)]
        code += [(reward.metric_fn, "reward.metric_fn", REWARD),
                 (reward.step_fn, "reward.step_fn", STEPS)]
    code += [(path, "env.tools", TOOL) for path in env.tools] if env.fn == TOOLS else [
        (env.fn, "env.fn", ENVIRONMENT)]
    if cfg.task.fn not in tasks.DATA_TASKS:
        code.append((cfg.task.fn, "task.fn", Kind("function", ConfigError)))
    if cfg.rollout.engine not in tasks.OUR_ENGINES:
        code.append((cfg.rollout.engine, "rollout.engine", Kind("class", ConfigError)))
    return [CodeSetting(path, key, kind) for path, key, kind in code
            if path is not None and path != config_yaml.PYTHON_OBJECT]


def _check_first_prompts(cfg: schema.PromptsConfig) -> None:
    """The first prompt of each local source has a text in the column that is asked for."""
    for spec in (*sources.training_specs(cfg, None), *sources.evaluation_specs(cfg, None)):
        if spec.items is not None or (spec.path is not None and not spec.path.startswith("<")
                                      and not sources.names_hub_dataset(spec.path)):
            chat_text.take_rows(sources.open_rows(spec, []), spec, [], most=1)


def missing_inputs(cfg: schema.TrainConfig) -> list[InputError]:
    """Every package, model and data set that is missing, each with its key in ``where``."""
    return [*_missing_packages(cfg), *_missing_models(cfg), *_missing_data(cfg)]


def _missing_packages(cfg: schema.TrainConfig) -> Iterator[InputError]:
    try:
        for optimizer in tasks.optimizers_of(tasks.updates_of(cfg)):
            tasks.require_optimizer(optimizer, tasks.updates_section(cfg))
    except InputError as error:
        yield error
    for name in cfg.tracking.trackers:
        if keys.is_import_path(name):
            continue
        if not import_guard.installed(name):
            yield InputError(f"The tracker {name} is not installed.", where="tracking.trackers",
                             fix=f"{import_guard.pip_line(name)}, or leave it out",
                             code="not-installed")
    needs = [(f"{key}.fn", fn, LIBRARIES.get(str(fn)))
             for key, fn, _ in (*schema.rewards_of(cfg.reward), ("env", cfg.env.fn, {}))]
    needs += [(key, path, LIBRARIES["reasoning_gym"]) for key, path in _data_paths(cfg)
              if path.startswith(gym_tasks.PREFIX)]
    for key, value, library in needs:
        if library and (refusal := import_guard.missing(library, f"{key}={value}", key)):
            yield refusal


def _named_models(cfg: schema.TrainConfig
                  ) -> Iterator[tuple[str, str, str | None, model_files.Needs]]:
    """(key, name, revision, needs) of every model."""
    tokenizer = cfg.model.tokenizer_path
    yield ("model.path", cfg.model.path, cfg.model.revision,
           "model" if tokenizer else "model and tokenizer")
    if tokenizer:
        yield "model.tokenizer_path", tokenizer, None, "tokenizer"
    if cfg.model.value.path is not None and cfg.model.value.kind == "model":
        start = checkpoints.value_start(cfg.model)
        yield "model.value.path", start.path, start.revision, "model"
    if cfg.model.reference.path is not None:
        yield "model.reference.path", cfg.model.reference.path, None, "model"
    for key, fn, kwargs in schema.rewards_of(cfg.reward):
        model = kwargs.get("model") if isinstance(kwargs, dict) else None
        if fn in MODEL_REWARDS and isinstance(model, str):
            yield f"{key}.kwargs.model", model, kwargs.get("revision"), "model and tokenizer"


def _missing_models(cfg: schema.TrainConfig) -> Iterator[InputError]:
    try:
        checkpoints.saved_critic(cfg.model)
    except InputError as error:
        yield error
    for key, name, revision, needs in _named_models(cfg):
        if name == config_yaml.PYTHON_OBJECT:
            continue
        try:
            find = (model_files.find_model if key in ("model.tokenizer_path", "model.value.path")
                    else model_files.find_whole)
            find(name, key=key, revision=revision, needs=needs)
        except InputError as error:
            named = error.where is not None and error.where.startswith(key)
            yield error if named else error.reworded(where=key)
    if cfg.model.chat_template is not None:
        try:
            read_template(cfg.model.chat_template)
        except InputError as error:
            yield error


def _data_paths(cfg: schema.TrainConfig) -> list[tuple[str, str]]:
    """(key, path) of all prompts and examples."""
    sets = {"prompts.path": cfg.prompts.path, "prompts.eval.path": cfg.prompts.eval.path,
            "ppo.ptx.data.path": cfg.ppo.ptx.data.path, "data.path": cfg.data.path,
            "data.val": tasks.val_source(cfg.data), **{
                f"prompts.mix.{name}.path": entry["path"] for name, entry in cfg.prompts.mix.items()
                if isinstance(entry, dict) and isinstance(entry.get("path"), str)}}
    return [(key, path) for key, value in sets.items() if value is not None
            for path in row_paths(value)]


def _missing_data(cfg: schema.TrainConfig) -> Iterator[InputError]:
    for key, path in _data_paths(cfg):
        if path.startswith("<") or not sources.names_hub_dataset(path):
            continue
        if not hub.hub_reachable() and not _in_cache(path):
            yield InputError(f"Data set {path!r} is not on this machine and {hub.offline_hint()}.",
                             where=key, fix=f"give a file or folder: {key}=/path, or run once with "
                             f"network: hf download --repo-type dataset {path} --local-dir DIR")


def _in_cache(name: str) -> bool:
    """Whether a data set's folder is in either cache that `datasets` may load it from offline."""
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or environment.hub_home() / "datasets")
    raw = Path(os.environ.get("HF_HUB_CACHE") or environment.hub_home() / "hub")
    folder = name.replace("/", "___")
    return ((prepared / folder).is_dir() or (prepared / folder.lower()).is_dir()
            or (raw / f"datasets--{name.replace('/', '--')}").is_dir())
