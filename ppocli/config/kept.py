"""What a run was last started with, kept in its run.json: whether its config.yaml still says so,
and how the run is gone on with."""

import copy
import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import yaml
from omegaconf.errors import OmegaConfBaseException

from ppocli.config import bounded, resolved, schema, tasks
from ppocli.errors import CheckpointError
from ppocli.text import pasted, shown

OBJECT_KEYS = {"reward_fn": "reward.fn", "metric_fn": "reward.metric_fn",
               "prompts": "prompts.path", "eval_prompts": "prompts.eval.path",
               "data": "data.path", "val_data": "data.val"}
"""the key whose place each Python object takes"""
RUN_FILE = "run.json"
"""identity of a run, who started it, what it was last started with, and what a resume changed"""
KEPT, BEFORE = "config", "config_before"
"""texts of config.yaml in it: as it has to be; as it still is if a kill came between the files"""


def kept_texts(run_dir: Path) -> list[str]:
    """The text of config.yaml as the run last accepted it, and as it was before that, which it
    still is if a kill came between; none of a run of an earlier version."""
    try:
        told = bounded.read_json(run_dir / RUN_FILE)
    except (OSError, ValueError):
        return []
    return [text for name in (KEPT, BEFORE)
            if isinstance(told, dict) and isinstance(text := told.get(name), str)]


def _config_of(text: str) -> schema.TrainConfig | None:
    with suppress(yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        return resolved.parsed(text)
    return None


def settings_before(run_dir: Path, *, accept_changes: bool) -> schema.TrainConfig:
    """The configuration that a run was last started with, to compare the next one with.

    Args:
        accept_changes: config.yaml may have been changed by hand.

    Raises:
        CheckpointError: config.yaml is missing or damaged, or was changed by hand.
    """
    path = run_dir / resolved.CONFIG_FILE
    now = resolved.read_config(path)
    kept = [resolved.in_place(config, run_dir) for text in kept_texts(run_dir)
            if (config := _config_of(text))]
    differ = [resolved.config_differences(config, now) for config in kept]
    if all(differ) and kept and not accept_changes:
        lines = [f"  {key}: {shown(before)} -> {shown(after)}" for key, before, after in differ[0]]
        raise CheckpointError(
            "\n".join([f"{path} is not what the run was last started with:", *lines]),
            where=str(path), fix="put these settings back, or go on with them: --accept-changes")
    # paths in lists were kept as they were typed
    return resolved.with_absolute_paths(kept[0] if kept else now)


def change_line(key: str, before: object, after: object) -> str:
    """``changed on resume: KEY: BEFORE -> AFTER``, and whether the run differs from here on."""
    differs = resolved.classify_change(key) != "harmless"
    return (f"changed on resume: {key}: {shown(before)} -> {shown(after)}"
            + " (from here on the run differs)" * differs)


def keeping_styles(config: schema.TrainConfig, own: schema.TrainConfig,
                   given: Collection[str] | None = None) -> schema.TrainConfig:
    """A copy in which rewards that a run's ``own`` configuration names too have the style that the
    run found for them; that of others is to be found.

    Args:
        given: keys whose value stays as it is; None: of all styles that ``config`` names.
    """
    if given is None:
        given = {key for key, style in resolved.flat(config).items()
                 if key.startswith("reward.") and key.endswith(".style") and style != "auto"}
    reward, before = copy.deepcopy(config.reward), own.reward
    if "reward.style" not in given:
        reward.style = before.style if reward.fn == before.fn else "auto"
    for name, entry in reward.fns.items():
        if isinstance(entry, dict) and f"reward.fns.{name}.style" not in given:
            old = before.fns.get(name) or {}
            entry.pop("style", None)
            if old.get("fn") != entry.get("fn"):
                entry["style"] = "auto"
            elif "style" in old:
                entry["style"] = old["style"]
    return replace(config, reward=reward)


def objects_of(config: schema.TrainConfig) -> list[str]:
    """Names of the Python objects that a run was started with."""
    return [name for name, key in OBJECT_KEYS.items()
            if attrgetter(key)(config) == resolved.PYTHON_OBJECT]


def how_to_resume(config: schema.TrainConfig, run_dir: Path | str, *words: str) -> str:
    """The command that goes on with a run, or the call where Python objects are in its
    configuration; with further words."""
    if not (names := objects_of(config)):
        return " ".join(["ppocli resume", pasted(run_dir), *words])
    call = {"sft": "sft", "reward_model": "train_reward_model"}.get(
        tasks.task_name(config), "train")
    given = json.dumps([f"resume={run_dir}", *words])
    return f"ppocli.{call}({given}" + "".join(f", {name}=..." for name in names) + ")"
