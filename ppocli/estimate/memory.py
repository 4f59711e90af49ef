"""Adding up: bytes on each device, on each host and on disk, of a run of given parts.

For n parameters, t of them trained, on w ranks. ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054,
section 3) counts 2 + 2 + 12 bytes a parameter: weights and gradients in 16 bits, Adam's state with
a copy of the weights in 32. Here weights, gradients and state are all fp32, so it is 4 + 4 + 8, and
bf16 adds copies of 2 bytes for the time of a pass:

===== ================= =============== ============= =========================================
stage weights           gradients       Adam's state  beside them, fp32
===== ================= =============== ============= =========================================
0     4 n               4 t             8 t           4 t of DDP's buckets if w > 1
1     4 n + 4 t / w     4 t             8 t / w       a bucket for reducing gradients
2     4 n + 4 t / w     4 t / w         8 t / w       a bucket for reducing gradients
3     4 (n + t) / w     4 t / w         8 t / w       a bucket, and weights gathered in a pass
===== ================= =============== ============= =========================================

DeepSpeed steps on a copy of a rank's share of the weights (``deepspeed/runtime/zero/stage_1_and_2.
py``, ``single_partition_of_fp32_groups``; ``stage3.py``, ``fp32_partitioned_groups_flat``, which
would be the weights themselves if a device were compared with its name as it means to; 0.19). Under
stage 3 rollouts gather all weights, or without ``hardware.gather_for_generation`` those of one
layer after the other (:mod:`ppocli.zero.sharded_weights`), and a reference is in parts too
(:mod:`ppocli.zero.sharded_reference`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ppocli.config.algorithm import whole_while_acting
from ppocli.config.schema import TrainConfig, reference_kind
from ppocli.estimate.parts import Part

BUCKET = 500_000_000
"""elements: DeepSpeed's default ``reduce_bucket_size``"""
MAX_LIVE = 1_000_000_000
"""elements: DeepSpeed's default ``stage3_max_live_parameters``"""
CHECKPOINT_COPY = "copy of a checkpoint"
FROZEN = "states of frozen layers"
"""names of lines"""


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
    scored: int
    """samples of a rank's forward pass after it"""
    accumulates: bool
    """whether an update is several micro-batches: gradients then lie beside activations"""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that takes memory: bytes on a device and in host memory, both of one rank, and the
    phases it is there in."""

    name: str
    device: int
    host: int = 0
    generate: bool = True
    score: bool = True
    """the forward passes over what was generated"""
    update: bool = True
    estimated: bool = False
    """whether it comes from a formula; else tensors have been counted"""


@dataclass(frozen=True, slots=True)
class Sums:
    """Bytes at the fullest moment of each phase; ``device`` of one, ``host`` of all its ranks."""

    generate: int
    score: int
    update: int
    host: int
    loading: int
    """of a host, while its ranks load their models"""

    @property
    def device(self) -> int:
        """The fullest moment of a device."""
        return max(self.generate, self.score, self.update)


@dataclass(frozen=True, slots=True)
class Passes:
    """Bytes that passes take beside weights, of one rank."""

    activations: int
    """kept from a forward pass to its backward pass"""
    updates: int
    """most beside those"""
    cache: int
    """keys and values of all samples at their full length"""
    generation: int
    """most beside those"""
    scoring: int = 0
    """of a forward pass without gradients"""
    hidden: int = 0
    """the policy's states of all samples of a chunk, where the reference's pass needs them"""
    heads: int = 0
    """the weights of the output embedding and the value head"""
    laid_out: int = 0
    """the weights once more, as decoding reads them fastest (:mod:`ppocli.models.fast.gemm`)"""
    frozen: int = 0
    """of what enters the lowest layer that trains, of all samples of a rollout; updates remember
    what nobody kept before (:mod:`ppocli.models.fast.frozen_states`)"""
    frozen_scored: bool = False
    """whether it is kept by the end of scoring"""
    frozen_padded: int = 0
    """the same once more: as decoding kept it, until the last sample is scored"""


def layout_of(cfg: TrainConfig, *, prompt_tokens: int, ranks: int, ranks_on_host: int, cuda: bool
              ) -> Layout:
    """Sizes are of the whole run, micro-batch and chunk of one rank
    (:mod:`ppocli.training.optimize`, :mod:`ppocli.tasks.ppo.rollout`).

    Args:
        prompt_tokens: of the longest prompt.
    """
    ppo, evaluation = cfg.ppo, cfg.prompts.eval
    share = -(-ppo.mini_batch_size // ranks)
    pass_ = ppo.micro_batch_size or ppo.mini_batch_size
    if ppo.micro_batch_tokens is not None:
        longest = prompt_tokens + cfg.generation.max_new_tokens
        pass_ = max(1, min(pass_, ppo.micro_batch_tokens // longest))
    rows = min(pass_, share)
    chunk = ppo.chunk_size or min(ppo.num_rollouts, 128)
    most = max(ppo.num_rollouts, evaluation.limit * evaluation.repeat)
    decoded = min(chunk, -(-most // ranks))
    return Layout(ranks=ranks, ranks_on_host=ranks_on_host, cuda=cuda, rows=rows,
                  decoded=decoded, scored=min(pass_, decoded),
                  accumulates=rows < share)


def lines_of(cfg: TrainConfig, parts: Iterable[Part], layout: Layout, passes: Passes,
             deepspeed: dict[str, Any]) -> tuple[Line, ...]:
    """Everything that takes memory of a rank, in the order in which it is told.

    Args:
        deepspeed: its ``zero_optimization`` section.
    """
    parts = tuple(parts)
    own = [p for p in parts if p.sharded]
    cast = sum(p.cast for p in own) if cfg.hardware.precision == "bf16" else 0
    lines = [
        *_weights(cfg, parts, layout, _number(deepspeed, "stage3_max_live_parameters", MAX_LIVE)),
        *_deepspeed(cfg, own, layout, passes.heads, deepspeed),
        *_checkpoint_copy(cfg, own, layout),
        # checkpointed layers copy again in the backward pass
        _line("weights in bf16", 0 if cfg.model.gradient_checkpointing else 2 * cast, "update"),
        _line("activations", passes.activations, "update", estimated=True),
        _line("working memory of updates", passes.updates, "update", estimated=True),
        _line("weights in bf16 for rollouts", 2 * cast if cfg.hardware.zero_stage < 3 else 0,
              "score" if passes.laid_out else "generate score"),
        _line("weights laid out for decoding", passes.laid_out, "generate"),
        _line("keys and values (KV cache)", passes.cache, "generate", estimated=True),
        _line("working memory of generation", passes.generation, "generate", estimated=True),
        _line(FROZEN, passes.frozen, "score update" if passes.frozen_scored else "update"),
        _line(f"{FROZEN}, padded", passes.frozen_padded, "generate score"),
        _line("states kept for the reference", passes.hidden, "score", estimated=True),
        _line("working memory of scoring", passes.scoring, "score", estimated=True)]
    return tuple(line for line in lines if line.device or line.host)


def _line(name: str, size: int, phases: str = "generate score update", *, on_host: bool = False,
          estimated: bool = False) -> Line:
    there = {phase: phase in phases.split() for phase in ("generate", "score", "update")}
    return Line(name, 0 if on_host else size, size if on_host else 0, estimated=estimated, **there)


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)


def _weights(cfg: TrainConfig, parts: tuple[Part, ...], layout: Layout, live: int
             ) -> Iterator[Line]:
    """Weights, optimizer state and gradients.

    Args:
        live: elements that DeepSpeed gathers of a model in parts.
    """
    stage, ranks, offload = cfg.hardware.zero_stage, layout.ranks, cfg.hardware.offload_optimizer
    own = [p for p in parts if p.sharded]
    trained = 4 * sum(p.trained for p in own)
    yield _line("weights", _share(sum(p.size for p in own), ranks if stage == 3 else 1),
                on_host=cfg.hardware.offload_param)
    if stage:
        yield _line("weights DeepSpeed steps on", _share(trained, ranks), on_host=offload)
    for part in parts:  # frozen models are whole on every rank, but for a reference in parts
        if not part.sharded and part.place != "elsewhere":
            yield _line(part.name, _share(part.size, ranks if part.in_parts else 1),
                        on_host=part.place != "device" and layout.cuda)
        if part.in_parts:  # what is gathered while it runs
            whole = reference_kind(cfg.model) == "shared" and whole_while_acting(cfg)
            each = part.size // max(part.parameters, 1)
            yield _line("reference while it runs",
                        part.size if whole else min(part.size, live * each), "score")
        elif part.place == "offloaded" and layout.cuda:
            yield _line("reference while it runs", part.size, "score")
    yield _line("optimizer state", _share(sum(p.state for p in own), ranks if stage else 1),
                on_host=offload)
    # stage 3 keeps the room for them, the others give it back after each update
    yield _line("gradients", _share(trained, ranks if stage > 1 else 1),
                "generate score update" if stage == 3 else "update",
                on_host=offload and stage > 0)


def _deepspeed(cfg: TrainConfig, own: list[Part], layout: Layout, heads: int,
               deepspeed: dict[str, Any]) -> Iterator[Line]:
    """What DeepSpeed, or DDP, holds beside."""
    stage, whole = cfg.hardware.zero_stage, whole_while_acting(cfg)
    trained = sum(p.trained for p in own)
    if stage == 0:
        if layout.ranks > 1:
            yield _line("DDP's buckets of gradients", 4 * trained)
        return
    bucket = _number(deepspeed, "reduce_bucket_size", BUCKET)
    # a CPU has pages only for what is written
    reduced = 4 * (bucket if layout.cuda else min(bucket, trained))
    twice = 2 if stage < 3 and deepspeed.get("overlap_comm") is True else 1
    yield _line("DeepSpeed's bucket of gradients", twice * reduced,
                "generate score update" if stage == 3 else "update")
    if cfg.hardware.offload_optimizer and stage < 3:
        largest = 4 * max((p.largest for p in own), default=0)
        yield Line("DeepSpeed's buffers of one gradient", largest, largest)
        yield Line("DeepSpeed's copy of the stepped weights", 0, _share(4 * trained, layout.ranks))
    if stage == 3:
        size = sum(p.size for p in own)
        live = 4 * _number(deepspeed, "stage3_max_live_parameters", MAX_LIVE)
        yield _line("weights gathered in a pass", min(size, live),
                    "update" if whole else "generate score update")
        yield _line("weights gathered for rollouts", size if whole else heads, "generate score")


def _checkpoint_copy(cfg: TrainConfig, own: list[Part], layout: Layout) -> Iterator[Line]:
    """What is written while training goes on (:mod:`ppocli.training.background_saving`)."""
    if cfg.checkpoint.background == "never" or layout.ranks > 1 or cfg.hardware.zero_stage:
        return
    # where they compute on the host, weights that don't train are shared with their copy
    yield _line(CHECKPOINT_COPY, sum(p.pinned if layout.cuda else 4 * p.trained + p.state
                                     for p in own), on_host=layout.cuda)


def spared(cfg: TrainConfig, lines: Iterable[Line]) -> int:
    """Bytes among the lines that a run does without where they aren't free."""
    return sum(line.device + line.host for line in lines
               if line.name == CHECKPOINT_COPY and cfg.checkpoint.background == "auto")


def _number(settings: dict[str, Any], name: str, default: int) -> int:
    value = settings.get(name, default)
    return int(value) if isinstance(value, (int, float)) else default


def add_up(lines: Iterable[Line], parts: Iterable[Part], layout: Layout, stage: int) -> Sums:
    """The fullest moments.

    In one pass an update's activations go while its gradients come, so that without accumulation
    (and stage) only the larger of both counts, with the gradient of the largest weight.
    """
    lines = tuple(lines)
    generate = sum(line.device for line in lines if line.generate)
    score = sum(line.device for line in lines if line.score)
    update = sum(line.device for line in lines if line.update)
    if stage == 0 and not layout.accumulates:
        sizes = {line.name: line.device for line in lines if line.update}
        passing = sum(sizes.get(name, 0) for name in (
            "weights in bf16", "activations", "working memory of updates"))
        gradients = sizes.get("gradients", 0)
        largest = 4 * max(p.largest for p in parts)
        update += max(passing, gradients + largest) - passing - gradients
    host = layout.ranks_on_host * max(
        sum(line.host for line in lines if line.generate or line.score),
        sum(line.host for line in lines if line.update))
    device = max(generate, score, update)
    if not layout.cuda:
        host += layout.ranks_on_host * device
    return Sums(generate, score, update, host, _loading(parts, layout, stage))


def _loading(parts: Iterable[Part], layout: Layout, stage: int) -> int:
    """Every rank loads the whole policy into host memory and then, to a device, the reference;
    under ZeRO 3 rank 0 alone does, and hands out parts (:mod:`ppocli.zero.zero3_loading`). An
    adapter's base is whole on every rank, and so is a value model."""
    parts = tuple(parts)
    own = [p for p in parts if p.sharded]
    handed_out = stage == 3 and not any(p.adapter for p in own)
    copies = 1 if handed_out else layout.ranks_on_host
    policy = sum(p.size * (copies if p.kind == "policy" else layout.ranks_on_host) for p in own)
    frozen = sum(p.size * (1 if stage == 3 and p.in_parts else layout.ranks_on_host)
                 for p in parts if p.kind == "reference")
    if layout.cuda:
        return max(policy, frozen)
    # the parts of what was loaded before
    return max(policy, frozen + sum(p.size for p in own)) if handed_out else policy + frozen


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of what a run leaves."""

    checkpoint: int
    model: int
    run: int
    """at its fullest: all checkpoints that are kept, one being written, and the model"""


def disk_of(cfg: TrainConfig, parts: Iterable[Part]) -> Disk:
    """fp32 weights, or an adapter's alone, with the optimizer's state in a checkpoint
    (:mod:`ppocli.training.checkpoint_writing`); logs and samples apart."""
    own = [p for p in parts if p.sharded]
    model = sum(p.saved - p.state for p in own if p.kind == "policy")
    checkpoint = sum(p.saved for p in own)
    kept = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1
    return Disk(checkpoint, model, kept * checkpoint + model)
