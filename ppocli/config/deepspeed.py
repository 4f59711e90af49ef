"""The DeepSpeed configuration of a run, computed once from its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppocli.config.schema import TrainConfig
from ppocli.errors import ConfigError

_OURS = ("optimizer", "scheduler")


def deepspeed_config(cfg: TrainConfig) -> dict[str, Any]:
    """What DeepSpeed is given: the user's own file, if there is one, filled in from the settings.

    The accumulation boundary is set for each micro-batch by the engine, so DeepSpeed's own count of
    accumulation steps stays 1; losses are normalised over all ranks by the engine.

    Raises:
        ConfigError: the file can't be read, or contradicts a setting.
    """
    hardware = cfg.hardware
    zero: dict[str, Any] = {"stage": hardware.zero_stage}
    if hardware.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if hardware.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    own = {
        "train_micro_batch_size_per_gpu": cfg.ppo.micro_batch_size or cfg.ppo.mini_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.ppo.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "torch_autocast": {"enabled": hardware.precision == "bf16", "dtype": "bfloat16"},
    }
    if hardware.deepspeed_config is None:
        return own
    return _merged(_read(Path(hardware.deepspeed_config)), own, "", hardware.deepspeed_config)


def _read(path: Path) -> dict[str, Any]:
    key = "hardware.deepspeed_config"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}", where=key,
                          fix="give a DeepSpeed configuration file") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object.", where=key,
                          fix="give a DeepSpeed configuration file")
    for name in _OURS:
        if name in value:
            raise ConfigError(f"{path} has a section {name!r}; ppocli makes its own.", where=key,
                              fix=f"remove it and set ppo.{name}.* instead")
    for name in ("fp16", "bf16"):
        if isinstance(value.get(name), dict) and value[name].get("enabled") is True:
            raise ConfigError(f"{path} turns {name} on; weights stay fp32 here.", where=key,
                              fix="remove the section; for bf16 computation set "
                              "hardware.precision=bf16")
    return value


def _merged(theirs: dict[str, Any], own: dict[str, Any], prefix: str, file: str
            ) -> dict[str, Any]:
    """``theirs`` with what it leaves out, or calls "auto", from ``own``.

    Raises:
        ConfigError: both set the same thing differently.
    """
    result = dict(theirs)
    for name, value in own.items():
        there = theirs.get(name, "auto")
        if there == "auto":
            result[name] = value
        elif isinstance(value, dict) and isinstance(there, dict):
            result[name] = _merged(there, value, f"{prefix}{name}.", file)
        elif there != value and name not in ("steps_per_print",):
            raise ConfigError(f"{file} sets {prefix}{name} to {there!r}, the configuration makes "
                              f"it {value!r}.", where="hardware.deepspeed_config",
                              fix=f"remove {name} from the file, or write \"auto\"; "
                              "ppo.micro_batch_size, ppo.max_grad_norm and hardware.zero_stage "
                              "decide")
    return result
