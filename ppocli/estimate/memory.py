"""Adding up: bytes on each device, on each host and on disk, of a run of given parts.

For n parameters, t of them trained, on w ranks. ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054,
section 3) counts 2 + 2 + 12 bytes a parameter: weights and gradients in 16 bits, Adam's state with
a copy of the weights in 32. Here weights, gradients and state are all fp32, so it is 4 + 4 + 8, and
bf16 adds copies of 2 bytes for the time of a pass:

===== ==================== =============== ============= =========================================
stage weights              gradients       Adam's state  beside them, fp32
===== ==================== =============== ============= =========================================
0     4 n                  4 t             8 t           4 t of DDP's buckets if w > 1
1     4 n + 4 t / w        4 t             8 t / w       a bucket for reducing gradients
2     4 n + 4 t / w        4 t / w         8 t / w       a bucket for reducing gradients
3     4 n / w              4 t / w         8 t / w       a bucket, and weights gathered in a pass
===== ==================== =============== ============= =========================================

DeepSpeed steps on a copy of a rank's share of the weights under stages 1 and 2, and on the weights
themselves under stage 3 (``deepspeed/runtime/zero/stage_1_and_2.py``, ``single_partition_of_fp32_
groups``; ``stage3.py``, ``fp32_partitioned_groups_flat``; 0.19). Rollouts gather all weights under
stage 3 (:func:`ppocli.engine.sharded.gathered_policy`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ppocli.config.schema import TrainConfig
from ppocli.estimate.parts import Part
from ppocli.estimate.trace import DecodingPass, TrainingPass

STATE_BYTES = {"adamw": 8, "adam": 8, "adamw_8bit": 2, "sgd": 0, "adafactor": 0}
"""of optimizer state a trained parameter; Adafactor's rows and columns are too few to count"""
BUCKET = 500_000_000
"""elements: DeepSpeed's default ``reduce_bucket_size``"""
MAX_LIVE = 1_000_000_000
"""elements: DeepSpeed's default ``stage3_max_live_parameters``"""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where ranks are, and what one of them works on at a time."""

    ranks: int
    ranks_on_host: int
    cuda: bool
    rows: int
    """samples of a rank's micro-batch"""
    decoded: int
    """samples of a rank's generate call"""
    accumulates: bool
    """whether an update is several micro-batches: gradients then lie beside activations"""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that takes memory: bytes on a device and in host memory, both of one rank, and the
    phases it is there in."""

    name: str
    device: int
    host: int = 0
    rollout: bool = True
    update: bool = True


@dataclass(frozen=True, slots=True)
class Sums:
    """Bytes at the fullest moment of each phase; ``device`` of one, ``host`` of all its ranks."""

    rollout: int
    update: int
    host: int
    loading: int
    """of a host, while its ranks load their models"""

    @property
    def device(self) -> int:
        """The fullest moment of a device."""
        return max(self.rollout, self.update)


def layout_of(cfg: TrainConfig, *, ranks: int, ranks_on_host: int, cuda: bool) -> Layout:
    """Sizes are of the whole run, micro-batch and chunk of one rank
    (:mod:`ppocli.engine.optimize`, :mod:`ppocli.engine.rollout`)."""
    ppo, evaluation = cfg.ppo, cfg.prompts.eval
    share = -(-ppo.mini_batch_size // ranks)
    rows = min(ppo.micro_batch_size or ppo.mini_batch_size, share)
    chunk = ppo.chunk_size or min(ppo.num_rollouts, 128)
    most = max(ppo.num_rollouts, evaluation.limit * evaluation.repeat)
    return Layout(ranks=ranks, ranks_on_host=ranks_on_host, cuda=cuda, rows=rows,
                  decoded=min(chunk, -(-most // ranks)), accumulates=rows < share)


def lines_of(cfg: TrainConfig, parts: Iterable[Part], layout: Layout, training: TrainingPass,
             decoding: DecodingPass, deepspeed: dict[str, Any]) -> tuple[Line, ...]:
    """Everything that takes memory of a rank, in the order in which it is told.

    Args:
        deepspeed: its ``zero_optimization`` section.
    """
    hardware, parts = cfg.hardware, tuple(parts)
    stage, ranks = hardware.zero_stage, layout.ranks
    own = [p for p in parts if p.sharded]
    count, trained = sum(p.parameters for p in own), sum(p.trained for p in own)
    cast = sum(p.cast for p in own) if hardware.precision == "bf16" else 0
    state = STATE_BYTES[cfg.ppo.optimizer.name] * trained
    # checkpointed layers copy again in the backward pass: the copies are working memory
    kept_copies = 0 if cfg.model.gradient_checkpointing else 2 * cast
    lines = [
        _weights(count, stage, ranks, hardware.offload_param),
        *_master_copy(trained, stage, ranks, hardware.offload_optimizer),
        *_others(parts, layout),
        _kept("optimizer state", _shared(state, ranks if stage else 1), hardware.offload_optimizer),
        _gradients(trained, stage, ranks, hardware.offload_optimizer),
        *_buffers(count, trained, layout, stage, deepspeed, hardware.offload_optimizer,
                  max(p.largest for p in own)),
        Line("weights in bf16", kept_copies, rollout=False),
        Line("activations", max(training.kept - kept_copies, 0), rollout=False),
        Line("working memory of updates", training.working, rollout=False),
        Line("weights in bf16 for rollouts", 2 * cast if stage < 3 else 0, update=False),
        Line("keys and values (KV cache)", decoding.cache, update=False),
        Line("working memory of rollouts", decoding.working, update=False)]
    return tuple(line for line in lines if line.device or line.host)


def _shared(count: int, ranks: int) -> int:
    return -(-count // ranks)


def _kept(name: str, size: int, on_host: bool, **phases: bool) -> Line:
    return Line(name, 0, size, **phases) if on_host else Line(name, size, **phases)


def _weights(count: int, stage: int, ranks: int, on_host: bool) -> Line:
    return _kept("weights", _shared(4 * count, ranks if stage == 3 else 1), on_host)


def _master_copy(trained: int, stage: int, ranks: int, offloaded: bool) -> Iterable[Line]:
    """What DeepSpeed steps on, where that is no part of the weights."""
    if stage in (1, 2) or (stage == 3 and offloaded):
        yield _kept("weights DeepSpeed steps on", _shared(4 * trained, ranks), offloaded)


def _others(parts: Iterable[Part], layout: Layout) -> Iterable[Line]:
    """Frozen models, whole on every rank."""
    for part in parts:
        if not part.sharded:
            yield _kept(part.name, part.stored, part.on_host and layout.cuda)


def _gradients(trained: int, stage: int, ranks: int, offloaded: bool) -> Line:
    size = 4 * trained if stage < 2 else _shared(4 * trained, ranks)
    # stage 3 keeps the room for them, the others give it back after each update
    return _kept("gradients", size, offloaded and stage > 0, rollout=stage == 3)


def _buffers(count: int, trained: int, layout: Layout, stage: int, deepspeed: dict[str, Any],
             offloaded: bool, largest: int) -> Iterable[Line]:
    if stage == 0:
        if layout.ranks > 1:
            yield Line("DDP's buckets of gradients", 4 * trained)
        return
    bucket = _number(deepspeed, "reduce_bucket_size", BUCKET)
    # a CPU has pages only for what is written
    size = 4 * (bucket if layout.cuda else min(bucket, trained))
    twice = 2 if stage < 3 and deepspeed.get("overlap_comm") is True else 1
    yield Line("DeepSpeed's bucket of gradients", twice * size, rollout=stage == 3)
    if offloaded and stage < 3:
        yield Line("DeepSpeed's buffers of one gradient", 4 * largest, 4 * largest)
        yield Line("DeepSpeed's copy of the stepped weights", 0, _shared(4 * trained, layout.ranks))
    if stage == 3:
        live = _number(deepspeed, "stage3_max_live_parameters", MAX_LIVE)
        yield Line("weights gathered in a pass", 4 * min(count, live), rollout=False)
        yield Line("weights gathered for rollouts", 4 * count, update=False)


def _number(settings: dict[str, Any], name: str, default: int) -> int:
    value = settings.get(name, default)
    return int(value) if isinstance(value, (int, float)) else default


def add_up(lines: Iterable[Line], parts: Iterable[Part], layout: Layout, *, stage: int) -> Sums:
    """The fullest moments.

    In one pass an update's activations go while its gradients come, so that without accumulation
    (and stage) only the larger of both counts, with the gradient of the largest weight.
    """
    lines = tuple(lines)
    rollout = sum(line.device for line in lines if line.rollout)
    update = sum(line.device for line in lines if line.update)
    if stage == 0 and not layout.accumulates:
        sizes = {line.name: line.device for line in lines if line.update}
        passing = sum(sizes.get(name, 0) for name in (
            "weights in bf16", "activations", "working memory of updates"))
        gradients = sizes.get("gradients", 0)
        largest = 4 * max(p.largest for p in parts)
        update += max(passing, gradients + largest) - passing - gradients
    host = layout.ranks_on_host * max(sum(line.host for line in lines if line.rollout),
                                      sum(line.host for line in lines if line.update))
    device = max(rollout, update)
    return Sums(rollout, update, host if layout.cuda else host + layout.ranks_on_host * device,
                _loading(parts, layout, stage))


def _loading(parts: Iterable[Part], layout: Layout, stage: int) -> int:
    """Every rank loads the whole policy into host memory and then, to a device, the reference:
    :func:`ppocli.engine.session.build_session`. What of that changes is to change here alone."""
    parts = tuple(parts)
    policy = sum(4 * p.parameters for p in parts if p.sharded)
    frozen = sum(p.stored for p in parts if p.kind == "reference")
    each = max(policy, frozen) if layout.cuda else policy + frozen
    return layout.ranks_on_host * each


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of what a run leaves."""

    checkpoint: int
    model: int
    run: int
    """at its fullest: all checkpoints that are kept, one being written, and the model"""


def disk_of(cfg: TrainConfig, parts: Iterable[Part]) -> Disk:
    """fp32 weights, with the optimizer's state in a checkpoint
    (:mod:`ppocli.engine.persist`); logs and samples apart."""
    own = [p for p in parts if p.sharded]
    model = sum(4 * p.parameters for p in own if p.kind == "policy")
    state = STATE_BYTES[cfg.ppo.optimizer.name] * sum(p.trained for p in own)
    checkpoint = sum(4 * p.parameters for p in own) + state
    kept = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1
    return Disk(checkpoint, model, kept * checkpoint + model)
