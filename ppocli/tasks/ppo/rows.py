"""Rollouts joined, and put in the order of their episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ppocli.data.prompt_set import PromptBatch
from ppocli.models.layout import Sequences, joined_right
from ppocli.tasks.ppo.records import Rollout

_TENSORS = ("logprobs", "ref_logprobs", "values", "kl", "valid", "finished")


def in_order(rollout: Rollout) -> Rollout:
    """The samples in the order of their episodes."""
    order = sorted(range(len(rollout)), key=lambda i: rollout.prompts.episodes[i])
    index = torch.tensor(order)

    def listed(values: list[Any]) -> list[Any]:
        return [values[i] for i in order]

    prompts = rollout.prompts
    return replace(
        rollout, prompts=PromptBatch(
            prompts.tokens[index], prompts.mask[index], listed(prompts.texts),
            {name: listed(values) for name, values in prompts.columns.items()},
            listed(prompts.indices), listed(prompts.episodes)),
        sequences=rollout.sequences.rows(index),
        **{name: getattr(rollout, name)[index] for name in _TENSORS},
        scores=listed(rollout.scores), responses=listed(rollout.responses),
        dense=None if rollout.dense is None else rollout.dense[index],
        frozen_states=listed(rollout.frozen_states),
        parts={name: listed(values) for name, values in rollout.parts.items()})


def _joined_left(tensors: list[torch.Tensor]) -> torch.Tensor:
    width = max(t.shape[1] for t in tensors)
    return torch.cat([torch.nn.functional.pad(t, (width - t.shape[1], 0)) for t in tensors])


def merge_rollouts(parts: list[Rollout]) -> Rollout:
    """One rollout of all chunks, padded to the widest."""
    if len(parts) == 1:
        return parts[0]

    def joined(lists: list[list[Any]]) -> list[Any]:
        return [x for one in lists for x in one]

    dense = None
    if any(p.dense is not None for p in parts):
        dense = joined_right([p.dense if p.dense is not None else torch.zeros(p.logprobs.shape)
                              for p in parts])
    prompts = PromptBatch(
        tokens=_joined_left([p.prompts.tokens for p in parts]),
        mask=_joined_left([p.prompts.mask for p in parts]),
        texts=joined([p.prompts.texts for p in parts]),
        columns={c: joined([p.prompts.columns[c] for p in parts])
                 for c in parts[0].prompts.columns},
        indices=joined([p.prompts.indices for p in parts]),
        episodes=joined([p.prompts.episodes for p in parts]))
    tensors: dict[str, Any] = {name: joined_right([getattr(p, name) for p in parts])
                               for name in _TENSORS}
    return Rollout(
        prompts=prompts, sequences=Sequences.joined([p.sequences for p in parts]), **tensors,
        scores=joined([p.scores for p in parts]), dense=dense,
        has_reference=parts[0].has_reference, responses=joined([p.responses for p in parts]),
        parts={n: joined([p.parts[n] for p in parts]) for n in parts[0].parts},
        frozen_states=joined([p.frozen_states for p in parts]))
