"""The check before a run loads weights: do its memory and its files fit?"""

import logging
from pathlib import Path
from typing import Any

import torch

from ppocli.config import schema, tasks
from ppocli.config.text import first_line, format_bytes, format_memory
from ppocli.distributed.host_memory import Room, room_here
from ppocli.errors import DiskError, OutOfMemoryError, PpocliError
from ppocli.models.memory import Estimate, estimate, models_of
from ppocli.runs.atomic import folder_size, free_bytes

log = logging.getLogger("ppocli")

SHORT = 0.9
"""share of the available memory from which a run gets a warning"""


def check_memory(cfg: schema.TrainConfig, lm_config: Any, *, prompt_tokens: int,
                 device: torch.device, ranks: int, ranks_on_host: int, warn: bool = True,
                 new_tokens: int | None = None) -> None:
    """Compare what a run takes with what this rank's device, host and disk can still give. Models
    of rewards are loaded by then, so free memory has shrunk by them already.

    Args:
        lm_config: the configuration of ``model.path``.
        ranks: of the whole run.
        warn: whether this rank writes to the log.
        prompt_tokens, new_tokens: as of :func:`ppocli.models.memory.estimate`.

    Raises:
        OutOfMemoryError: it certainly doesn't fit and ``hardware.memory_check`` is ``error``.
        DiskError: the disk has no room for one checkpoint, or the model, likewise.
    """
    if cfg.hardware.memory_check == "off":
        return
    cuda = device.type != "cpu"
    room = room_here(cuda=cuda, device=device if cuda else None)
    try:
        needed = estimate(cfg, models_of(cfg, lm_config), prompt_tokens=prompt_tokens, cuda=cuda,
                          ranks=ranks, ranks_on_host=ranks_on_host,
                          new_tokens=new_tokens, device_bytes=room.whole_device)
    except Exception as error:  # such a model may train all the same, and its loader says more
        if warn:
            log.info("The memory of this run can't be estimated: %s",
                     error.what if isinstance(error, PpocliError) else first_line(error))
        return
    refuse_or_warn(cfg, needed, room, warn=warn)
    if warn:
        check_disk(cfg, needed)


def refuse_or_warn(cfg: schema.TrainConfig, needed: Estimate, room: Room, *, warn: bool = True
                   ) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone don't fit; warn where passes
    may not, which shrink when memory runs out (:mod:`ppocli.distributed.backend`).

    Raises:
        OutOfMemoryError: as :func:`check_memory`.
    """
    helps = ", ".join(advice(cfg))
    for size, certain, free, place in compared(needed, room):
        text = (f"this run needs about {format_memory(size)} of {place}, and "
                f"{format_memory(free)} are free")
        if certain > free and cfg.hardware.memory_check == "error":
            raise OutOfMemoryError(
                f"Not enough memory: {text}.", where="estimated before loading (ppocli estimate)",
                fix=f"{helps}; or hardware.memory_check=warn to try it all the same")
        if warn and size > SHORT * free:
            log.warning("Memory is short: %s. What makes it less: %s.", text, helps)


def compared(needed: Estimate, room: Room) -> list[tuple[int, int, int, str]]:
    """(bytes needed, certainly needed, free, of what) of the device and of the host, as far as the
    system tells what is free."""
    sizes = [(max(needed.rollout, needed.update), needed.certain, room.device,
              f"memory on {room.name}"),
             (max(needed.host, needed.loading), max(needed.certain_host, needed.loading), room.host,
              "this machine's memory")]
    return [(size, certain, free, place) for size, certain, free, place in sizes
            if free is not None]


def check_disk(cfg: schema.TrainConfig, needed: Estimate) -> None:
    """Refuse a run whose disk has no room for one checkpoint or its model; warn of one that can't
    keep all its checkpoints. Checkpoints that the run has already count as free.

    Raises:
        DiskError: there is no room, and ``hardware.memory_check`` is ``error``.
    """
    folder, every = Path(cfg.output_dir) / (cfg.run_name or ""), cfg.checkpoint
    if (free := free_bytes(folder)) is None:
        return
    free += folder_size(folder / "checkpoints")
    saves = every.every_steps is not None or every.every_minutes is not None
    text = (f"this run needs {format_bytes(needed.checkpoint)} for each checkpoint and "
            f"{format_bytes(needed.model)} for its model, {format_bytes(needed.disk)} at most, and "
            f"{format_bytes(free)} are free")
    if free < max(needed.model, needed.checkpoint * saves) and cfg.hardware.memory_check == "error":
        raise DiskError(f"Not enough disk space: {text}.", where=str(folder),
                        fix="free some space or choose another output_dir; or "
                        "hardware.memory_check=warn to try it all the same")
    if free < needed.disk:
        log.warning("Disk space is short: %s. What makes it less: checkpoint.keep_last=1, "
                    "checkpoint.keep_best=false.", text)


def advice(cfg: schema.TrainConfig) -> list[str]:
    """Settings that take less memory than those of ``cfg``, the cheapest in time first."""
    model, hardware = cfg.model, cfg.hardware
    settings = {
        f"{tasks.updates_section(cfg)}.micro_batch_size=1":
            tasks.updates_of(cfg).micro_batch_size != 1,
        "model.gradient_checkpointing=true": not model.gradient_checkpointing,
        f"hardware.zero_stage={max(hardware.zero_stage + 1, 2)}":
            hardware.num_processes > 1 and hardware.zero_stage < 3,
        "hardware.offload_optimizer=true": hardware.zero_stage > 0 < hardware.num_processes
            and not hardware.offload_optimizer,
        "model.num_layers_unfrozen=2": not model.peft and model.num_layers_unfrozen < 0,
        "model.peft.type=lora": not model.peft}
    return [key for key, helps in settings.items() if helps]
