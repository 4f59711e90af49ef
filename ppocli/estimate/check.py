"""The estimate of a run, for those who ask; and, before a run loads weights: does it fit?"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from ppocli.config.algorithm import decoding_scores, kl_estimator, whole_while_acting
from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.keys import several
from ppocli.config.schema import TrainConfig, reference_kind
from ppocli.errors import OutOfMemoryError, PpocliError
from ppocli.estimate.memory import (
    FROZEN,
    Disk,
    Layout,
    Line,
    Passes,
    Sums,
    add_up,
    disk_of,
    layout_of,
    lines_of,
    spared,
)
from ppocli.estimate.parts import Models, Part, Unknown, models_of, parts_of, quantized_weights
from ppocli.estimate.passes import (
    Sizes,
    decoding_pass,
    is_measured,
    may_take_onednn,
    scoring_pass,
    stream_bytes,
    training_pass,
)
from ppocli.models.fast.gemm import packed_size
from ppocli.models.layer_stack import layer_stack
from ppocli.models.loading.language_model import DTYPES
from ppocli.models.trunk import has_encoder
from ppocli.models.virtual_tokens import num_virtual_tokens
from ppocli.parallel.host_memory import GIVEN, Room, room_here
from ppocli.text import first_line, format_memory

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
    sums: Sums
    disk: Disk
    prompt_tokens: int
    new_tokens: int
    unknown: tuple[Unknown, ...]
    """what is left out"""
    spared: int = 0
    """bytes of ``sums`` that the run does without where they aren't free"""
    rough: tuple[str, ...] = ()
    """kinds of models among those that train whose passes have not been measured"""


def estimate(cfg: TrainConfig, models: Models, *, prompt_tokens: int, cuda: bool, ranks: int,
             ranks_on_host: int, rewards: bool = True) -> Estimate:
    """What a run of ``cfg`` takes, at its fullest.

    Args:
        models: of ``cfg``.
        prompt_tokens: of the longest prompt.
        cuda: whether GPUs compute.
        rewards: whether those of the rewards count.

    Raises:
        ConfigError: DeepSpeed's file can't be read.
    """
    parts, unknown = parts_of(cfg, models, rewards=rewards)
    layout = layout_of(cfg, prompt_tokens=prompt_tokens, ranks=ranks,
                       ranks_on_host=ranks_on_host, cuda=cuda)
    zero = deepspeed_config(cfg).get("zero_optimization") if cfg.hardware.zero_stage else None
    lines = lines_of(cfg, parts, layout, _passes(cfg, models, parts, layout, prompt_tokens),
                     zero if isinstance(zero, dict) else {})
    kinds = [lm.config.model_type for lm in (models.lm, models.value_lm)
             if lm is not None and not is_measured(lm)]
    return Estimate(parts, layout, lines, add_up(lines, parts, layout, cfg.hardware.zero_stage),
                    disk_of(cfg, parts), prompt_tokens, cfg.generation.max_new_tokens, unknown,
                    spared(cfg, lines), tuple(dict.fromkeys(kinds)))


def _passes(cfg: TrainConfig, models: Models, parts: tuple[Part, ...], layout: Layout,
            prompt_tokens: int) -> Passes:
    lm, new, cuda = models.lm, cfg.generation.max_new_tokens, layout.cuda
    dtype, head = DTYPES[cfg.hardware.precision], models.lm.get_output_embeddings().weight
    at = Sizes(layout.rows, prompt_tokens, new, dtype.itemsize,
               stream_bytes(lm, cuda=cuda), cuda, cfg.model.attn_implementation)
    longest = max([new, *several(cfg.generation.eval.max_new_tokens)])
    laid_out = (packed_size(lm, dtype) if may_take_onednn(cfg, cuda) and whole_while_acting(cfg)
                else 0)
    # decoding keeps a copy of the head's weight
    copied = 2 * head.numel() if (at.casts and head.requires_grad and not laid_out
                                  and cfg.hardware.zero_stage < 3) else 0
    quantized = quantized_weights(cfg, lm)
    # a weight in 16 bits while its layer is run
    largest = 2 * max((p.numel() for p in lm.parameters() if id(p) in quantized), default=0)
    kept, beside = training_pass(cfg, models, at,
                                 copies=2 * at.casts * sum(p.cast for p in parts))
    decoded = replace(at, rows=layout.decoded, new=longest)
    cache, decoding = decoding_pass(lm, decoded, copied=copied)
    frozen, scored, padded = frozen_states(cfg, models, layout, prompt_tokens)
    heads = [module for module in (lm.get_output_embeddings(), models.value_head) if module]
    return Passes(
        activations=kept, updates=beside + largest, cache=cache, generation=decoding + largest,
        scoring=scoring_pass(models, replace(at, rows=layout.scored)) + largest,
        hidden=_hidden(cfg, models, layout, prompt_tokens, kept=scored), laid_out=laid_out,
        heads=4 * sum(p.numel() for module in heads for p in module.parameters()),
        frozen=frozen, frozen_scored=scored, frozen_padded=padded)


def frozen_states(cfg: TrainConfig, models: Models, layout: Layout, prompt_tokens: int
                  ) -> tuple[int, bool, int]:
    """What is kept of the layers below those that train, of one rollout whose samples are all as
    long as the longest (:mod:`ppocli.tasks.ppo.rollout`, :func:`ppocli.tasks.ppo.task.replay`), as
    :class:`ppocli.estimate.memory.Passes` has it."""
    lm, room = models.lm, cfg.hardware.frozen_states_mib * 2**20
    samples, words = cfg.ppo.num_rollouts, lm.get_input_embeddings().weight
    try:
        trains = [any(p.requires_grad for p in layer.parameters()) for layer in layer_stack(lm)]
    except ValueError:
        trains = []
    lowest = trains.index(True) if True in trains else 0
    branch = models.branch is not None and (
        len(trains) - cfg.model.value.num_layers_unfrozen < lowest)
    if (not room or layout.ranks > 1 or cfg.hardware.zero_stage == 3 or not lowest or branch
            or has_encoder(lm) or num_virtual_tokens(lm) or words.requires_grad):
        return 0, False, 0
    tokens = prompt_tokens + cfg.generation.max_new_tokens
    padded = 4 * samples * words.shape[-1] * tokens  # that decoding asks for room for
    # layers add to the states that they are given, so those stay in the type of the embeddings
    whole = samples * lm.get_output_embeddings().weight.shape[1] * words.element_size() * (
        tokens - 1)
    decodes = (decoding_scores(cfg) and cfg.hardware.precision == "fp32" and padded <= room // 2)
    scores = scores_by_forward(cfg, models) or reference_kind(cfg.model) == "shared"
    return min(whole, room), whole <= room and (decodes or scores), padded if decodes else 0


def scores_by_forward(cfg: TrainConfig, models: Models) -> bool:
    """Whether the policy's own layers run in scoring, after decoding."""
    return (not decoding_scores(cfg) or kl_estimator(cfg.ppo) == "full"
            or models.branch is not None)


def _hidden(cfg: TrainConfig, models: Models, layout: Layout, prompt_tokens: int, *, kept: bool
            ) -> int:
    """Bytes of the policy's states that are kept, for all samples of a chunk, until the reference
    is run (:func:`ppocli.tasks.ppo.rollout.measure`).

    Args:
        kept: whether what enters the lowest layer that trains is kept beyond that, and told apart.
    """
    head, new = models.lm.get_output_embeddings().weight, cfg.generation.max_new_tokens
    tokens = new if kl_estimator(cfg.ppo) == "full" else 0
    shares = reference_kind(cfg.model) == "shared" and cfg.model.num_layers_unfrozen >= 0
    if (shares and not kept and not has_encoder(models.lm) and scores_by_forward(cfg, models)):
        tokens += prompt_tokens + new - 1
    return layout.decoded * tokens * head.shape[1] * head.element_size()


# Does it fit? -------------------------------------------------------------------------------------

def check_memory(cfg: TrainConfig, lm_config: Any, *, prompt_tokens: int, device: torch.device,
                 ranks: int, ranks_on_host: int, warn: bool = True) -> None:
    """Compare what a run takes with what this rank's device and host can still give.

    Rewards are built by then, so what they hold is gone from there already.

    Args:
        lm_config: the configuration of ``model.path``.
        prompt_tokens: of the longest prompt.
        ranks: of the whole run.
        warn: whether this rank speaks.

    Raises:
        OutOfMemoryError: it surely doesn't fit and ``hardware.memory_check`` is ``error``.
    """
    if cfg.hardware.memory_check == "off":
        return
    cuda = device.type == "cuda"
    room = room_here(cuda=cuda, device=device if cuda else None)
    try:
        found = estimate(cfg, models_of(cfg, lm_config), prompt_tokens=prompt_tokens, cuda=cuda,
                         ranks=ranks, ranks_on_host=ranks_on_host, rewards=False)
    except Exception as error:
        # a model that can't be outlined may train all the same, and its loader says more
        if warn:
            log.info("How much memory the run takes can't be told beforehand: %s",
                     error.what if isinstance(error, PpocliError) else first_line(error))
        return
    if warn and found.unknown:
        log.info("Of the memory of this run left out: %s", "; ".join(
            f"{one.name} ({one.why})" for one in found.unknown))
    refuse_or_warn(cfg, found, room, warn=warn)


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
        rows = (layout.rows if line.update else layout.decoded if line.generate else layout.scored)
        share = 0 if found.rough else (1 - ERROR) / (rows if layout.cuda else 1)
        return replace(line, device=int(line.device * share)) if line.estimated else line

    lines = tuple(map(least, found.lines))
    return replace(found, lines=lines, sums=add_up(lines, found.parts, layout,
                                                   cfg.hardware.zero_stage))


def roughly(found: Estimate) -> str:
    """That an estimate is not much to rely on."""
    return (f"The estimate is rough: what passes of {' and '.join(found.rough)} take has not been "
            "measured, and is told by the shapes of their layers.")


def needs(found: Estimate, room: Room) -> list[tuple[int, int, str]]:
    """(bytes needed, bytes there, of what) of the device and of the host; without what a run does
    without."""
    sums = found.sums
    asked = []
    if room.device is not None:
        asked.append((sums.device, room.device, f"{room.name} GPU memory" if room.name == GIVEN
                      else f"memory on {room.name}"))
    if room.host is not None:
        many = found.layout.ranks_on_host
        of = "" if many == 1 else f" for {many} processes"
        needed = max(sums.host - found.spared, sums.loading)
        asked.append((needed, room.host, f"{room.name} memory{of}"
                      if room.name == GIVEN else f"this machine's memory{of}"))
    return asked
def advice(found: Estimate, cfg: TrainConfig) -> list[str]:
    """Settings that make the fullest moment smaller, what helps most first."""
    size = {line.name: line.device for line in found.lines}
    layout, sums, zero = found.layout, found.sums, cfg.hardware.zero_stage
    in_update = sums.update >= max(sums.generate, sums.score)
    kept, state = size.get("activations", 0), size.get("optimizer state", 0)
    decoding = size.get("keys and values (KV cache)", 0) + size.get(
        "working memory of generation", 0)
    fewer, reference = max(layout.decoded // 4, 1), size.get("reference", 0)
    frozen = next((line for line in found.lines if line.name == FROZEN), None)
    options: list[tuple[bool, int, str]] = [
        (in_update, kept - kept // layout.rows, "ppo.micro_batch_size=1"),
        (in_update and not cfg.model.gradient_checkpointing, kept * 3 // 4,
         "model.gradient_checkpointing=true"),
        (not in_update, decoding - decoding * fewer // layout.decoded, f"ppo.chunk_size={fewer}"),
        (layout.ranks > 1 and zero < 2, state + size.get("gradients", 0), "hardware.zero_stage=2"),
        (layout.ranks > 1 and zero == 2, state, "hardware.zero_stage=3"),
        (zero > 0 and layout.cuda and not cfg.hardware.offload_optimizer, state,
         "hardware.offload_optimizer=true"),
        (cfg.model.num_layers_unfrozen < 0 and not cfg.model.peft, state // 2,
         "model.num_layers_unfrozen=2"),
        (reference_kind(cfg.model) == "copy" and "bf16" not in (
            cfg.model.dtype, cfg.hardware.precision), reference // 2, "model.dtype=bf16"),
        # it is back on the device while it runs
        (layout.cuda, min(reference, sums.device - sums.score), "model.reference.offload=true"),
        (zero == 3 and whole_while_acting(cfg) and not in_update,
         size.get("weights gathered for rollouts", 0) - size.get("weights gathered in a pass", 0),
         "hardware.gather_for_generation=false")]
    if frozen is not None:
        options.append((frozen.update if in_update else frozen.score, frozen.device,
                        "hardware.frozen_states_mib=0"))
    useful = [(saved, text) for helps, saved, text in options if helps and saved > 0]
    return [text for _, text in sorted(useful, key=lambda option: -option[0])]
