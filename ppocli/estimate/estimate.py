"""The estimate of a run: :func:`estimate` for those who ask, and before a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.schema import GenerationConfig, TrainConfig
from ppocli.estimate.memory import (
    Disk,
    Layout,
    Line,
    Sums,
    add_up,
    disk_of,
    layout_of,
    lines_of,
)
from ppocli.estimate.parts import Part, own_functions, parts_of
from ppocli.estimate.trace import (
    checkpoint_layers,
    decoding_pass,
    training_pass,
    weightless,
)
from ppocli.models.policy import Policy
from ppocli.models.sampling import SAMPLING_KEYS, SamplingSpec


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
    unknown: tuple[str, ...]
    """rewards whose memory can't be known"""


def estimate(cfg: TrainConfig, policy: Policy, *, prompt_tokens: int, cuda: bool, ranks: int,
             ranks_on_host: int, parts: tuple[Part, ...] | None = None) -> Estimate:
    """What a run of ``cfg`` takes, at its fullest.

    Args:
        policy: the outline of ``cfg.model``; must not be used afterwards.
        prompt_tokens: of the longest prompt.
        cuda: whether GPUs compute.
        parts: of the run, if they are known already.

    Raises:
        InputError: a reward's model is missing.
        ConfigError: DeepSpeed's file can't be read.
    """
    parts = parts_of(cfg, policy) if parts is None else parts
    layout = layout_of(cfg, ranks=ranks, ranks_on_host=ranks_on_host, cuda=cuda)
    bf16 = cfg.hardware.precision == "bf16"
    new = cfg.generation.max_new_tokens
    head = policy.lm.get_output_embeddings().weight
    with weightless(policy):
        if cfg.model.gradient_checkpointing:
            checkpoint_layers(policy, bf16=bf16, cuda=cuda)
        training = training_pass(policy, rows=layout.rows, tokens=prompt_tokens + new,
                                 responses=new, bf16=bf16, cuda=cuda,
                                 temperature=cfg.generation.temperature,
                                 want_entropy=cfg.ppo.ent_coef > 0)
        policy.eval()
        decoding = decoding_pass(policy, _sampling(cfg.generation), rows=layout.decoded,
                                 prompts=prompt_tokens, bf16=bf16, cuda=cuda)
    # prompts of unlike lengths need a mask, a byte a pair of tokens
    beside = layout.decoded * prompt_tokens**2 if prompt_tokens > 1 else 0
    if bf16 and head.requires_grad and cfg.hardware.zero_stage < 3:
        beside += 2 * head.numel()  # decoding keeps a copy of the head's weight
    decoding = replace(decoding, working=decoding.working + beside)
    lines = lines_of(cfg, parts, layout, training, decoding, _zero_section(cfg))
    sums = add_up(lines, parts, layout, stage=cfg.hardware.zero_stage)
    return Estimate(parts, layout, lines, sums, disk_of(cfg, parts), prompt_tokens, new,
                    tuple(own_functions(cfg)))


def _sampling(cfg: GenerationConfig) -> SamplingSpec:
    """Of rollouts, with the longer of the responses of training and evaluation."""
    spec = SamplingSpec(stop_ids=(0,), **{name: getattr(cfg, name) for name in SAMPLING_KEYS})
    longest = max(cfg.max_new_tokens, cfg.eval.max_new_tokens or 0)
    return replace(spec, max_new_tokens=longest)


def _zero_section(cfg: TrainConfig) -> dict[str, Any]:
    if cfg.hardware.zero_stage == 0:
        return {}
    section = deepspeed_config(cfg).get("zero_optimization")
    return section if isinstance(section, dict) else {}


def advice(found: Estimate, cfg: TrainConfig) -> list[str]:
    """Settings that make the fullest moment smaller, what helps most first."""
    sizes = {line.name: line.device for line in found.lines}
    in_update = found.sums.update >= found.sums.rollout
    zero = cfg.hardware.zero_stage
    several = found.layout.ranks > 1
    options: list[tuple[int, str]] = []
    if in_update:
        pass_ = sizes.get("activations", 0)
        if found.layout.rows > 1:
            options.append((pass_ - pass_ // found.layout.rows, "ppo.micro_batch_size=1"))
        if not cfg.model.gradient_checkpointing:
            options.append((pass_ * 3 // 4, "model.gradient_checkpointing=true"))
    elif found.layout.decoded > 1:
        rows = max(found.layout.decoded // 4, 1)
        of_rows = (sizes.get("keys and values (KV cache)", 0)
                   + sizes.get("working memory of rollouts", 0))
        options.append((of_rows - of_rows * rows // found.layout.decoded,
                        f"ppo.chunk_size={rows}"))
    if several and zero < 3:
        shared = sizes.get("optimizer state", 0) + (sizes.get("gradients", 0) if zero < 2 else 0)
        options.append((shared, "hardware.zero_stage=2" if zero < 2 else "hardware.zero_stage=3"))
    if zero and found.layout.cuda and not cfg.hardware.offload_optimizer:
        options.append((sizes.get("optimizer state", 0), "hardware.offload_optimizer=true"))
    if cfg.model.num_layers_unfrozen < 0:
        options.append((sizes.get("optimizer state", 0) // 2, "model.num_layers_unfrozen=2"))
    reference = sizes.get("reference", 0)
    if reference and "bf16" not in (cfg.model.dtype, cfg.hardware.precision):
        options.append((reference // 2, "model.dtype=bf16"))
    options.sort(key=lambda option: -option[0])
    return [text for size, text in options if size > 0]
