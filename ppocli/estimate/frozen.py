"""What the frozen layers at the bottom make of a rollout: kept once for all passes over it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ppocli.config.algorithm import decoding_scores, kl_estimator
from ppocli.config.schema import TrainConfig, reference_kind
from ppocli.estimate.memory import FrozenStates, Layout
from ppocli.models.layer_stack import layer_stack
from ppocli.models.policy import Policy
from ppocli.models.trunk import has_encoder
from ppocli.models.value_function import ValueBranch
from ppocli.models.virtual_tokens import num_virtual_tokens


@dataclass(frozen=True, slots=True)
class _Sample:
    """Bytes of one sample as long as any may be."""

    padded: int
    """that decoding asks for room for"""
    kept: int


def scores_by_forward(cfg: TrainConfig, policy: Policy) -> bool:
    """Whether the policy's own layers run in scoring, after decoding."""
    own_values = policy.value_head is not None and not policy.values_while_decoding
    return (not decoding_scores(cfg) or kl_estimator(cfg.ppo) == "full"
            or (own_values and not policy.values_apart))


def _has_frozen_split(policy: Policy) -> bool:
    """As :func:`ppocli.models.fast.frozen_states.frozen_split` finds out by running the model."""
    lm = policy.lm
    if has_encoder(lm) or num_virtual_tokens(lm) or lm.get_input_embeddings().weight.requires_grad:
        return False
    try:
        layers: nn.ModuleList = layer_stack(lm)
    except ValueError:
        return False
    lowest = next((i for i, layer in enumerate(layers)
                   if any(p.requires_grad for p in layer.parameters())), 0)
    trunk = policy.value_trunk
    return lowest > 0 and not (isinstance(trunk, ValueBranch) and trunk.start < lowest)


def frozen_states(cfg: TrainConfig, policy: Policy, layout: Layout, prompt_tokens: int
                  ) -> FrozenStates:
    """What is kept of one rollout whose samples are all as long as the longest
    (:mod:`ppocli.tasks.ppo.rollout`, :mod:`ppocli.tasks.ppo.replay`)."""
    room, samples = cfg.hardware.frozen_states_mib * 2**20, cfg.ppo.num_rollouts
    alone = layout.ranks == 1 and cfg.hardware.zero_stage < 3
    if not room or not alone or not _has_frozen_split(policy):
        return FrozenStates()
    new, words = cfg.generation.max_new_tokens, policy.lm.get_input_embeddings().weight
    # layers add to the states that they are given, so those stay in the type of the embeddings
    each = policy.lm.get_output_embeddings().weight.shape[1] * words.element_size()
    sample = _Sample(4 * words.shape[-1] * (prompt_tokens + new), each * (prompt_tokens + new - 1))
    whole = samples * sample.kept
    fits = whole <= room
    decodes = (decoding_scores(cfg) and cfg.hardware.precision == "fp32"
               and samples * sample.padded <= room // 2)
    scores = scores_by_forward(cfg, policy) or reference_kind(cfg.model) == "shared"
    return FrozenStates(min(whole, room), score=fits and (decodes or scores),
                        padded=samples * sample.padded if decodes else 0)
