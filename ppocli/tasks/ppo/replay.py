"""What the policy of this moment says of samples drawn before: one micro-batch of an update."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ppocli.models.fast.frozen_states import BottomStates
from ppocli.models.layout import lay_out
from ppocli.models.policy import PolicyOutput
from ppocli.tasks.ppo.records import Experience
from ppocli.tasks.ppo.session import Session


def remembering(session: Session, experience: Experience) -> Experience:
    """The same, with room for what the layers below the lowest that trains make of each sample."""
    if session.below_bytes and not experience.below:
        return replace(experience, below=[None] * len(experience))
    return experience


def replay(session: Session, experience: Experience, rows: torch.Tensor, *, value_only: bool
           ) -> tuple[PolicyOutput, int]:
    """What the policy says of some rows of ``experience``, and how many tokens were computed.

    Frozen layers at the bottom run only for samples of which nothing is remembered; what comes out
    of them is remembered then.
    """
    samples, places, border = experience.sequences.rows(rows), rows.tolist(), session.policy.border
    batch = lay_out(samples, pack=session.packs).to(session.backend.device)
    below: BottomStates | None = None
    tap: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
    if border is not None and experience.below:
        below = BottomStates(border, session.below_bytes, experience.below)
        batch = replace(batch, below=below.of(places, batch))
        if batch.below is None:
            tap = border.tap(session.policy.lm)
    with tap as found:
        out = session.trained.engine(batch, temperature=session.sampling.temperature,
                                     want_entropy=session.cfg.ppo.ent_coef > 0,
                                     value_only=value_only)
    if below is not None and found:
        below.keep(places, (samples.lengths - 1).tolist(), batch, found[-1])
    return out, batch.tokens.numel()
