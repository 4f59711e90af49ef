"""The estimate of a run: :func:`estimate` for those who ask, and before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ppocli.config.algorithm import kl_estimator
from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.keys import several
from ppocli.config.schema import GenerationConfig, TrainConfig, reference_kind
from ppocli.config.sharding import whole_while_acting
from ppocli.estimate.frozen import frozen_states, scores_by_forward
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
from ppocli.estimate.parts import Part, Unknown, packed, parts_of
from ppocli.estimate.trace import (
    DecodingPass,
    Sizes,
    TrainingPass,
    checkpoint_layers,
    decoding_pass,
    scoring_pass,
    training_pass,
    weightless,
)
from ppocli.models.fast.attention import NAME
from ppocli.models.fast.gemm import packed_size
from ppocli.models.head import CHUNK_BYTES
from ppocli.models.loading.language_model import DTYPES
from ppocli.models.loading.model_config import first_line
from ppocli.models.policy import Policy
from ppocli.models.transformers_internals import restore_sdpa
from ppocli.models.trunk import has_encoder
from ppocli.sampling.token_choice import SAMPLING_KEYS, SamplingSpec

Found = TypeVar("Found")


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


def estimate(cfg: TrainConfig, policy: Policy, *, prompt_tokens: int, cuda: bool, ranks: int,
             ranks_on_host: int, rewards: bool = True) -> Estimate:
    """What a run of ``cfg`` takes, at its fullest.

    Args:
        policy: the outline of ``cfg``; must not be used afterwards.
        prompt_tokens: of the longest prompt.
        cuda: whether GPUs compute.
        rewards: whether those of the rewards count.

    Raises:
        ConfigError: DeepSpeed's file can't be read.
    """
    parts, unknown = parts_of(cfg, policy, rewards=rewards)
    layout = layout_of(cfg, prompt_tokens=prompt_tokens, ranks=ranks,
                       ranks_on_host=ranks_on_host, cuda=cuda)
    passes, missed = _passes(cfg, policy, layout, prompt_tokens)
    lines = lines_of(cfg, parts, layout, passes, _zero_section(cfg))
    sums = add_up(lines, parts, layout, stage=cfg.hardware.zero_stage)
    return Estimate(parts, layout, lines, sums, disk_of(cfg, parts), prompt_tokens,
                    cfg.generation.max_new_tokens, (*unknown, *missed), spared(cfg, lines))


def _passes(cfg: TrainConfig, policy: Policy, layout: Layout, prompt_tokens: int
            ) -> tuple[Passes, list[Unknown]]:
    """What passes take, and which could not be run."""
    bf16, new = cfg.hardware.precision == "bf16", cfg.generation.max_new_tokens
    sizes = Sizes(layout.rows, prompt_tokens, new, bf16, layout.cuda)
    temperature = cfg.generation.temperature
    head = policy.lm.get_output_embeddings().weight
    quantized = packed(cfg, policy.lm)
    largest = max((p.numel() for p in policy.parameters() if id(p) in quantized), default=0)
    frozen = frozen_states(cfg, policy, layout, prompt_tokens)
    hidden = _hidden(cfg, policy, layout, prompt_tokens, kept=frozen.score)
    heads = 4 * sum(p.numel() for module in (policy.lm.get_output_embeddings(), policy.value_head)
                    if module is not None for p in module.parameters())
    laid_out = _laid_out(cfg, policy, layout)
    if layout.cuda:
        restore_sdpa(policy, NAME)  # ppocli's own leaves rows that fill a grid to it there
    unknown: list[Unknown] = []

    def run(name: str, work: Callable[[], Found], nothing: Found) -> Found:
        try:
            return work()
        except Exception as error:  # a model's own code, on tensors that have no numbers
            unknown.append(Unknown(name, f"its model does not run without weights: "
                                         f"{first_line(error)}"))
            return nothing

    with weightless(policy):
        if cfg.model.gradient_checkpointing:
            checkpoint_layers(policy, bf16=bf16, cuda=layout.cuda)
        training = run("activations", lambda: training_pass(
            policy, sizes, temperature=temperature, want_entropy=cfg.ppo.ent_coef > 0),
            TrainingPass(0, 0, 0))
        policy.eval()
        copied = 2 * head.numel() if (  # decoding keeps a copy of the head's weight
            bf16 and head.requires_grad and cfg.hardware.zero_stage < 3 and not laid_out) else 0
        decoding = run("keys and values", lambda: decoding_pass(
            policy, _sampling(cfg.generation), replace(sizes, rows=layout.decoded)),
            DecodingPass(0, 0))
        scoring = run("working memory of scoring", lambda: scoring_pass(
            policy, replace(sizes, rows=layout.scored), temperature=temperature), 0)
    if quantized:  # a weight in 16 bits while its layer is run
        training = replace(training, forward=training.forward + 2 * largest,
                           backward=training.backward + 2 * largest)
        copied, scoring = copied + 2 * largest, scoring + 2 * largest
    if _onednn(cfg, layout) and head.requires_grad:  # it copies an operand of that gradient
        training = replace(training, backward=training.backward + min(
            CHUNK_BYTES, 4 * sizes.rows * new * head.shape[0]))
    decoding = replace(decoding, working=decoding.working + copied)
    return Passes(training, decoding, scoring, hidden, heads, laid_out, frozen), unknown


def _onednn(cfg: TrainConfig, layout: Layout) -> bool:
    """Whether linear layers may multiply through oneDNN (``auto`` measures that first)."""
    return not layout.cuda and cfg.hardware.gemm != "default"


def _laid_out(cfg: TrainConfig, policy: Policy, layout: Layout) -> int:
    """Bytes of the weights that decoding reads from a copy
    (:meth:`ppocli.parallel.backend.Backend.decoding`)."""
    if not _onednn(cfg, layout) or not whole_while_acting(cfg):
        return 0
    return packed_size(policy.lm, DTYPES[cfg.hardware.precision])


def _hidden(cfg: TrainConfig, policy: Policy, layout: Layout, prompt_tokens: int, *, kept: bool
            ) -> int:
    """Bytes of the policy's states that are kept, for all samples of a chunk, until the reference
    is run (:func:`ppocli.tasks.ppo.rollout.score_tokens`).

    Args:
        kept: whether what enters the lowest layer that trains is kept beyond that, and told apart.
    """
    head = policy.lm.get_output_embeddings().weight
    new, tokens = cfg.generation.max_new_tokens, 0
    if kl_estimator(cfg.ppo) == "full":
        tokens += new
    shares = reference_kind(cfg.model) == "shared" and cfg.model.num_layers_unfrozen >= 0
    if shares and not kept and not has_encoder(policy.lm) and scores_by_forward(cfg, policy):
        tokens += prompt_tokens + new - 1
    return layout.decoded * tokens * head.shape[1] * head.element_size()


def _sampling(cfg: GenerationConfig) -> SamplingSpec:
    """Of rollouts, with the longer of the responses of training and evaluation."""
    spec = SamplingSpec(stop_ids=(0,), **{name: getattr(cfg, name) for name in SAMPLING_KEYS})
    longest = max([cfg.max_new_tokens, *several(cfg.eval.max_new_tokens)])
    return replace(spec, max_new_tokens=longest)


def _zero_section(cfg: TrainConfig) -> dict[str, Any]:
    if cfg.hardware.zero_stage == 0:
        return {}
    section = deepspeed_config(cfg).get("zero_optimization")
    return section if isinstance(section, dict) else {}


def advice(found: Estimate, cfg: TrainConfig) -> list[str]:
    """Settings that make the fullest moment smaller, what helps most first."""
    sizes = {line.name: line.device for line in found.lines}
    in_update = found.sums.update >= max(found.sums.generate, found.sums.score)
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
                   + sizes.get("working memory of generation", 0))
        options.append((of_rows - of_rows * rows // found.layout.decoded,
                        f"ppo.chunk_size={rows}"))
    if several and zero < 3:
        shared = sizes.get("optimizer state", 0) + (sizes.get("gradients", 0) if zero < 2 else 0)
        options.append((shared, "hardware.zero_stage=2" if zero < 2 else "hardware.zero_stage=3"))
    if zero and found.layout.cuda and not cfg.hardware.offload_optimizer:
        options.append((sizes.get("optimizer state", 0), "hardware.offload_optimizer=true"))
    if cfg.model.num_layers_unfrozen < 0 and not cfg.model.peft:
        options.append((sizes.get("optimizer state", 0) // 2, "model.num_layers_unfrozen=2"))
    reference = sizes.get("reference", 0)
    if reference and reference_kind(cfg.model) == "copy" and "bf16" not in (
            cfg.model.dtype, cfg.hardware.precision):
        options.append((reference // 2, "model.dtype=bf16"))
    if reference and found.layout.cuda and found.sums.score < found.sums.device:
        # it is back on the device while it runs
        options.append((min(reference, found.sums.device - found.sums.score),
                        "model.reference.offload=true"))
    if zero == 3 and whole_while_acting(cfg) and not in_update:
        saved = (sizes.get("weights gathered for rollouts", 0)
                 - sizes.get("weights gathered in a pass", 0))
        options.append((saved, "hardware.gather_for_generation=false"))
    frozen = next((line for line in found.lines if line.name == FROZEN), None)
    if frozen is not None and (frozen.update if in_update else frozen.score):
        options.append((frozen.device, "hardware.frozen_states_mib=0"))
    options.sort(key=lambda option: -option[0])
    return [text for size, text in options if size > 0]
