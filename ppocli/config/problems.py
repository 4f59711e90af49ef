"""What is wrong with a composed configuration, all of it at once.

Types are checked while composing; here are the ranges and choices of the schema's field metadata
and the checks that need more than one key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import MISSING

from ppocli.config.adapters import adapter_problems
from ppocli.config.algorithm import algorithm_problems, value_function_problems
from ppocli.config.keys import (
    Key,
    free_mapping_of,
    is_import_path,
    schema_keys,
    several,
)
from ppocli.config.schema import TrainConfig, reference_kind
from ppocli.errors import ConfigError
from ppocli.text import cut, did_you_mean

DEFAULT_SOURCE = "default"
FNS_KEYS = ("fn", "kwargs", "weight")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the key(s), what is wrong and allowed, and where it came from."""

    key: str
    text: str
    source: str = DEFAULT_SOURCE

    def __str__(self) -> str:
        origin = "" if self.source == DEFAULT_SOURCE else f" (from {self.source})"
        return f"{self.key}: {self.text}{origin}"


def raise_problems(problems: list[Problem], fix: str | None = None) -> None:
    """Raise one ConfigError that lists every problem; do nothing if there is none."""
    if not problems:
        return
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        raise ConfigError(lines[0], fix=fix)
    raise ConfigError("\n".join([f"{len(lines)} problems in the configuration:",
                                 *(f"  {line}" for line in lines)]), fix=fix)


def shown(value: Any) -> str:
    """A value as the user would write it, cut to a readable length."""
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    if isinstance(value, float):
        text = f"{value:g}"
    text = text or ("null" if value is None else repr(value) if value == "" else str(value))
    return cut(text, 80)


def value_of(config: TrainConfig, name: str) -> Any:
    """The value at a dotted key of the schema."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


OUR_ENGINES = ("decode", "transformers")
"""values of ``rollout.engine`` that are no import path"""


def find_problems(config: TrainConfig, sources: Mapping[str, str] | None = None,
                  handed_in: frozenset[str] = frozenset()) -> list[Problem]:
    """Everything wrong with a composed configuration.

    Args:
        config: the composed values; ``???`` where a mandatory one is missing.
        sources: where each key's value came from ("command line", a file); a key that is not in
            it has its default.
        handed_in: the keys whose place is taken by a Python object given to ``ppocli.train()``,
            of ``reward.fn``, ``reward.metric_fn``, ``prompts.items``, ``prompts.eval.items``; or
            that a launcher provides, of ``hardware.rdzv_endpoint``, ``run_name``.
    """
    sources = sources or {}
    found = range_problems(config, sources)
    bad = {problem.key for problem in found}
    own = () if config.task.fn is not None else (
        _reward, _prompts, _generation, value_function_problems)
    for check in (_length, _sizes, *own, _seams, algorithm_problems, adapter_problems, _hardware,
                  _run):
        for names, text in check(config, handed_in):
            # a value that is wrong in itself is not also reported as a contradiction
            if not bad.intersection(names):
                origins = [sources.get(name) or sources.get(free_mapping_of(name) or "")
                           for name in names]
                given = dict.fromkeys(origin for origin in origins if origin)
                found.append(Problem(", ".join(names), text,
                                     " and ".join(given) or DEFAULT_SOURCE))
    return found


def range_problems(config: TrainConfig, sources: Mapping[str, str]) -> list[Problem]:
    """Missing values, and those outside what the schema allows, each key for itself."""
    return [Problem(name, text, sources.get(name, DEFAULT_SOURCE))
            for name, key in schema_keys().items()
            for text in _range_problems(key, value_of(config, name))]


def _range_problems(key: Key, value: Any) -> Iterator[str]:
    if isinstance(value, str) and value == MISSING:
        yield f"missing; it must be given: {key.name}=... ({key.metadata['doc']})"
        return
    if key.kind == "mapping":
        yield from (f"{name} is missing; it must be given: {key.name}.{name}=..."
                    for name, item in (value or {}).items() if item == MISSING)
        return
    if value is None:
        return
    if key.kind == "sweep" and isinstance(value, list):
        if not value:
            yield "the list must hold at least one value"
        if len(set(value)) < len(value):
            yield f"{shown(value)} holds a value twice"
    for item in value if isinstance(value, list) else [value]:
        if key.item in (int, float) and isinstance(item, float) and not math.isfinite(item):
            yield f"{shown(item)} must be a finite number"
        elif key.allowed and not _allowed(key.metadata, item):
            hint = (did_you_mean(item, key.metadata["choices"])
                    if key.metadata["choices"] and isinstance(item, str) else "")
            yield f"{shown(item)} must be {key.allowed}{hint}"


def _allowed(metadata: Mapping[str, Any], item: Any) -> bool:
    if metadata["choices"]:
        return item in metadata["choices"] or (metadata["import_path"] and is_import_path(item))
    tests = {"gt": lambda limit: item > limit, "ge": lambda limit: item >= limit,
             "lt": lambda limit: item < limit, "le": lambda limit: item <= limit}
    return all(test(metadata[bound]) for bound, test in tests.items()
               if metadata[bound] is not None)


RESERVED_REWARDS = ("mean", "std", "invalid")

Found = Iterator[tuple[tuple[str, ...], str]]


def _length(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    keys = ("ppo.total_episodes", "ppo.num_steps")
    if config.ppo.total_episodes is None and config.ppo.num_steps is None:
        yield keys, "say how long to train: give one of them"
    if config.ppo.total_episodes is not None and config.ppo.num_steps is not None:
        yield keys, (f"{config.ppo.total_episodes} episodes and {config.ppo.num_steps} steps "
                     "contradict each other: give one and set the other to null")


def _sizes(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    ppo = config.ppo
    if ppo.mini_batch_size > ppo.num_rollouts:
        yield (("ppo.mini_batch_size", "ppo.num_rollouts"),
               f"mini_batch_size {ppo.mini_batch_size} must be at most num_rollouts "
               f"{ppo.num_rollouts}")
    if ppo.micro_batch_size is not None and ppo.micro_batch_size > ppo.mini_batch_size:
        yield (("ppo.micro_batch_size", "ppo.mini_batch_size"),
               f"micro_batch_size {ppo.micro_batch_size} must be at most mini_batch_size "
               f"{ppo.mini_batch_size}")


def _seams(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    """Code of the user's own in place of ours, and arguments for it."""
    task, rollout = config.task, config.rollout
    if task.kwargs and task.fn is None:
        yield ("task.kwargs",), "these belong to task.fn, which is not given"
    if rollout.engine in OUR_ENGINES and rollout.kwargs:
        yield (("rollout.kwargs", "rollout.engine"),
               f"{rollout.engine} takes no arguments: they are for a sampler of your own")
    if rollout.engine not in OUR_ENGINES and not {":", "."} & set(rollout.engine):
        yield (("rollout.engine",), f"{shown(rollout.engine)} must be one of "
               f"{', '.join(OUR_ENGINES)}, or the import path of a sampler of your own "
               f"(my_sampler.py:Sampler){did_you_mean(rollout.engine, OUR_ENGINES)}")


def _reward(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    reward = config.reward
    given = "reward.fn" in handed_in
    if reward.fn is not None and reward.fns and not given:
        yield ("reward.fn", "reward.fns"), "give one function or several, not both"
    elif reward.fn is None and not reward.fns and not given:
        yield (("reward.fn",), "missing; give an import path (reward.fn=my_rewards:score), a "
               "built-in's name, or a config group (reward=...)")
    if reward.fn == "":
        yield ("reward.fn",), "must not be empty"
    if reward.kwargs and reward.fn is None and not given:
        yield (("reward.kwargs",), "these belong to reward.fn, which is not given; with "
               "reward.fns each entry has its own kwargs")
    for name, entry in reward.fns.items():
        if name in RESERVED_REWARDS:
            yield ((f"reward.fns.{name}",), f"reward/{name} is a figure of all rewards together; "
                   "give this one another name")
        for text in _fns_entry(entry):
            yield (f"reward.fns.{name}",), text
    yield from _scaling(config)
    yield from _penalties(config)
    metric = config.checkpoint.metric
    if metric.startswith("metrics/"):
        if reward.metric_fn is None and "reward.metric_fn" not in handed_in:
            yield (("checkpoint.metric", "reward.metric_fn"),
                   f"{metric} comes from reward.metric_fn, which is not given")
    elif metric != "reward_mean":
        yield ("checkpoint.metric",), f"{shown(metric)} must be reward_mean or metrics/NAME"


def _scaling(config: TrainConfig) -> Found:
    reward = config.reward
    for name, scale in (("ref_mean", "ref"), ("ref_std", "ref"), ("center", "running")):
        if getattr(reward, name) not in (None, False) and reward.scale != scale:
            yield ((f"reward.{name}", "reward.scale"),
                   f"{name} is used with reward.scale={scale} only, not {reward.scale}")
    if reward.clip_first and reward.clip is None:
        yield ("reward.clip_first", "reward.clip"), "there is nothing to clip to: set reward.clip"


def _penalties(config: TrainConfig) -> Found:
    reward, longest = config.reward, config.generation.max_new_tokens
    for name, needs in (("min_response_length", "min_response_penalty"),
                        ("min_response_penalty", "min_response_length"),
                        ("overlong_penalty", "overlong_buffer")):
        if getattr(reward, name) is not None and getattr(reward, needs) is None:
            yield (f"reward.{name}", f"reward.{needs}"), f"{name} needs {needs}, which is not given"
    for name in ("min_response_length", "overlong_buffer"):
        if (getattr(reward, name) or 0) > longest:
            yield ((f"reward.{name}", "generation.max_new_tokens"),
                   f"{name} {getattr(reward, name)} must be at most max_new_tokens {longest}")
    if (reward.penalty_mode == "replace" and reward.missing_eos_penalty is None
            and reward.min_response_penalty is None):
        yield (("reward.penalty_mode",), "replace is used with missing_eos_penalty or "
               "min_response_penalty, and neither is given")
    if config.tracking.rollout_tokens and not config.tracking.log_rollouts:
        yield (("tracking.rollout_tokens", "tracking.log_rollouts"),
               "rollout_tokens adds to what log_rollouts=true writes")


def _fns_entry(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{shown(entry)} must be a mapping with the keys fn, kwargs, weight"
        return
    for name in entry:
        if name not in FNS_KEYS:
            yield (f"unknown key {name}{did_you_mean(str(name), FNS_KEYS)} "
                   "(allowed: fn, kwargs, weight)")
    if not isinstance(entry.get("fn"), str) or not entry["fn"]:
        yield "needs fn, an import path or a built-in's name"
    if not isinstance(entry.get("kwargs", {}) or {}, dict):
        yield f"kwargs {shown(entry['kwargs'])} must be a mapping"
    weight = entry.get("weight", 1.0)
    if (not isinstance(weight, (int, float)) or isinstance(weight, bool)
            or not math.isfinite(weight)):
        yield f"weight {shown(weight)} must be a finite number"


def _prompts(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    for prefix, prompts in (("prompts", config.prompts), ("prompts.eval", config.prompts.eval)):
        items = f"{prefix}.items"
        if prompts.path is not None and prompts.items is not None:
            yield (f"{prefix}.path", items), "give a source or inline prompts, not both"
        if prompts.items is not None and not prompts.items:
            yield (items,), "must hold at least one prompt"
        sampler = prompts.length_sampler
        if sampler is not None and (len(sampler) != 2 or sampler[0] > sampler[1]):
            yield ((f"{prefix}.length_sampler",),
                   f"{shown(sampler)} must be [min, max] with min at most max")
        if prompts.template is not None and "{" not in prompts.template:
            yield ((f"{prefix}.template",),
                   f"{shown(prompts.template)} has no placeholder such as {{prompt}}")
    prompts = config.prompts
    if prompts.path is None and prompts.items is None and "prompts.items" not in handed_in:
        for name in ("template", "first_words", "length_sampler"):
            if getattr(prompts, name) is not None:
                yield ((f"prompts.{name}",), "there are no prompts to apply it to: give "
                       "prompts.path or prompts.items")


def _generation(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    train, evaluation = config.generation, config.generation.eval
    if train.min_new_tokens > train.max_new_tokens:
        yield (("generation.min_new_tokens", "generation.max_new_tokens"),
               f"min_new_tokens {train.min_new_tokens} must be at most max_new_tokens "
               f"{train.max_new_tokens}")
    elif evaluation.min_new_tokens is not None or evaluation.max_new_tokens is not None:
        low = max(several(evaluation.min_new_tokens), default=train.min_new_tokens)
        high = min(several(evaluation.max_new_tokens), default=train.max_new_tokens)
        if low > high:
            yield (("generation.eval.min_new_tokens", "generation.eval.max_new_tokens"),
                   f"at evaluation min_new_tokens {low} must be at most max_new_tokens {high}")
    lists = [f"generation.eval.{field.name}" for field in fields(evaluation)
             if isinstance(getattr(evaluation, field.name), list)]
    if len(lists) > 1:
        yield tuple(lists), "only one of the keys of generation.eval may be a list"
    sampler = train.length_sampler
    if sampler is not None:
        if len(sampler) != 2 or sampler[0] > sampler[1]:
            yield (("generation.length_sampler",),
                   f"{shown(sampler)} must be [min, max] with min at most max")
        elif sampler[1] > train.max_new_tokens or sampler[0] < train.min_new_tokens:
            yield (("generation.length_sampler", "generation.max_new_tokens",
                    "generation.min_new_tokens"),
                   f"{shown(sampler)} must lie between min_new_tokens {train.min_new_tokens} and "
                   f"max_new_tokens {train.max_new_tokens}")
    if config.eval.ref_responses and config.model.reference.kind == "none":
        yield (("eval.ref_responses", "model.reference.kind"),
               "there is no reference whose responses could be shown")
    if "" in train.stop_sequences:
        yield ("generation.stop_sequences",), "must not hold an empty text"


def _hardware(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    hardware = config.hardware
    for name, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        if getattr(hardware, name) and hardware.zero_stage < lowest:
            yield ((f"hardware.{name}", "hardware.zero_stage"),
                   f"{name} needs zero_stage {lowest} or more, not {hardware.zero_stage}")
    if not hardware.gather_for_generation and hardware.zero_stage < 3:
        yield (("hardware.gather_for_generation", "hardware.zero_stage"),
               f"with zero_stage {hardware.zero_stage} weights are whole at all times")
    shard = config.model.reference.shard
    if shard and hardware.zero_stage < 3:
        yield (("model.reference.shard", "hardware.zero_stage"),
               f"a reference in parts needs zero_stage 3, not {hardware.zero_stage}")
    if shard and config.model.reference.device is not None:
        yield (("model.reference.shard", "model.reference.device"),
               "a reference on a device of its own is whole there: set one of the two")
    if shard is False and hardware.zero_stage == 3 and reference_kind(config.model) == "shared":
        yield (("model.reference.shard", "model.reference.kind"),
               "a reference that shares the policy's layers is in parts as they are: leave shard "
               "open or set kind=copy")
    if hardware.deepspeed_config is not None and hardware.zero_stage == 0:
        yield (("hardware.deepspeed_config", "hardware.zero_stage"),
               "DeepSpeed is used with zero_stage 1 to 3 only")
    if hardware.num_nodes > 1 and hardware.rdzv_endpoint is None \
            and "hardware.rdzv_endpoint" not in handed_in:
        yield (("hardware.num_nodes", "hardware.rdzv_endpoint"),
               f"{hardware.num_nodes} nodes need a place to meet: "
               "hardware.rdzv_endpoint=HOST-OF-NODE-0:29500")
    if hardware.node_rank >= hardware.num_nodes:
        yield (("hardware.node_rank", "hardware.num_nodes"),
               f"node_rank {hardware.node_rank} must be below num_nodes {hardware.num_nodes}")
    if config.checkpoint.background == "always" and (
            hardware.zero_stage > 0 or hardware.num_processes * hardware.num_nodes > 1):
        yield (("checkpoint.background", "hardware.num_processes", "hardware.zero_stage"),
               "several processes, or ZeRO, stop while a checkpoint is written: set "
               "checkpoint.background=auto")
    if hardware.num_nodes > 1 and config.run_name is None and "run_name" not in handed_in:
        yield (("hardware.num_nodes", "run_name"), "all nodes write into one run folder: give it a "
               "name with run_name=NAME")


def _run(config: TrainConfig, handed_in: frozenset[str]) -> Found:
    name = config.run_name
    if name is not None and (name in ("", ".", "..") or "/" in name or "\0" in name):
        yield (("run_name",), f"{shown(name)} must be a plain folder name; the folder above it is "
               "output_dir")
    if config.output_dir == "":
        yield ("output_dir",), "must not be empty (for the current folder: output_dir=.)"
    if config.resume == "auto" and name is None:
        yield ("resume", "run_name"), "resume=auto needs run_name, the name of the run folder"
    trackers = config.tracking.trackers
    if len(set(trackers)) < len(trackers):
        yield ("tracking.trackers",), f"{shown(trackers)} must name each tracker once"
    if config.tracking.project == "":
        yield ("tracking.project",), "must not be empty (for the default: null)"
    elif config.tracking.project is not None and not {"wandb", "trackio"}.intersection(trackers):
        yield (("tracking.project", "tracking.trackers"), f"{shown(config.tracking.project)} is a "
               "project of wandb or trackio, and neither is among the trackers")
    if config.resume == "":
        yield ("resume",), "must be never, auto or a run folder"
    elif config.resume not in ("never", "auto"):
        yield (("resume",), f"{shown(config.resume)}: a run folder goes on the command line only: "
               f"resume={config.resume}")
