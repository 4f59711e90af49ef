"""What a training's processes hold whole, and what in parts."""

from __future__ import annotations

from ppocli.config.schema import TrainConfig


def reference_sharded(cfg: TrainConfig) -> bool:
    """Whether each process of a training keeps its part of the reference only."""
    wanted = cfg.model.reference
    if wanted.shard is None:
        return cfg.hardware.zero_stage == 3 and wanted.device is None
    return wanted.shard


def whole_while_acting(cfg: TrainConfig) -> bool:
    """Whether each process holds all weights of the policy in rollouts and evaluations."""
    return cfg.hardware.zero_stage < 3 or cfg.hardware.gather_for_generation
