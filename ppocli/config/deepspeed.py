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
from ppocli.config.text import cut, did_you_mean, shown
from ppocli.errors import ConfigError

KEY = "hardware.deepspeed_config"
DEEPSPEED_FILE = "deepspeed.json"
"""the run folder's copy of the configuration that DeepSpeed received"""

_DEFAULTS = {"zero_optimization": {"reduce_bucket_size": 2**24}}
"""used if the file doesn't set it: gradients are reduced in buckets of 64 MiB. DeepSpeed's default,
2 GB, is allocated at once on a GPU, up to three times while it reduces"""
# sections that other parts of ppocli would have to support, and don't
_FOREIGN = ("amp", "autotuning", "compression_training", "curriculum_learning", "data_efficiency",
            "elasticity", "hybrid_engine", "pipeline", "progressive_layer_drop",
            "sparse_attention", "tensor_parallel", "weight_quantization")
_RENAMED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param",
            "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory"}
"""what DeepSpeed's keys of ZeRO are called now"""
# which of our keys decides; {} is the section of updates
_DECIDED_BY = {
    "train_batch_size": "it is {}.micro_batch_size times the number of ranks",
    "train_micro_batch_size_per_gpu": "{}.micro_batch_size decides",
    "gradient_accumulation_steps": "{0}.mini_batch_size and {0}.micro_batch_size decide, and "
    "accumulation is ppocli's own",
    "gradient_clipping": "{}.max_grad_norm decides",
    "zero_optimization.stage": "hardware.zero_stage decides",
    "fp16.enabled": "weights stay fp32; there is no fp16",
    "bf16.enabled": "weights stay fp32; hardware.precision=bf16 computes in bf16",
    "torch_autocast.enabled": "hardware.precision decides",
    "torch_autocast.dtype": "hardware.precision decides",
    "torch_autocast.lower_precision_safe_modules": "gathering and reducing are in fp32"}


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
    problems = list(dict.fromkeys([*_unknown(theirs), *_unusable(theirs, cfg),
                                   *_differences(theirs, settings, tasks.updates_section(cfg))]))
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


def _zero(theirs: Mapping[str, Any]) -> dict[str, Any]:
    zero = theirs.get("zero_optimization")
    return zero if isinstance(zero, dict) else {}


def _unknown(theirs: Mapping[str, Any]) -> Iterator[str]:
    table = shipped_table("library_keys.yaml")
    for prefix, names, accepted in (
            ("", theirs, table["deepspeed"]),
            ("zero_optimization.", _zero(theirs), table["deepspeed_zero"])):
        for name in names:
            if prefix and name in _RENAMED:
                yield f"{prefix}{name}: DeepSpeed has given it up for {prefix}{_RENAMED[name]}"
            elif name not in accepted:
                yield f"{prefix}{name}: DeepSpeed has no such key{did_you_mean(name, accepted)}"


def _unusable(theirs: Mapping[str, Any], cfg: schema.TrainConfig) -> Iterator[str]:
    """Sections that a run can't use, and offloading that the settings don't turn on."""
    for name in ("optimizer", "scheduler"):
        if name in theirs:
            yield (f"{name}: ppocli makes its own; remove the section and set "
                   f"{tasks.updates_section(cfg)}.{name}.*")
    for name in _FOREIGN:
        value = theirs.get(name)
        if value and not (isinstance(value, dict) and value.get("enabled") is False):
            yield f"{name}: ppocli does not work with it; remove the section"
    if theirs.get("sequence_parallel_size", 1) != 1:
        yield "sequence_parallel_size: ppocli does not work with it; remove it"
    for name in ("offload_optimizer", "offload_param"):
        section, offloads = _zero(theirs).get(name), getattr(cfg.hardware, name)
        if not isinstance(section, dict):
            if section is not None:
                yield f"zero_optimization.{name} is {shown(section)}, not an object"
        elif section.get("device") == "nvme":
            yield (f"zero_optimization.{name}.device is nvme, but ppocli offloads to host memory "
                   f"only: cpu, with hardware.{name}=true")
        elif section.get("device", "none") != "none" and not offloads:
            yield (f"zero_optimization.{name}.device is {shown(section['device'])}, but "
                   f"hardware.{name} is false: set hardware.{name}=true")


def _differences(theirs: Mapping[str, Any], settings: Mapping[str, Any], section: str,
                 prefix: str = "") -> Iterator[str]:
    """Values in the file that differ from those of the settings."""
    for name, value in settings.items():
        key = prefix + name
        if name not in theirs or key == "steps_per_print":
            continue
        file_value = theirs[name]
        if isinstance(value, dict):
            if isinstance(file_value, dict):
                yield from _differences(file_value, value, section, f"{key}.")
            elif not name.startswith("offload_"):
                yield f"{key} is {_json(file_value)}, not an object"
        elif (file_value != value or isinstance(file_value, bool) != isinstance(value, bool)) \
                and file_value != "nvme":
            yield (f"{key} is {_json(file_value)}, the settings make it {_json(value)}: "
                   + _DECIDED_BY.get(key, f"remove {key}").format(section))


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``overrides`` in place of its own, at any depth."""
    return {**base, **{name: _merged(base[name], value) if isinstance(value, dict)
                       and name in base else value for name, value in overrides.items()}}


def _json(value: Any) -> str:
    return cut(json.dumps(value), 80)
