"""References of which, under ZeRO 3, every rank keeps a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ppocli.config.schema import TrainConfig
from ppocli.models.layer_stack import SplitPoint, swapped_tensors, trained_split
from ppocli.models.loading.language_model import frozen_dtype
from ppocli.models.reference import Reference
from ppocli.zero.sharded_weights import (
    copied_part,
    head_parameters,
    held,
    is_sharded,
    swapped_parts,
    whole_of,
)
from ppocli.zero.zero3_loading import parts_config


@dataclass(frozen=True, slots=True)
class ShardedCopy:
    """A model of its own, of which each rank keeps a part. Its passes gather it layer by layer, so
    all ranks make them in step."""

    lm: Any
    engine: Any
    """DeepSpeed's, over the model's trunk"""
    split: SplitPoint | None = None

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        with held(head_parameters(self.lm)):
            yield self.lm


@dataclass(frozen=True, slots=True)
class ShardedTrunk:
    """The policy's own frozen trunk and, of the tensors that train, each rank's part as it was."""

    parts: dict[str, torch.Tensor]
    """by their names in the causal LM"""
    split: SplitPoint | None
    """as of :class:`ppocli.models.reference.SharedReference`"""

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`, for a policy whose weights are put together or in parts."""
        own = dict(policy_lm.named_parameters())
        if is_sharded(policy_lm):
            with swapped_parts({name: own[name] for name in self.parts}, self.parts):
                yield policy_lm
            return
        whole = {name: whole_of(part, own[name].shape, own[name].device)
                 for name, part in self.parts.items()}
        with swapped_tensors(policy_lm, whole):
            yield policy_lm


def sharded_copy(cfg: TrainConfig, lm: Any) -> ShardedCopy:
    """A reference from a model that is sharded already, by DeepSpeed's engine for inference as
    TRL's ``prepare_deepspeed`` uses it."""
    import deepspeed

    settings = parts_config(cfg, offload=cfg.model.reference.offload)
    stored = frozen_dtype(cfg.model, cfg.hardware)
    settings["bf16"] = {"enabled": stored == torch.bfloat16}
    # around the trunk: that is what passes go through, and its start tells DeepSpeed of a new one
    engine, *_ = deepspeed.initialize(model=lm.base_model, config=settings)
    lm.eval()
    return ShardedCopy(lm, engine)


def share_sharded_trunk(lm: Any, *, offload: bool) -> ShardedTrunk:
    """As :func:`ppocli.models.reference.share_trunk`, of a sharded policy that is prepared for
    training and hasn't been trained yet.

    Raises:
        ValueError: as there.
    """
    split = trained_split(lm)
    return ShardedTrunk({name: copied_part(p, offload=offload)
                         for name, p in lm.named_parameters() if p.requires_grad}, split)


def close_reference(reference: Reference | None) -> None:
    """Tear down what DeepSpeed has built around it."""
    if isinstance(reference, ShardedCopy):
        reference.engine.destroy()
