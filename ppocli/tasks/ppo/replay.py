"""What the policy of this moment says of samples drawn before: one micro-batch of an update."""

from __future__ import annotations

from dataclasses import replace

import torch

from ppocli.models.fast.frozen_states import keep_states, known_states
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


def replay(session: Session, experience: Experience, rows: torch.Tensor, *, value_only: bool
           ) -> tuple[PolicyOutput, int]:
    """What the policy says of some rows of ``experience``, and how many tokens were computed.

    Frozen lower layers run only for samples of which nothing is remembered; what comes out of them
    is remembered then.
    """
    samples, places, split = experience.sequences.rows(rows), rows.tolist(), session.policy.split
    batch, kept = lay_out(samples, pack=session.packs).to(session.backend.device), None
    if split is not None and experience.frozen_states:
        kept = experience.frozen_states
        batch = replace(batch, frozen_states=known_states(kept, places, batch))
    remembers = kept is not None and batch.frozen_states is None
    with inputs_at(split if remembers else None, session.policy.lm) as found:
        out = session.trained.engine(batch, temperature=session.sampling.temperature,
                                     want_entropy=session.cfg.ppo.ent_coef > 0,
                                     value_only=value_only)
    if kept is not None and found:
        keep_states(kept, session.frozen_states_bytes, places, (samples.lengths - 1).tolist(),
                    batch, found[-1])
    return out, batch.tokens.numel()
