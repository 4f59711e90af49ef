"""What may change when a run is resumed."""

from __future__ import annotations

from typing import Any, Literal

from ppocli.config.keys import free_mapping_of
from ppocli.config.resolved import flat
from ppocli.config.schema import TrainConfig

Kind = Literal["harmless", "accepted", "refused"]

# where the run lies and how it was started: not part of what it computes
_PLACE = frozenset({"run_name", "output_dir", "resume"})

_HARMLESS = frozenset({
    "ppo.total_episodes", "ppo.num_steps", "ppo.max_nonfinite", "hardware.num_threads",
    "hardware.timeout_seconds", "hardware.memory_check",
    "hardware.rdzv_endpoint", "hardware.node_rank",
    "reward.timeout", "reward.retries", "reward.overlap", "model.gradient_checkpointing",
    "ppo.micro_batch_size", "ppo.micro_batch_tokens", "model.reference.offload",
    "model.reference.device", "model.reference.shard", "hardware.gather_for_generation",
})
_HARMLESS_SECTIONS = ("eval.", "checkpoint.", "tracking.")

# saved state would not load, or would be read as something else
_REFUSED = frozenset({
    "seed", "model.path", "model.arch", "model.revision", "model.tokenizer_path", "model.dtype",
    "model.num_layers_unfrozen", "model.reference.kind", "model.reference.path",
    "model.value.kind", "model.value.path", "model.value.num_layers_unfrozen", "hardware.precision",
    "ppo.optimizer.name", "ppo.value_optimizer.name", "ppo.advantage", "ppo.n", "reward.scale",
    "ppo.kl_controller",
    "prompts.path", "prompts.name", "prompts.split", "prompts.column", "prompts.columns",
    "prompts.items", "prompts.limit", "prompts.first_words", "prompts.length_sampler",
    "prompts.template", "prompts.chat", "prompts.max_length", "prompts.truncation_side",
    "prompts.shuffle",
})


def classify_change(key: str) -> Kind:
    """What a change of ``key`` means to a run that goes on from a checkpoint.

    ``refused``: the saved weights, optimizer state, prompt cursor or random streams would no
    longer fit, or the best-so-far score would be compared with another task's. ``harmless``: the
    result of the steps already planned is the same. ``accepted``: the training goes on
    differently from here, as the user asked.
    """
    if key in _PLACE or key in _HARMLESS or key.startswith(_HARMLESS_SECTIONS):
        return "harmless"
    if key in _REFUSED or key.startswith("prompts.eval."):
        return "refused"
    return "accepted"


def config_differences(old: TrainConfig, new: TrainConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) for every key that differs, in the order of the schema.

    Where the run lies (``run_name``, ``output_dir``) and ``resume`` itself are left out.
    """
    before, after = flat(old), flat(new)
    return [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])
            if key not in _PLACE and before.get(key) != after.get(key)
            and not _is_empty_mapping(key, before, after)]


def _is_empty_mapping(key: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """An empty free mapping on one side only says that its keys, listed apart, came or went."""
    return free_mapping_of(key + ".x") == key and (key not in before or key not in after)
