"""Before a run loads weights: does it fit?"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ppocli.config.keys import several
from ppocli.config.schema import TrainConfig
from ppocli.errors import OutOfMemoryError, PpocliError
from ppocli.estimate.estimate import Estimate, advice, estimate
from ppocli.estimate.frozen import frozen_states
from ppocli.estimate.memory import Layout, layout_of
from ppocli.estimate.outline import outline
from ppocli.estimate.parts import Part, parts_of
from ppocli.models.fast.gemm import PACKED_BYTES
from ppocli.models.head import CHUNK_BYTES, KEPT_BYTES
from ppocli.models.policy import Policy
from ppocli.models.trunk import has_encoder
from ppocli.parallel.host_memory import GIVEN, Room, room_here
from ppocli.text import first_line, format_memory

log = logging.getLogger("ppocli")

SURELY_TOO_MUCH = 1.15
"""share of what is there from which a run is refused: an estimate may err by this much"""
CLOSE = 0.9
"""share from which it is warned of"""
PLENTY = 0.5
"""a bound below this share settles it"""


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
        policy = outline(cfg, lm_config)
        parts, unknown = parts_of(cfg, policy, rewards=False)
        layout = layout_of(cfg, prompt_tokens=prompt_tokens, ranks=ranks,
                           ranks_on_host=ranks_on_host, cuda=cuda)
        least = min(x for x in (room.device if cuda else room.host, room.host, 2**62)
                    if x is not None)
        most = bound(cfg, policy, parts, layout, prompt_tokens) * ranks_on_host
        if not unknown and most < PLENTY * least:
            return
        found = estimate(cfg, policy, prompt_tokens=prompt_tokens, cuda=cuda, ranks=ranks,
                         ranks_on_host=ranks_on_host, rewards=False)
    except Exception as error:
        # a model that can't be outlined may train all the same, and its loader says more
        if warn:
            log.info("How much memory the run takes can't be told beforehand: %s",
                     error.what if isinstance(error, PpocliError) else first_line(error))
        return
    if warn and found.unknown:
        log.info("Of the memory of this run left out: %s", "; ".join(
            f"{one.name} ({one.why})" for one in found.unknown))
    judge(cfg, found, room, warn=warn)


def bound(cfg: TrainConfig, policy: Policy, parts: tuple[Part, ...], layout: Layout,
          prompt_tokens: int) -> int:
    """More bytes than a rank will take, found without running anything.

    A pass keeps, of each weight matrix, at most a few tensors as wide as its input and its output;
    attention two matrices of probabilities a head; the head a few chunks of logits and gradients,
    and all logits until the backward pass; decoding a copy of the weights.
    """
    own = sum(p.parameters for p in parts if p.sharded)
    frozen = sum(p.size for p in parts if not p.sharded)
    matrices = [p for p in policy.parameters() if p.dim() >= 2]
    widths = sum(sum(p.shape[-2:]) for p in matrices
                 if not any(p is m.weight for m in policy.modules()
                            if isinstance(m, nn.Embedding)))
    tokens = prompt_tokens + max([cfg.generation.max_new_tokens,
                                  *several(cfg.generation.eval.max_new_tokens)])
    heads = sum(int(getattr(m.config, "num_attention_heads", 1)
                    * getattr(m.config, "num_hidden_layers", 1)) * (3 if has_encoder(m) else 1)
                for m in (policy.lm, getattr(policy.value_trunk, "lm", None)) if m is not None)
    head = policy.lm.get_output_embeddings().weight
    below = frozen_states(cfg, policy, layout, prompt_tokens)
    rows = max(layout.rows, layout.decoded)
    passing = 4 * rows * tokens * (4 * widths + 2 * heads * tokens)
    logits = 4 * layout.rows * cfg.generation.max_new_tokens * head.shape[0]
    # 28: weights, gradients and state are 16; 12: a copy of what a checkpoint holds
    return (40 * own + frozen + passing + 4 * rows * head.shape[0] * 8 + 8 * CHUNK_BYTES
            + min(logits, KEPT_BYTES) + 12 * head.numel() + below.kept + below.padded
            + (0 if layout.cuda else min(4 * own, PACKED_BYTES)))


def judge(cfg: TrainConfig, found: Estimate, room: Room, *, warn: bool = True) -> None:
    """Refuse or warn.

    Raises:
        OutOfMemoryError: as :func:`check_memory`.
    """
    for needed, there, place in needs(found, room):
        share = needed / max(there, 1)
        if share <= CLOSE:
            continue
        text = (f"this run needs about {format_memory(needed)} of {place}, and "
                f"{format_memory(there)} are free")
        helps = ", ".join(advice(found, cfg)[:4])
        if share > SURELY_TOO_MUCH and cfg.hardware.memory_check == "error":
            raise OutOfMemoryError(
                f"Not enough memory: {text}.", where="told before loading, by ppocli estimate",
                fix=(f"in the order of what it saves: {helps}; or " if helps else "")
                + "hardware.memory_check=warn to try it all the same")
        if warn:
            log.warning("Memory is short: %s.%s", text,
                        f" What makes it less: {helps}." if helps else "")


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
