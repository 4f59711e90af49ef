"""What the policy of this moment says of samples drawn before: one micro-batch of an update."""

from __future__ import annotations

from dataclasses import replace

import torch

from ppocli.models.fast.frozen_states import FrozenStatesCache
from ppocli.models.layer_stack import inputs_at
from ppocli.models.layout import lay_out
from ppocli.models.policy import PolicyOutput
from ppocli.tasks.ppo.records import Experience
from ppocli.tasks.ppo.session import Session


def remembering(session: Session, experience: Experience) -> Experience:
    """The same, with room for what the layers below the lowest that trains make of each sample."""
    if session.frozen_states_bytes and not experience.frozen_states:
        return replace(experience, frozen_states=[None] * len(experience))
    return experience


def say_again(session: Session, experience: Experience, chosen: torch.Tensor, *, value_only: bool
              ) -> tuple[PolicyOutput, int]:
    """What the policy says of rows ``chosen`` of ``experience``, and how many tokens were computed.

    Frozen layers at the bottom run for the samples of which nothing is remembered; what they make
    of them is then.
    """
    prompts, mask = experience.prompt_mask[chosen], experience.response_mask[chosen]
    batch = lay_out(experience.prompt_tokens[chosen], prompts, experience.response_tokens[chosen],
                    mask, session.loaded.decoder_start, pack=session.packs)
    batch = batch.to(session.backend.device)
    rows, split, cache = chosen.tolist(), session.policy.split, None
    if split is not None and experience.frozen_states:
        cache = FrozenStatesCache(session.frozen_states_bytes, experience.frozen_states)
        batch = replace(batch, frozen_states=cache.of(rows, batch))
    remembers = cache is not None and batch.frozen_states is None
    with inputs_at(split if remembers else None, session.policy.lm) as found:
        out = session.engine(batch, temperature=session.sampling.temperature,
                             want_entropy=session.cfg.ppo.ent_coef > 0, value_only=value_only)
    if cache is not None and found:
        lengths = prompts.sum(1) + mask.sum(1) - 1
        cache.keep(rows, lengths.tolist(), batch, found[-1])
    return out, batch.tokens.numel()
