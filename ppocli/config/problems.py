"""All problems of a composed configuration at once.

Types are checked while composing; here are the ranges and choices in the schema's field metadata,
and the rules between keys.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter, ge, gt, le, lt
from pathlib import Path
from typing import Any, Self

from omegaconf import MISSING

from ppocli.config import adapters, algorithm, sampling, schema, schema_training, tasks
from ppocli.config.keys import (
    Key,
    Rules,
    free_mapping_of,
    is_import_path,
    schema_keys,
    schema_sections,
    why_unknown,
)
from ppocli.config.schema_run import TRACKERS
from ppocli.config.text import did_you_mean, shown
from ppocli.errors import ConfigError

DEFAULT_SOURCE = "default"
FNS_KEYS = ("fn", "kwargs", "weight", "style")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its key or keys, what is wrong and allowed, and the source of the value."""

    key: str
    text: str
    source: str = DEFAULT_SOURCE
    code: str = "contradiction"
    """as of :class:`ppocli.errors.PpocliError`: also ``unknown-key``, ``wrong-type``, ``missing``,
    ``out-of-range``, ``unresolved``"""

    def __str__(self) -> str:
        origin = "" if self.source == DEFAULT_SOURCE else f" (from {self.source})"
        return f"{self.key}: {self.text}{origin}"

    def parted(self) -> tuple[Self, str | None]:
        """A copy whose text ends with other words to paste."""
        what, colon, words = self.text.rpartition(": ")
        if not colon or not (_ASSIGNMENT.search(words) or words.startswith("pip install ")):
            return self, None
        return replace(self, text=what), words


def unknown_key(key: str, source: str, task: str | None = None) -> Problem:
    """The problem with a key that doesn't exist, or is a section; ``task`` as for
    :func:`ppocli.config.keys.named_elsewhere`."""
    return Problem(key, why_unknown(key, task), source,
                   "wrong-type" if key in schema_sections() else "unknown-key")


_MOST = 2**53
"""bound of numbers without a bound of their own: beyond it, doubles skip whole numbers"""
_ASSIGNMENT = re.compile(r"\b[a-z_]+(\.[a-z_]+)*=")


def raise_problems(problems: Iterable[Problem], fix: str | None = None) -> None:
    """Raise one ConfigError that lists every problem; do nothing without any. For a single problem,
    words to paste become the fix, unless ``fix`` is given."""
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1 and fix is None:
        alone, fix = problems[0].parted()
        problems = [alone]
    if problems:
        codes = {problem.code for problem in problems}
        raise ConfigError(listed(map(str, problems)), fix=fix,
                          code=codes.pop() if len(codes) == 1 else None)


def listed(problems: Iterable[str], before: str = "", place: str = "in the configuration") -> str:
    """The text of one problem after ``before``, or of several on lines of their own."""
    first, *more = problems
    if not more:
        return before + first
    return "\n".join([f"{1 + len(more)} problems {place}:", *(f"  {p}" for p in (first, *more))])


def find_problems(config: schema.TrainConfig, sources: Mapping[str, str] | None = None,
                  handed_in: frozenset[str] = frozenset()) -> list[Problem]:
    """Everything wrong with a composed configuration.

    Args:
        config: the composed values; ``???`` where a mandatory one is missing.
        sources: where each key's value came from ("command line", a file); a key that is not in
            it has its default.
        handed_in: the keys whose place is taken by a Python object given to ``ppocli.train()``,
            of ``reward.fn``, ``reward.metric_fn``, ``prompts.path``, ``data.path``; or that a
            launcher provides, of ``hardware.rdzv_endpoint``, ``run_name``.
    """
    sources = sources or {}
    problems = range_problems(config, sources)
    bad = {problem.key for problem in problems}
    for broken, keys, text in _rules(config, handed_in):
        names = keys.split(", ")
        # a value that is wrong in itself is not also reported as a contradiction
        if broken and not bad.intersection(names):
            origins = dict.fromkeys(origin for name in names if (
                origin := sources.get(name) or sources.get(free_mapping_of(name) or "")))
            problems.append(Problem(keys, text, " and ".join(origins) or DEFAULT_SOURCE))
    return problems


def _rules(config: schema.TrainConfig, handed_in: frozenset[str]) -> Rules:
    task = tasks.task_name(config)
    yield from tasks.task_rules(config, handed_in)
    if task in ("ppo", "own"):
        yield from _sizes(config)
        yield from sampling.prompt_rules(config, handed_in)
    if task == "ppo":
        yield from _reward(config, handed_in)
        yield from algorithm.value_function_rules(config)
        yield from sampling.env_rules(config, handed_in)
    if task in ("ppo", "sft"):
        yield from sampling.generation_rules(config)
    yield (config.task.kwargs and config.task.fn is None, "task.kwargs",
           "these belong to task.fn, which is not given")
    yield from _date(config)
    yield from sampling.engine_rules(config)
    yield from algorithm.algorithm_rules(config)
    yield from adapters.adapter_rules(config)
    yield from _hardware(config, handed_in)
    yield from _run(config)


def range_problems(config: schema.TrainConfig, sources: Mapping[str, str],
                   names: Collection[str] | None = None) -> list[Problem]:
    """Missing values, and values outside the ranges and choices of the schema, for all keys or for
    some."""
    return [Problem(name, text, sources.get(name, DEFAULT_SOURCE),
                    "missing" if MISSING in str(attrgetter(name)(config)) else "out-of-range")
            for name in schema_keys() if names is None or name in names
            for text in _range_problems(schema_keys()[name], attrgetter(name)(config))]


def _range_problems(key: Key, value: Any) -> Iterator[str]:
    if isinstance(value, str) and value == MISSING:
        yield f"missing; it must be given: {key.name}=... ({key.doc})"
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
            hint = _why_not(key.metadata, item) or (
                did_you_mean(item, key.metadata["choices"])
                if key.metadata["choices"] and isinstance(item, str) else "")
            yield f"{shown(item)} must be {key.allowed}{hint}"
        elif (key.item is int and isinstance(item, int) and item > _MOST
              and key.metadata["lt"] is None):
            yield f"{shown(item)} must be at most {_MOST}"


def _allowed(metadata: Mapping[str, Any], item: Any) -> bool:
    if metadata["choices"]:
        return item in metadata["choices"] or (metadata["import_path"] and is_import_path(item))
    return all(test(item, metadata[test.__name__]) for test in (gt, ge, lt, le)
               if metadata[test.__name__] is not None)


def _date(config: schema.TrainConfig) -> Rules:
    date = config.model.chat_template_date
    try:
        fine = date is None or datetime.fromisoformat(date).tzinfo is None
    except ValueError:
        fine = False
    yield (not fine, "model.chat_template_date", f"{shown(date)} must be a local date, such as "
           "2026-01-31 or 2026-01-31T12:00:00")


def _sizes(config: schema.TrainConfig) -> Rules:
    ppo = config.ppo
    lengths = {name: value for name in ("total_episodes", "epochs", "num_steps")
               if (value := getattr(ppo, name)) is not None}
    counts = [f"{value} {name.rpartition('_')[2]}" for name, value in lengths.items()]
    yield (not lengths, "ppo.total_episodes, ppo.num_steps",
           "say how long to train: give one of them, or ppo.epochs")
    yield (len(lengths) > 1, ", ".join(f"ppo.{name}" for name in lengths),
           f"{' and '.join(counts)} contradict each other: leave one "
           f"out, or set it to null: ppo.{next(iter(lengths), '')}=null")
    for name, most in (("mini_batch_size", "num_rollouts"),
                       ("micro_batch_size", "mini_batch_size")):
        size, limit = getattr(ppo, name), getattr(ppo, most)
        yield (size is not None and size > limit, f"ppo.{name}, ppo.{most}",
               f"{name} {size} must be at most {most} {limit}: ppo.{name}={limit}")


def _reward(config: schema.TrainConfig, handed_in: frozenset[str]) -> Rules:
    reward = config.reward
    if "reward.fn" not in handed_in:
        yield (reward.fn is not None and reward.fns, "reward.fn, reward.fns",
               "give one function or several, not both: reward.fn=null or reward.fns={}")
        yield (reward.fn is None and not reward.fns and config.env.fn is None, "reward.fn",
               "missing; give an import path (reward.fn=my_rewards:score), a built-in's name, or a "
               "config group (reward=...)")
        yield (reward.fn is None and reward.kwargs, "reward.kwargs", "these belong to reward.fn, "
               "which is not given; with reward.fns each entry has its own kwargs")
    yield reward.fn == "", "reward.fn", "must not be empty"
    yield reward.step_separator == "", "reward.step_separator", "must not be empty"
    yield (reward.step_separator and reward.step_fn, "reward.step_separator, reward.step_fn",
           "both say where steps end: give one of them")
    yield (reward.fn == "http" and reward.style not in ("auto", "ppocli"), "reward.style",
           f"http calls no function: give reward.style={reward.style} to ppocli serve-reward")
    for name, entry in reward.fns.items():
        yield (schema.is_own_figure(name), f"reward.fns.{name}",
               f"reward/{name} is a figure of all rewards together; give this one another name")
        for text in _fns_entry(entry):
            yield True, f"reward.fns.{name}", text
    yield from _shaping(config)
    metric = config.checkpoint.metric
    of_function = metric.startswith("metrics/")
    yield (of_function and reward.metric_fn is None and "reward.metric_fn" not in handed_in,
           "checkpoint.metric, reward.metric_fn",
           f"{metric} comes from reward.metric_fn, which is not given")
    yield (not of_function and metric != "reward_mean", "checkpoint.metric",
           f"{shown(metric)} must be reward_mean or metrics/NAME")


def _shaping(config: schema.TrainConfig) -> Rules:
    """Rules on shaping scores, and on penalties."""
    reward, longest = config.reward, sampling.longest_rollout(config)
    limit = "generation.max_new_tokens" if config.env.fn is None else "env.max_tokens"
    for name, scales in (("ref_mean", ("ref",)), ("ref_std", ("ref",)),
                         ("center", ("running", "ref"))):
        yield (getattr(reward, name) not in (None, False) and reward.scale not in scales,
               f"reward.{name}, reward.scale", f"{name} is used with "
               f"reward.scale={' or '.join(scales)} only, not {reward.scale}")
    yield (reward.center and reward.scale == "ref" and reward.ref_mean is None
           and reward.fn != "reward_model", "reward.center, reward.ref_mean",
           "center with scale=ref needs the mean: give ref_mean")
    yield (reward.clip_first and reward.clip is None, "reward.clip_first, reward.clip",
           "there is nothing to clip to: set reward.clip")
    for name, needs in (("min_response_length", "min_response_penalty"),
                        ("min_response_penalty", "min_response_length"),
                        ("overlong_penalty", "overlong_buffer")):
        yield (getattr(reward, name) is not None and getattr(reward, needs) is None,
               f"reward.{name}, reward.{needs}", f"{name} needs {needs}, which is not given")
    for name in ("min_response_length", "overlong_buffer"):
        yield ((getattr(reward, name) or 0) > longest, f"reward.{name}, {limit}", f"{name} "
               f"{getattr(reward, name)} must be at most {limit.partition('.')[2]} {longest}")
    yield (reward.penalty_mode == "replace" and reward.missing_eos_penalty is None
           and reward.min_response_penalty is None, "reward.penalty_mode", "replace is used with "
           "missing_eos_penalty or min_response_penalty, and neither is given")
    yield (config.tracking.rollout_tokens and not config.tracking.log_rollouts,
           "tracking.rollout_tokens, tracking.log_rollouts",
           "rollout_tokens adds to what log_rollouts=true writes")


def _fns_entry(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{shown(entry)} must be a mapping with the keys {', '.join(FNS_KEYS)}"
        return
    for name in entry:
        if name not in FNS_KEYS:
            yield (f"unknown key {name}{did_you_mean(str(name), FNS_KEYS)} "
                   f"(allowed: {', '.join(FNS_KEYS)})")
    if not isinstance(entry.get("fn"), str) or not entry["fn"]:
        yield "needs fn, an import path or a built-in's name"
    if not isinstance(entry.get("kwargs", {}) or {}, dict):
        yield f"kwargs {shown(entry['kwargs'])} must be a mapping"
    style, styles = entry.get("style", "auto"), ("auto", *schema.REWARD_STYLES)
    if style not in styles:
        yield (f"style {shown(style)} must be one of {', '.join(styles)}"
               f"{did_you_mean(str(style), styles)}")
    weight = entry.get("weight", 1.0)
    if (not isinstance(weight, (int, float)) or isinstance(weight, bool)
            or not math.isfinite(weight)):
        yield f"weight {shown(weight)} must be a finite number"


def _why_not(metadata: Mapping[str, Any], item: Any) -> str:
    """The hint for a value that people know from other libraries."""
    if "bf16" in (metadata["choices"] or ()) and item in ("fp16", "float16", "half"):
        return ("; fp16 holds nothing below 6e-8, so that gradients vanish, nor above 65504: it "
                "needs loss scaling, which skips updates. bf16 takes as little memory")
    return schema_training.SCHEDULES_IN_WORDS.get(str(item), "")


def _bf16_weights(config: schema.TrainConfig) -> Rules:
    """Rules on ``hardware.weights=bf16``."""
    hardware, optimizers = config.hardware, algorithm.optimizers_of(tasks.updates_of(config))
    yield (hardware.precision != "bf16", "hardware.weights, hardware.precision",
           "weights in bf16 are computed with in bf16: set hardware.precision=bf16")
    yield (hardware.zero_stage > 0, "hardware.weights, hardware.zero_stage",
           "DeepSpeed makes its own copies of fp32 weights: leave hardware.weights out, or ZeRO")
    yield (config.model.peft, "hardware.weights, model.peft", "an adapter trains in fp32, and the "
           "type of its base is model.dtype: leave hardware.weights out")
    yield ("adamw_8bit" in [one.name for one in optimizers], "hardware.weights, ppo.optimizer.name",
           "adamw_8bit keeps no master copies: take another optimizer, or weights=fp32")


def _hardware(config: schema.TrainConfig, handed_in: frozenset[str]) -> Rules:
    hardware, stage, nodes = config.hardware, config.hardware.zero_stage, config.hardware.num_nodes
    if hardware.weights == "bf16":
        yield from _bf16_weights(config)
    for name, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        yield (getattr(hardware, name) and stage < lowest, f"hardware.{name}, hardware.zero_stage",
               f"{name} needs zero_stage {lowest} or more, not {stage}")
    yield (not hardware.gather_for_generation and stage < 3,
           "hardware.gather_for_generation, hardware.zero_stage",
           f"with zero_stage {stage} weights are whole at all times")
    shard = config.model.reference.shard
    yield (shard and stage < 3, "model.reference.shard, hardware.zero_stage",
           f"a reference in parts needs zero_stage 3, not {stage}")
    yield (shard and config.model.reference.device is not None,
           "model.reference.shard, model.reference.device",
           "a reference on a device of its own is whole there: set one of the two")
    yield (shard is False and stage == 3 and schema.reference_kind(config.model) == "shared",
           "model.reference.shard, model.reference.kind", "a reference that shares the policy's "
           "layers is in parts as they are: leave shard open or set kind=copy")
    yield (hardware.deepspeed_config is not None and stage == 0,
           "hardware.deepspeed_config, hardware.zero_stage",
           "DeepSpeed is used with zero_stage 1 to 3 only")
    yield (nodes > 1 and hardware.rdzv_endpoint is None
           and "hardware.rdzv_endpoint" not in handed_in,
           "hardware.num_nodes, hardware.rdzv_endpoint",
           f"{nodes} nodes need a place to meet: hardware.rdzv_endpoint=HOST-OF-NODE-0:29500")
    yield (hardware.node_rank >= nodes, "hardware.node_rank, hardware.num_nodes",
           f"node_rank {hardware.node_rank} must be below num_nodes {nodes}")
    yield (nodes > 1 and config.run_name is None and "run_name" not in handed_in,
           "hardware.num_nodes, run_name",
           "all nodes write into one run folder: give it a name with run_name=NAME")


def _run(config: schema.TrainConfig) -> Rules:
    name, resume, tracking = config.run_name, config.resume, config.tracking
    yield config.sweep != schema.SweepConfig(), "sweep", "this is said of several jobs: add -m"
    yield (name is not None and (name[:1] in ("", ".") or "/" in name or "\0" in name),
           "run_name", f"{shown(name)} must be a plain folder name that doesn't begin with a dot; "
           "the folder above it is output_dir")
    place = str(Path(config.output_dir, name or "").absolute())
    yield (place.encode(errors="replace") != place.encode(errors="surrogatepass"),
           "output_dir, run_name",
           f"{place!a} is no UTF-8, which config.yaml could not hold: choose another folder")
    yield (config.output_dir == "", "output_dir",
           "must not be empty: output_dir=. for the current folder")
    yield (resume == "auto" and name is None, "resume, run_name",
           "resume=auto needs run_name, the name of the run folder")
    # the record of what one has received is named like its file
    yield (len({Path(name).name for name in tracking.trackers}) < len(tracking.trackers),
           "tracking.trackers", f"{shown(tracking.trackers)} must name each tracker once, and in "
           "files of different names")
    yield tracking.project == "", "tracking.project", "must not be empty (for the default: null)"
    yield (tracking.project and not {*TRACKERS}.intersection(tracking.trackers),
           "tracking.project, tracking.trackers", f"{shown(tracking.project)} is a project in a "
           f"tracker, and none of {', '.join(TRACKERS)} is among the trackers")
    yield resume == "", "resume", "must be never, auto or a run folder"
    yield (resume not in ("", "never", "auto"), "resume",
           f"{shown(resume)}: a run folder goes on the command line only: resume={resume}")
