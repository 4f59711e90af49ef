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
(:mod:`ppocli.zero.sharded_models`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppocli.config import algorithm, schema, tasks
from ppocli.estimate.parts import Part

MAX_LIVE = 1_000_000_000
"""elements: DeepSpeed's default ``stage3_max_live_parameters``"""
FROZEN = "states of frozen layers"
"""names of lines"""
LASTING = "generate score update save"
"""phases of what is always there"""


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
    """One thing that takes memory: bytes on a device and in host memory, both of one rank."""

    name: str
    device: int
    host: int = 0
    phases: str = LASTING
    """those it is there in; ``score``: the forward passes over what was generated; ``save``: while
    several ranks write a checkpoint"""
    estimated: bool = False
    """whether it comes from a formula; else tensors have been counted"""


@dataclass(frozen=True, slots=True)
class Sums:
    """Bytes at the fullest moment of each phase; ``device`` of one, ``host`` of all its ranks."""

    generate: int
    score: int
    update: int
    save: int
    host: int
    loading: int
    """of a host, while its ranks load their models"""

    @property
    def device(self) -> int:
        """The fullest moment of a device."""
        return max(self.generate, self.score, self.update, self.save)


def layout_of(cfg: schema.TrainConfig, *, tokens: int, ranks: int, ranks_on_host: int,
              cuda: bool) -> Layout:
    """Sizes are of the whole run, micro-batch and chunk of one rank
    (:mod:`ppocli.training.optimize`, :mod:`ppocli.tasks.ppo.rollout`).

    Args:
        tokens: of the longest sample.
    """
    ppo, evaluation, updates = cfg.ppo, cfg.prompts.eval, tasks.updates_of(cfg)
    share = -(-updates.mini_batch_size // ranks)
    pass_ = tasks.rows_per_pass(updates)
    if updates.micro_batch_tokens is not None:
        pass_ = max(1, min(pass_, updates.micro_batch_tokens // tokens))
    rows = min(pass_, share)
    accumulates = rows < share
    if (task := tasks.task_name(cfg)) in tasks.DATA_TASKS:
        rows *= 2 if task == "reward_model" else 1  # of a pair
        decoded, scored = max(-(-cfg.sft.eval_samples // ranks), 1), rows
    else:
        most = max(ppo.num_rollouts, evaluation.limit * evaluation.repeat)
        decoded = min(ppo.chunk_size or min(ppo.num_rollouts, 128), -(-most // ranks))
        scored = min(pass_, decoded)
    return Layout(ranks, ranks_on_host, cuda, rows, decoded, scored, accumulates)


def lines_of(cfg: schema.TrainConfig, parts: Sequence[Part], layout: Layout, heads: int,
             deepspeed: dict[str, Any]) -> Iterator[Line]:
    """What weights and their optimization take of a rank, in the order in which it is told.

    Args:
        heads: bytes of the weights of the output embedding and the value head.
        deepspeed: its ``zero_optimization`` section.
    """
    stage, ranks, offload = cfg.hardware.zero_stage, layout.ranks, cfg.hardware.offload_optimizer
    live = int(deepspeed.get("stage3_max_live_parameters", MAX_LIVE))
    whole = algorithm.whole_while_acting(cfg)
    own = [p for p in parts if p.sharded]
    size, trained = sum(p.size for p in own), sum(p.gradients for p in own)
    state = sum(p.state for p in own)
    yield _line("weights", _share(size, ranks if stage == 3 else 1),
                on_host=cfg.hardware.offload_param)
    if stage:
        yield _line("weights DeepSpeed steps on", _share(trained, ranks), on_host=offload)
    for part in parts:  # frozen models are whole on every rank, but for a reference in parts
        if not part.sharded and part.place != "elsewhere":
            yield _line(part.name, _share(part.size, ranks if part.in_parts else 1),
                        on_host=part.place != "device" and layout.cuda)
        if part.in_parts:  # what is gathered while it runs
            gathered = part.size if whole and schema.reference_kind(cfg.model) == "shared" else min(
                part.size, live * (part.size // max(part.parameters, 1)))
            yield _line("reference while it runs", gathered, "score")
        elif part.place == "offloaded" and layout.cuda:
            yield _line("reference while it runs", part.size, "score")
    yield _line("optimizer state", _share(state, ranks if stage else 1), on_host=offload)
    # stage 3 keeps the room for them, the others give it back after each update
    reduced_in = LASTING if stage == 3 else "update"
    yield _line("gradients", _share(trained, ranks if stage > 1 else 1), reduced_in,
                on_host=offload and stage > 0)
    if stage == 0 and ranks > 1:
        yield _line("DDP's buckets of gradients", trained)
    if stage:
        bucket = 4 * int(deepspeed["reduce_bucket_size"])
        twice = 2 if stage < 3 and deepspeed.get("overlap_comm") is True else 1
        # a CPU has pages only for what is written
        yield _line("DeepSpeed's bucket of gradients",
                    twice * (bucket if layout.cuda else min(bucket, trained)), reduced_in)
        largest = 4 * max((p.largest for p in own), default=0)
        if stage == 3:  # in the order of ranks; on the host torch reduces a copy of its own
            yield _line("DeepSpeed's copies of a bucket", (1 if layout.cuda else 2) * max(
                min(bucket, trained), largest), "update")
        # a rank's share and the tensor that is put together; the policy, which the first rank puts
        # together before under stage 3, is no more than loading takes, or rollouts on the host
        yield _line("state while a checkpoint is written", _share(state, ranks) + largest, "save",
                    on_host=layout.cuda)
    if offload and 0 < stage < 3:
        yield Line("DeepSpeed's buffers of one gradient", largest, largest)
        yield Line("DeepSpeed's copy of the stepped weights", 0, _share(trained, ranks))
    if stage == 3:
        yield _line("weights gathered in a pass", min(size, 4 * live),
                    "update" if whole else LASTING)
        yield _line("weights gathered for rollouts", size if whole else heads, "generate score")


def _line(name: str, size: int, phases: str = LASTING, *, on_host: bool = False) -> Line:
    return Line(name, 0 if on_host else size, size if on_host else 0, phases)


def _followed(cfg: schema.TrainConfig, parts: Iterable[Part]) -> int:
    """Bytes of a reference that changes and is saved with what trains."""
    return sum(p.size for p in parts if p.kind == "reference") if (
        cfg.model.reference.sync_every) else 0


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)


def add_up(lines: Sequence[Line], parts: Sequence[Part], layout: Layout, stage: int) -> Sums:
    """The fullest moments.

    In one pass an update's activations go while its gradients come, so that without accumulation
    (and stage) only the larger of both counts, with the gradient of the largest weight.
    """
    generate, score, update, save = (sum(line.device for line in lines if phase in line.phases)
                                     for phase in LASTING.split())
    if stage == 0 and not layout.accumulates:
        sizes = {line.name: line.device for line in lines if "update" in line.phases}
        passing = sum(sizes.get(name, 0) for name in (
            "weights in bf16", "activations", "working memory of updates"))
        gradients = sizes.get("gradients", 0)
        largest = 4 * max(p.largest for p in parts)
        update += max(passing, gradients + largest) - passing - gradients
    host = layout.ranks_on_host * max(sum(line.host for line in lines if line.phases != "update"),
                                      sum(line.host for line in lines if "update" in line.phases))
    sums = Sums(generate, score, update, save, host, _loading(parts, layout, stage))
    return sums if layout.cuda else replace(sums, host=host + layout.ranks_on_host * sums.device)


def _loading(parts: Sequence[Part], layout: Layout, stage: int) -> int:
    """Every rank loads the whole policy into host memory and then, to a device, the reference;
    under ZeRO 3 rank 0 alone does, and hands out parts (:mod:`ppocli.zero.sharded_models`). An
    adapter's base is whole on every rank, and so is a value model."""
    own = [p for p in parts if p.sharded]
    handed_out = stage == 3 and not any(p.adapter for p in own)
    ranks = layout.ranks_on_host
    policy = sum(p.size * (1 if handed_out and p.kind == "policy" else ranks) for p in own)
    frozen = sum(p.size * (1 if stage == 3 and p.in_parts else ranks)
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


def disk_of(cfg: schema.TrainConfig, parts: Sequence[Part]) -> Disk:
    """fp32 weights, or an adapter's alone, with the optimizer's state in a checkpoint
    (:mod:`ppocli.training.checkpoint_writing`); logs and samples apart."""
    own = [p for p in parts if p.sharded]
    model = sum(p.saved - p.state for p in own if p.kind == "policy")
    checkpoint = sum(p.saved for p in own) + _followed(cfg, parts)
    kept = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1
    return Disk(checkpoint, model, kept * checkpoint + model)
