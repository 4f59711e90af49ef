"""What ``--cfg``, ``--info`` and ``--hydra-help`` print: a configuration, with the effective values
of keys that are null and follow from other settings. The code that reads these keys uses the same
functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from ppocli.config import algorithm, hydra_bridge, keys, schema, schema_training, tasks
from ppocli.config.command_words import COMMAND_LINE, Words
from ppocli.config.compose import base_node, compose_here, resumed_run
from ppocli.config.problems import listed
from ppocli.config.text import did_you_mean
from ppocli.errors import ConfigError

FILLED_IN = "  # filled in"
"""marks values of keys that are null"""
_OF_PROMPTS = ("column", "columns", "first_words", "length_sampler", "template", "chat", "tools",
               "max_length", "overlong", "truncation_side")
"""keys of ``prompts.eval`` that take their value in ``prompts`` if they are null"""
_SCHEDULE = ("name", "warmup_updates", "min_lr_ratio")


def open_values(config: schema.TrainConfig) -> dict[str, Any]:
    """Dotted key -> effective value, for keys that are null in ``config`` and whose value is known
    before anything is loaded."""
    task = tasks.task_name(config)
    values = dict(_of_every_task(config, task))
    if task == "ppo" and config.ppo.advantage in algorithm.ESTIMATORS:
        values |= dict(_of_ppo(config.ppo)) | {
            "ppo.importance.level": algorithm.importance_level(config) or "none",
            "model.reference.shard": algorithm.reference_sharded(config)}
    return values


def _of_every_task(config: schema.TrainConfig, task: str) -> Iterator[tuple[str, Any]]:
    updates, owner = tasks.updates_of(config), tasks.updates_section(config)
    yield "model.dtype", config.hardware.precision
    yield f"{owner}.micro_batch_size", updates.mini_batch_size
    if task in tasks.DATA_TASKS:
        return
    yield "ppo.chunk_size", min(config.ppo.num_rollouts, 128)
    for name in _OF_PROMPTS:
        yield f"prompts.eval.{name}", getattr(config.prompts, name)
    for field in fields(config.generation.eval):
        yield f"generation.eval.{field.name}", getattr(config.generation, field.name, None)


def _of_ppo(ppo: schema.PPOConfig) -> Iterator[tuple[str, Any]]:
    yield "ppo.cliprange_high", ppo.cliprange
    yield "ppo.kl_in", algorithm.kl_in(ppo)
    yield "ppo.kl_estimator", algorithm.kl_estimator(ppo)
    yield "ppo.whiten_advantages", algorithm.whitens_advantages(ppo)
    if algorithm.estimator_of(ppo).needs_critic:
        optimizer, schedule = algorithm.value_optimizer(ppo), algorithm.value_scheduler(ppo)
        yield "ppo.optimizer.value_lr", optimizer.lr
        extra = schema_training.OPTIMIZER_KEYS.get(optimizer.name, ())
        for name in ("name", "weight_decay", *extra):
            yield f"ppo.value_optimizer.{name}", getattr(optimizer, name)
        for name in _SCHEDULE:
            yield f"ppo.value_scheduler.{name}", getattr(schedule, name)


def print_composition(words: Words) -> None:
    """Print what ``--cfg``, ``--info``, ``--hydra-help`` or ``--shell-completion`` ask for.

    Raises:
        ConfigError: something is wrong with the words or the files.
    """
    if words.is_sweep:
        words = hydra_bridge.first_job(words)
        words = words.without(*words.of_sweep)
    run = resumed_run(words)
    with hydra_bridge.hydra_for(words, base_node(run)):
        if words.flag("--hydra-help") is not None or words.flag("--shell-completion") is not None:
            hydra_bridge.run_hydra(words)
            return
        composed = compose_here(words, run)
        package = words.flag("--package") or "_global_"
        names = [*keys.schema_keys(), *keys.schema_sections()]
        of_hydra = package == "hydra" or package.startswith("hydra.")
        if package not in (*names, "_global_") and not of_hydra:
            raise ConfigError(f"--package {package}: there is no such part of the configuration"
                              + did_you_mean(package, names), where=COMMAND_LINE)
        config = composed.values()
        for note in composed.notes:
            sys.stderr.write(f"{note}\n")
        if words.flag("--cfg") != "job" or of_hydra:
            hydra_bridge.run_hydra(words)
            return
        _print_filled(composed.node, open_values(config), package,
                      resolve=words.flag("--resolve") is not None)
        if composed.sources and (problems := composed.problems()):
            sys.stderr.write(f"ppocli train refuses this: {listed(map(str, problems))}\n")


def _print_filled(node: DictConfig, values: Mapping[str, Any], package: str, *, resolve: bool
                  ) -> None:
    """Print a configuration, or a part of it, as YAML, with ``values`` where it has null: they are
    marked."""
    filled = {name: value for name, value in values.items()
              if value is not None and OmegaConf.select(node, name) is None}
    for name, value in filled.items():
        OmegaConf.update(node, name, value)
    if resolve:
        OmegaConf.resolve(node)
    whole = package == "_global_"
    part = node if whole else OmegaConf.select(node, package)
    if not OmegaConf.is_config(part):
        sys.stdout.write(f"{part}\n")
        return
    lines = OmegaConf.to_yaml(part).splitlines()
    places = dict(_line_numbers(yaml.compose("\n".join(lines), Loader=yaml.SafeLoader),
                                "" if whole else f"{package}."))
    for name in filled.keys() & places.keys():
        lines[places[name]] += FILLED_IN
    title = [] if whole else [f"# @package {package}"]
    sys.stdout.write("\n".join([*title, *lines, ""]))


def _line_numbers(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """(dotted key, line from 0) of everything in mappings."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{name.value}", name.start_mark.line
        yield from _line_numbers(value, f"{prefix}{name.value}.")
