"""The configuration that a run was last started with, stored in its run.json: whether config.yaml
still agrees with it, and the command that resumes the run."""

import copy
import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

import yaml
from omegaconf.errors import OmegaConfBaseException

from ppocli.config import config_yaml, schema, tasks
from ppocli.config.keys import key_for
from ppocli.config.text import pasted, shown
from ppocli.errors import CheckpointError

OBJECT_KEYS = {"reward_fn": "reward.fn", "metric_fn": "reward.metric_fn",
               "prompts": "prompts.path", "eval_prompts": "prompts.eval.path",
               "data": "data.path", "val_data": "data.val"}
"""the key whose place each Python object takes"""
SETTLED = ("model.chat_template_date", "prompts.chat")
"""keys that a run whose configuration leaves them open settles at its first start"""
RUN_FILE = "run.json"
"""identity of a run, who started it, what it was last started with, and what a resume changed"""
ChangeKind = Literal["harmless", "accepted", "refused"]
KEPT, BEFORE = "config", "config_before"
"""texts of config.yaml in it: as it has to be; as it still is if a kill came between the files"""

_HARMLESS_SECTIONS = ("eval.", "checkpoint.", "tracking.")
_REFUSED_SECTIONS = ("prompts.", "data.", "task.", "ppo.ptx.data.")
"""sections in which a change would give saved state another meaning"""


def classify_change(key: str) -> ChangeKind:
    """The effect of a change of ``key`` on a run that resumes from a checkpoint.

    ``refused``: the saved weights, optimizer state, prompt cursor or random streams would no
    longer fit, or the best-so-far score would be compared with another task's. ``harmless``: the
    steps already planned have the same result. ``accepted``: training goes on differently from
    here, as the user asked.
    """
    schema_key = key_for(key)
    policy = schema_key and schema_key.metadata["on_resume"]
    if policy == "harmless" or key.startswith(_HARMLESS_SECTIONS):
        return "harmless"
    return "refused" if policy == "refused" or key.startswith(_REFUSED_SECTIONS) else "accepted"


def kept_texts(run_dir: Path) -> list[str]:
    """The text of config.yaml as the run last accepted it, and the text before that, which is still
    in the file if the run was killed in between; empty for runs of an earlier version."""
    try:
        record = json.loads((run_dir / RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return []
    return [text for name in (KEPT, BEFORE)
            if isinstance(record, dict) and isinstance(text := record.get(name), str)]


def _config_of(text: str) -> schema.TrainConfig | None:
    with suppress(yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        return config_yaml.parsed(text)
    return None


def settings_before(run_dir: Path, *, accept_changes: bool) -> schema.TrainConfig:
    """The configuration that a run was last started with, to compare the next one with.

    Args:
        accept_changes: config.yaml may have been changed by hand.

    Raises:
        CheckpointError: config.yaml is missing or damaged, or was changed by hand.
    """
    path = run_dir / config_yaml.CONFIG_FILE
    now = config_yaml.read_config(path)
    kept = [config_yaml.in_place(config, run_dir) for text in kept_texts(run_dir)
            if (config := _config_of(text))]
    differ = [config_yaml.config_differences(config, now) for config in kept]
    if all(differ) and kept and not accept_changes:
        lines = [f"  {key}: {shown(before)} -> {shown(after)}" for key, before, after in differ[0]]
        raise CheckpointError(
            "\n".join([f"{path} is not what the run was last started with:", *lines]),
            where=str(path), fix="put these settings back, or go on with them: --accept-changes")
    # paths in lists were kept as they were typed
    return config_yaml.with_absolute_paths(kept[0] if kept else now)


def change_line(key: str, before: object, after: object) -> str:
    """``changed on resume: KEY: BEFORE -> AFTER``, and whether the run differs from here on."""
    differs = classify_change(key) != "harmless"
    return (f"changed on resume: {key}: {shown(before)} -> {shown(after)}"
            + " (from here on the run differs)" * differs)


def keeping_settled(config: schema.TrainConfig, run_config: schema.TrainConfig,
                   typed_keys: Collection[str] | None = None) -> schema.TrainConfig:
    """A copy of ``config`` with the values that a run chose for itself at its first start: the
    style of each reward that both configurations name (the style of others stays ``auto``), and
    the keys of :data:`SETTLED` that ``config`` leaves open.

    Args:
        run_config: the configuration in the run's folder.
        typed_keys: keys that keep the value in ``config``; None: all that ``config`` sets.
    """
    if typed_keys is None:
        typed_keys = {key for key, style in config_yaml.flat(config).items()
                      if key.startswith("reward.") and key.endswith(".style") and style != "auto"}
    reward, before = copy.deepcopy(config.reward), run_config.reward
    if "reward.style" not in typed_keys:
        reward.style = before.style if reward.fn == before.fn else "auto"
    for name, entry in reward.fns.items():
        if isinstance(entry, dict) and f"reward.fns.{name}.style" not in typed_keys:
            old = before.fns.get(name) or {}
            entry.pop("style", None)
            if old.get("fn") != entry.get("fn"):
                entry["style"] = "auto"
            elif "style" in old:
                entry["style"] = old["style"]
    for name in SETTLED:
        section, key = name.split(".")
        if name not in typed_keys and getattr(getattr(config, section), key) is None:
            config = replace(config, **{section: replace(getattr(config, section), **{
                key: getattr(getattr(run_config, section), key)})})
    return replace(config, reward=reward)


def objects_of(config: schema.TrainConfig) -> list[str]:
    """Names of the Python objects that a run was started with."""
    return [name for name, key in OBJECT_KEYS.items()
            if attrgetter(key)(config) == config_yaml.PYTHON_OBJECT]


def how_to_resume(config: schema.TrainConfig, run_dir: Path | str, *words: str) -> str:
    """The command that resumes a run, with further words; the Python call if its configuration
    holds Python objects."""
    if not (names := objects_of(config)):
        return " ".join(["ppocli resume", pasted(run_dir), *words])
    call = {"sft": "sft", "reward_model": "train_reward_model"}.get(
        tasks.task_name(config), "train")
    words_json = json.dumps([f"resume={run_dir}", *words])
    return f"ppocli.{call}({words_json}" + "".join(f", {name}=..." for name in names) + ")"
