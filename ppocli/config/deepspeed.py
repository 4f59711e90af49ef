"""The DeepSpeed configuration of a run, computed once from its settings and a file of the user's.

Nothing is filled in later, by accelerate or DeepSpeed, but the interval at which DeepSpeed prints,
which accelerate sets to never.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppocli.builtin.names import shipped_table
from ppocli.config import schema, tasks
from ppocli.config.problems import listed
from ppocli.errors import ConfigError
from ppocli.text import cut, did_you_mean, shown

KEY = "hardware.deepspeed_config"
DEEPSPEED_FILE = "deepspeed.json"
"""in a run folder: what DeepSpeed was given"""

_DEFAULTS = {"zero_optimization": {"reduce_bucket_size": 2**24}}
"""where the file says nothing: gradients are reduced in buckets of 64 MiB instead of DeepSpeed's 2
GB, which it takes at once on a GPU, and holds up to three times while it reduces one"""
# what another part of the program has to know of, and doesn't
_FOREIGN = ("amp", "autotuning", "compression_training", "curriculum_learning", "data_efficiency",
            "elasticity", "hybrid_engine", "pipeline", "progressive_layer_drop",
            "sparse_attention", "tensor_parallel", "weight_quantization")
_GIVEN_UP = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param",
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
    """What DeepSpeed is given: the user's own file, if there is one, filled in from the settings.
    What the file calls ``"auto"`` is as if it were left out.

    The accumulation boundary is set for each micro-batch by the engine, so DeepSpeed's own count of
    accumulation steps stays 1; losses are normalised over all ranks by the engine.

    Args:
        world: number of ranks, where it is not that of the settings.

    Raises:
        ConfigError: the file can't be read, or all that contradicts the settings in it.
    """
    own = _own(cfg, world or cfg.hardware.num_processes * cfg.hardware.num_nodes)
    if (file := cfg.hardware.deepspeed_config) is None:
        return _merged(_DEFAULTS, own)
    theirs = _without_auto(_read(Path(file)))
    found = list(dict.fromkeys([*_unknown(theirs), *_unusable(theirs, cfg),
                                *_differences(theirs, own, tasks.updates_section(cfg))]))
    if found:
        raise ConfigError(listed(found, f"{file}: ", f"in {file}"), where=KEY, fix="correct the "
                          "file; what it leaves out, or calls \"auto\", is filled in")
    return _merged(_merged(_DEFAULTS, theirs), own)


def _own(cfg: schema.TrainConfig, world: int) -> dict[str, Any]:
    """What the settings come to."""
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
    for prefix, names, known in (
            ("", theirs, table["deepspeed"]),
            ("zero_optimization.", _zero(theirs), table["deepspeed_zero"])):
        for name in names:
            if prefix and name in _GIVEN_UP:
                yield f"{prefix}{name}: DeepSpeed has given it up for {prefix}{_GIVEN_UP[name]}"
            elif name not in known:
                yield f"{prefix}{name}: DeepSpeed has no such key{did_you_mean(name, known)}"


def _unusable(theirs: Mapping[str, Any], cfg: schema.TrainConfig) -> Iterator[str]:
    """Sections that a run has no use for, and offloading that the settings don't know of."""
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
        section, wanted = _zero(theirs).get(name), getattr(cfg.hardware, name)
        if not isinstance(section, dict):
            if section is not None:
                yield f"zero_optimization.{name} is {shown(section)}, not an object"
        elif section.get("device") == "nvme":
            yield (f"zero_optimization.{name}.device is nvme, but ppocli offloads to host memory "
                   f"only: cpu, with hardware.{name}=true")
        elif section.get("device", "none") != "none" and not wanted:
            yield (f"zero_optimization.{name}.device is {shown(section['device'])}, but "
                   f"hardware.{name} is false: set hardware.{name}=true")


def _differences(theirs: Mapping[str, Any], own: Mapping[str, Any], section: str,
                 prefix: str = "") -> Iterator[str]:
    """Where the file says something else than the settings."""
    for name, value in own.items():
        key = prefix + name
        if name not in theirs or key == "steps_per_print":
            continue
        there = theirs[name]
        if isinstance(value, dict):
            if isinstance(there, dict):
                yield from _differences(there, value, section, f"{key}.")
            elif not name.startswith("offload_"):
                yield f"{key} is {_json(there)}, not an object"
        elif (there != value or isinstance(there, bool) != isinstance(value, bool)) \
                and there != "nvme":
            yield (f"{key} is {_json(there)}, the settings make it {_json(value)}: "
                   + _DECIDED_BY.get(key, f"remove {key}").format(section))


def _merged(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``theirs`` with what it leaves out from ``own``."""
    return {**theirs, **{name: _merged(theirs[name], value) if isinstance(value, dict)
                         and name in theirs else value for name, value in own.items()}}


def _json(value: Any) -> str:
    return cut(json.dumps(value), 80)
