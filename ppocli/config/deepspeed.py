"""The DeepSpeed configuration of a run, computed once from its settings and the user's file.

Neither accelerate nor DeepSpeed fills anything in later, except the interval at which DeepSpeed
prints, which accelerate sets to never.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppocli.builtin.names import shipped_table
from ppocli.config import schema, tasks
from ppocli.config.problems import listed
from ppocli.config.text import cut, did_you_mean
from ppocli.errors import ConfigError

KEY = "hardware.deepspeed_config"
DEEPSPEED_FILE = "deepspeed.json"
"""the run folder's copy of the configuration that DeepSpeed received"""

_DEFAULTS = {"zero_optimization": {"reduce_bucket_size": 2**24}}
"""used if the file doesn't set it: gradients are reduced in buckets of 64 MiB. DeepSpeed's default,
2 GB, is allocated at once on a GPU, up to three times while it reduces"""


def deepspeed_config(cfg: schema.TrainConfig, world: int | None = None) -> dict[str, Any]:
    """The configuration for DeepSpeed: the user's file, if there is one, completed from the
    settings. A value ``"auto"`` in the file counts as left out.

    The accumulation boundary is set for each micro-batch by the engine, so DeepSpeed's own count of
    accumulation steps stays 1; losses are normalised over all ranks by the engine.

    Args:
        world: number of ranks (default: that of the settings).

    Raises:
        ConfigError: the file can't be read, or contradicts the settings; all contradictions are
            listed.
    """
    settings = _from_settings(cfg, world or cfg.hardware.num_processes * cfg.hardware.num_nodes)
    if (file := cfg.hardware.deepspeed_config) is None:
        return _merged(_DEFAULTS, settings)
    theirs = _without_auto(_read(Path(file)))
    problems = [*_unusable(theirs, tasks.updates_section(cfg)), *_differences(theirs, settings)]
    if problems:
        raise ConfigError(listed(problems, f"{file}: ", f"in {file}"), where=KEY, fix="correct the "
                          "file; what it leaves out, or calls \"auto\", is filled in")
    return _merged(_merged(_DEFAULTS, theirs), settings)


def _from_settings(cfg: schema.TrainConfig, world: int) -> dict[str, Any]:
    """The configuration that follows from the settings alone."""
    hardware = cfg.hardware
    updates = tasks.updates_of(cfg)
    micro = tasks.rows_per_pass(updates)
    offloaded = [name for name in ("offload_optimizer", "offload_param") if getattr(hardware, name)]
    return {
        "train_batch_size": micro * world,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": updates.max_grad_norm or 0.0,
        "zero_optimization": {"stage": hardware.zero_stage,
                              **{name: {"device": "cpu"} for name in offloaded}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        # modules named here would be gathered, and their gradients reduced, in bf16: the value head
        # computes in fp32, and tied embeddings would differ from those that rollouts are made with
        "torch_autocast": {"enabled": hardware.precision == "bf16", "dtype": "bfloat16",
                           "lower_precision_safe_modules": []}}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}", where=KEY,
                          fix="give a DeepSpeed configuration file") from error
    return value


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _without_auto(value) if isinstance(value, dict) else value
            for name, value in values.items() if value != "auto"}


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _unusable(theirs: Mapping[str, Any], section: str) -> Iterator[str]:
    """Keys that DeepSpeed would ignore or refuse on every rank, and sections that ppocli makes."""
    table, zero = shipped_table("library_keys.yaml"), _section(theirs, "zero_optimization")
    for prefix, names, accepted in (("", theirs, table["deepspeed"]),
                                    ("zero_optimization.", zero, table["deepspeed_zero"])):
        for name in names:
            if name not in accepted:
                yield (f"{prefix}{name}: no key of DeepSpeed that can be set here"
                       f"{did_you_mean(name, accepted)}")
    for name in ("optimizer", "scheduler"):
        if name in theirs:
            yield f"{name}: ppocli makes its own; remove the section and set {section}.{name}.*"
    for name in ("offload_optimizer", "offload_param"):
        device = _section(zero, name).get("device", "none")
        if device not in ("none", "cpu"):
            yield (f"zero_optimization.{name}.device is {device}, but ppocli offloads to host "
                   f"memory only: cpu, with hardware.{name}=true")


def _differences(theirs: Mapping[str, Any], settings: Mapping[str, Any], prefix: str = ""
                 ) -> Iterator[str]:
    """Values in the file that differ from those of the settings."""
    for name, file_value in theirs.items():
        key, value = prefix + name, settings.get(name)
        if key == "zero_optimization":
            value = {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"},
                     **settings[name]}
        if isinstance(value, dict) and isinstance(file_value, dict):
            yield from _differences(file_value, value, f"{key}.")
        elif value is not None and file_value != value and key != "steps_per_print" \
                and file_value != "nvme":
            yield (f"{key} is {cut(json.dumps(file_value), 80)}, the settings make it "
                   f"{json.dumps(value)}: leave it out")


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``overrides`` in place of its own, at any depth."""
    return {**base, **{name: _merged(base[name], value) if isinstance(value, dict)
                       and name in base else value for name, value in overrides.items()}}
