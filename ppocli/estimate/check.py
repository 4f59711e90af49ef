"""The estimate of a run, for those who ask; and, before a run loads weights: does it fit?"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ppocli.config import algorithm, sampling, tasks
from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.schema import TrainConfig, reference_kind
from ppocli.errors import DiskError, OutOfMemoryError, PpocliError
from ppocli.estimate import memory, passes
from ppocli.estimate.memory import FROZEN, Layout, Line
from ppocli.estimate.parts import Models, Part, count, models_of, parts_of
from ppocli.models.fast.gemm import packed_size
from ppocli.models.layer_stack import layer_stack
from ppocli.models.loading.language_model import DTYPES
from ppocli.models.trunk import has_encoder, num_virtual_tokens
from ppocli.parallel.host_memory import ASSUMED_DEVICE, Room, room_here
from ppocli.parallel.onednn import TORCH, choose_gemm, probe
from ppocli.storage.atomic import free_bytes
from ppocli.storage.retention import folder_size
from ppocli.text import first_line, format_bytes, format_memory

log = logging.getLogger("ppocli")

ERROR = 0.2
"""share by which a formula may be off"""
CLOSE = 0.9
"""share of what is there from which a run is warned of"""
PLENTY = 0.5
"""share up to which nobody has to know that an estimate is rough"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run takes. Lines are of one rank."""

    parts: tuple[Part, ...]
    layout: Layout
    lines: tuple[Line, ...]
    sums: memory.Sums
    disk: memory.Disk
    prompt_tokens: int
    unknown: dict[str, str]
    """what is left out, and why"""
    rough: tuple[str, ...] = ()
    """kinds of models among those that train whose passes have not been measured"""
    new_tokens: int = 0
    """of the longest response, or of an example those that are trained on"""


def estimate(cfg: TrainConfig, models: Models, *, prompt_tokens: int, cuda: bool, ranks: int,
             ranks_on_host: int, rewards: bool = True, new_tokens: int | None = None) -> Estimate:
    """What a run of ``cfg`` takes, at its fullest.

    Args:
        models: of ``cfg``.
        prompt_tokens: of the longest prompt.
        cuda: whether GPUs compute.
        rewards: whether those of the rewards count.
        new_tokens: of the longest response; of an example those that are trained on, the prompt
            being what is before them (default: ``generation.max_new_tokens``).

    Raises:
        ConfigError: DeepSpeed's file can't be read.
    """
    parts, unknown = parts_of(cfg, models, rewards=rewards)
    new = sampling.longest_rollout(cfg) if new_tokens is None else new_tokens
    layout = memory.layout_of(cfg, tokens=prompt_tokens + new, ranks=ranks,
                              ranks_on_host=ranks_on_host, cuda=cuda)
    stage = cfg.hardware.zero_stage
    zero = deepspeed_config(cfg)["zero_optimization"] if stage else {}
    heads = 4 * count(p for module in models.heads for p in module.parameters())
    lines = tuple(line for line in (
        *memory.lines_of(cfg, parts, layout, heads, zero),
        *_passes(cfg, models, parts, layout, prompt_tokens, new)) if line.device or line.host)
    kinds = dict.fromkeys(lm.config.model_type for lm in models.trunks)
    return Estimate(parts, layout, lines, memory.add_up(lines, parts, layout, stage),
                    memory.disk_of(cfg, parts), prompt_tokens, unknown,
                    tuple(kind for kind in kinds if kind not in passes.MEASURED), new)


def _passes(cfg: TrainConfig, models: Models, parts: tuple[Part, ...], layout: Layout,
            prompt_tokens: int, new: int) -> Iterator[Line]:
    """What passes take beside weights, in the order in which it is told."""
    lm, cuda, task = models.lm, layout.cuda, tasks.task_name(cfg)
    dtype, checkpoints = DTYPES[cfg.hardware.precision], cfg.model.gradient_checkpointing
    at = passes.Sizes(layout.rows, prompt_tokens, new, dtype.itemsize,
               lm.get_input_embeddings().weight.element_size(), cuda,
               cfg.model.attn_implementation)
    copies = 2 * at.casts * sum(p.cast for p in parts)
    kept, beside = passes.training_pass(cfg, models, at, copies=copies)
    # checkpointed layers copy again in the backward pass
    yield Line("weights in bf16", 0 if checkpoints else copies, phases="update")
    yield Line("activations", kept, phases="update", estimated=True)
    yield Line("working memory of updates", beside, phases="update", estimated=True)
    if task != "reward_model":
        yield from _decoding(cfg, lm, layout, at, copies)
    if task not in tasks.DATA_TASKS:
        yield from _kept_states(cfg, models, layout, prompt_tokens)
    yield Line("working memory of scoring",
               passes.scoring_pass(models, replace(at, rows=layout.scored)), phases="score",
               estimated=True)


def _decoding(cfg: TrainConfig, lm: Any, layout: Layout, at: passes.Sizes, copies: int
              ) -> Iterator[Line]:
    """What generation takes beside weights."""
    dtype = DTYPES[cfg.hardware.precision]
    # oneDNN reads the weights from a copy of its own (ppocli.models.fast.gemm)
    laid_out = (packed_size(lm, dtype) if not layout.cuda and algorithm.whole_while_acting(cfg)
                and probe(dtype) is None and choose_gemm(cfg.hardware) != TORCH else 0)
    yield Line("weights in bf16 for rollouts", copies if cfg.hardware.zero_stage < 3 else 0,
               phases="score" if laid_out else "generate score")
    yield Line("weights laid out for decoding", laid_out, phases="generate")
    longest = sampling.longest_response(cfg)
    cache, decoding = passes.decoding_pass(lm, replace(at, rows=layout.decoded, new=longest))
    yield Line("keys and values (KV cache)", cache, phases="generate", estimated=True)
    yield Line("working memory of generation", decoding, phases="generate", estimated=True)


def _kept_states(cfg: TrainConfig, models: Models, layout: Layout, prompt_tokens: int
                 ) -> Iterator[Line]:
    """What is kept of one rollout whose samples are all as long as the longest: of the layers below
    those that train (:mod:`ppocli.tasks.ppo.rollout`,
    :func:`ppocli.tasks.ppo.experience.replay`), and of a chunk until the reference is run
    (:func:`ppocli.tasks.ppo.rollout.measure`)."""
    lm, room = models.lm, cfg.hardware.frozen_states_mib * 2**20
    words, head = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    samples, new = cfg.ppo.num_rollouts, sampling.longest_rollout(cfg)
    tokens, in_loss = prompt_tokens + new, algorithm.full_kl_in_loss(cfg.ppo)
    full = algorithm.kl_estimator(cfg.ppo) == "full" and not in_loss
    shares = reference_kind(cfg.model) == "shared"
    # whether the policy's own layers run in scoring, after decoding
    forward = not algorithm.decoding_scores(cfg) or full or models.branch is not None
    scored = False
    if room and layout.ranks == 1 and cfg.hardware.zero_stage < 3 and _splits(cfg, models):
        padded = 4 * samples * words.shape[-1] * tokens  # that decoding asks for room for
        # layers add to the states that they are given, so those stay in the embeddings' type
        whole = samples * head.shape[1] * words.element_size() * (tokens - 1)
        decodes = (algorithm.decoding_scores(cfg) and cfg.hardware.precision == "fp32"
                   and padded <= room // 2)
        scored = whole <= room and (decodes or forward or shares)
        # updates remember what nobody kept before
        yield Line(FROZEN, min(whole, room), phases="score update" if scored else "update")
        # the same as decoding kept it, until the last sample is scored
        yield Line(f"{FROZEN}, padded", padded if decodes else 0, phases="generate score")
    apart = (shares and cfg.model.num_layers_unfrozen >= 0 and not scored and not has_encoder(lm)
             and forward)
    yield Line("states kept for the reference", phases="score", estimated=True,
               device=layout.decoded * (full * new + apart * (tokens - 1)) * head.shape[1]
               * head.element_size())
    yield Line("the reference's final states", 0, phases="score update", estimated=True,
               host=in_loss * samples * new * head.shape[1] * head.element_size())


def _splits(cfg: TrainConfig, models: Models) -> bool:
    """Whether there are layers below those that train, and nothing else trains there."""
    lm = models.lm
    try:
        trains = [any(p.requires_grad for p in layer.parameters()) for layer in layer_stack(lm)]
    except ValueError:
        return False
    lowest = trains.index(True) if True in trains else 0
    branch = models.branch is not None and (
        len(trains) - cfg.model.value.num_layers_unfrozen < lowest)
    return lowest > 0 and not (branch or has_encoder(lm) or num_virtual_tokens(lm)
                               or lm.get_input_embeddings().weight.requires_grad)


# Does it fit? -------------------------------------------------------------------------------------

def check_memory(cfg: TrainConfig, lm_config: Any, *, prompt_tokens: int, device: torch.device,
                 ranks: int, ranks_on_host: int, warn: bool = True,
                 new_tokens: int | None = None) -> None:
    """Compare what a run takes with what this rank's device and host can still give.

    Rewards are built by then, so what they hold is gone from there already.

    Args:
        lm_config: the configuration of ``model.path``.
        prompt_tokens: of the longest prompt.
        ranks: of the whole run.
        warn: whether this rank speaks.
        new_tokens: as of :func:`estimate`.

    Raises:
        OutOfMemoryError: it surely doesn't fit and ``hardware.memory_check`` is ``error``.
    """
    if cfg.hardware.memory_check == "off":
        return
    cuda = device.type != "cpu"
    room = room_here(cuda=cuda, device=device if cuda else None)
    try:
        found = estimate(cfg, models_of(cfg, lm_config), prompt_tokens=prompt_tokens, cuda=cuda,
                         ranks=ranks, ranks_on_host=ranks_on_host, rewards=False,
                         new_tokens=new_tokens)
    except Exception as error:
        # a model that can't be outlined may train all the same, and its loader says more
        if warn:
            log.info("How much memory the run takes can't be told beforehand: %s",
                     error.what if isinstance(error, PpocliError) else first_line(error))
        return
    if warn and found.unknown:
        log.info("Of the memory of this run left out: %s", "; ".join(
            f"{name} ({why})" for name, why in found.unknown.items()))
    refuse_or_warn(cfg, found, room, warn=warn)
    if warn:
        check_disk(cfg, found.disk)


def check_disk(cfg: TrainConfig, disk: memory.Disk) -> None:
    """Refuse a run whose disk has no room for one checkpoint or its model, warn of one that can't
    keep all it is to keep. What the run, if it goes on, has on the disk counts as free.

    Raises:
        DiskError: there is no room, and ``hardware.memory_check`` is ``error``.
    """
    folder = Path(cfg.output_dir) / (cfg.run_name or "")
    free, every = free_bytes(folder), cfg.checkpoint
    if free is None:
        return
    free += folder_size(folder / "checkpoints")
    saves = every.every_steps is not None or every.every_minutes is not None
    text = (f"this run needs {format_bytes(disk.checkpoint)} for each checkpoint and "
            f"{format_bytes(disk.model)} for its model, {format_bytes(disk.run)} at most, and "
            f"{format_bytes(free)} are free")
    if free < max(disk.model, disk.checkpoint * saves) and cfg.hardware.memory_check == "error":
        raise DiskError(f"Not enough disk space: {text}.", where=str(folder),
                        fix="free some space or choose another output_dir; or "
                        "hardware.memory_check=warn to try it all the same")
    if free < disk.run:
        log.warning("Disk space is short: %s. What makes it less: checkpoint.keep_last=1, "
                    "checkpoint.keep_best=false.", text)


def refuse_or_warn(cfg: TrainConfig, found: Estimate, room: Room, *, warn: bool = True) -> None:
    """Refuse what doesn't fit even if the formulas say too much, warn of what may not.

    Raises:
        OutOfMemoryError: as :func:`check_memory`.
    """
    certain = {place: needed for needed, _, place in needs(at_least(found, cfg), room)}
    helps = ", ".join(advice(found, cfg)[:4])
    for needed, there, place in needs(found, room):
        text = (f"this run needs about {format_memory(needed)} of {place}, and "
                f"{format_memory(there)} are free")
        if certain[place] > there and cfg.hardware.memory_check == "error":
            raise OutOfMemoryError(
                f"Not enough memory: {text}.", where="told before loading, by ppocli estimate",
                fix=(f"in the order of what it saves: {helps}; or " if helps else "")
                + "hardware.memory_check=warn to try it all the same")
        if warn and found.rough and needed > PLENTY * there:
            log.warning("%s", roughly(found))
        if warn and needed > CLOSE * there:
            log.warning("Memory is short: %s.%s", text,
                        f" What makes it less: {helps}." if helps else "")


def at_least(found: Estimate, cfg: TrainConfig) -> Estimate:
    """What a run takes if formulas say too much: nothing is sure of models that have not been
    measured, and on a GPU a pass that runs out of memory is made again with fewer rows, down to one
    (:mod:`ppocli.zero.oom_retry`)."""
    layout = found.layout

    def least(line: Line) -> Line:
        rows = {"update": layout.rows, "generate": layout.decoded}.get(line.phases, layout.scored)
        share = 0 if found.rough else (1 - ERROR) / (rows if layout.cuda else 1)
        return replace(line, device=int(line.device * share)) if line.estimated else line

    lines = tuple(map(least, found.lines))
    return replace(found, lines=lines, sums=memory.add_up(lines, found.parts, layout,
                                                   cfg.hardware.zero_stage))


def roughly(found: Estimate) -> str:
    """That an estimate is not much to rely on."""
    return (f"The estimate is rough: what passes of {' and '.join(found.rough)} take has not been "
            "measured, and is told by the shapes of their layers.")


def needs(found: Estimate, room: Room) -> list[tuple[int, int, str]]:
    """(bytes needed, bytes there, of what) of the device and of the host; without what a run does
    without."""
    sums, many, given = found.sums, found.layout.ranks_on_host, room.name == ASSUMED_DEVICE
    host = f"{room.name} memory" if given else "this machine's memory"
    asked = [(sums.device, room.device,
              f"{room.name} GPU memory" if given else f"memory on {room.name}"),
             (max(sums.host, sums.loading), room.host,
              host if many == 1 else f"{host} for {many} processes")]
    return [(needed, there, of) for needed, there, of in asked if there is not None]


def advice(found: Estimate, cfg: TrainConfig) -> list[str]:
    """Settings that make the fullest moment smaller, what helps most first."""
    size = Counter({line.name: line.device for line in found.lines})
    layout, sums, zero = found.layout, found.sums, cfg.hardware.zero_stage
    in_update = sums.update >= max(sums.generate, sums.score)
    kept, state, reference = size["activations"], size["optimizer state"], size["reference"]
    decoding = size["keys and values (KV cache)"] + size["working memory of generation"]
    fewer, section = max(layout.decoded // 4, 1), tasks.updates_section(cfg)
    options: list[tuple[bool, int, str]] = [
        (in_update, kept - kept // layout.rows, f"{section}.micro_batch_size=1"),
        (in_update and not cfg.model.gradient_checkpointing, kept * 3 // 4,
         "model.gradient_checkpointing=true"),
        (not in_update and section == "ppo", decoding - decoding * fewer // layout.decoded,
         f"ppo.chunk_size={fewer}"),
        (layout.ranks > 1 and zero < 2, state + size["gradients"], "hardware.zero_stage=2"),
        (layout.ranks > 1 and zero == 2, state, "hardware.zero_stage=3"),
        (zero > 0 and layout.cuda and not cfg.hardware.offload_optimizer, state,
         "hardware.offload_optimizer=true"),
        (cfg.model.num_layers_unfrozen < 0 and not cfg.model.peft, state // 2,
         "model.num_layers_unfrozen=2"),
        (reference_kind(cfg.model) == "copy" and "bf16" not in (
            cfg.model.dtype, cfg.hardware.precision), reference // 2, "model.dtype=bf16"),
        # it is back on the device while it runs
        (layout.cuda, min(reference, sums.device - sums.score), "model.reference.offload=true"),
        (zero == 3 and algorithm.whole_while_acting(cfg) and not in_update,
         size["weights gathered for rollouts"] - size["weights gathered in a pass"],
         "hardware.gather_for_generation=false"),
        (any(("update" if in_update else "score") in line.phases for line in found.lines
             if line.name == FROZEN), size[FROZEN], "hardware.frozen_states_mib=0")]
    useful = [(saved, text) for helps, saved, text in options if helps and saved > 0]
    return [text for _, text in sorted(useful, key=lambda option: -option[0])]
