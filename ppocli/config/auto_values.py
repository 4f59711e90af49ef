"""Effective values of keys that are null and follow from other settings, for printing a
configuration. The code that reads these keys uses the same functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ppocli.config import algorithm, schema, schema_training, tasks

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
