"""Rows of rollouts and of their prompts: taken, put in order, joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ppocli.data.batch import PromptBatch
from ppocli.tasks.ppo.records import Rollout


def take_rows(prompts: PromptBatch, count: int) -> PromptBatch:
    """The first ``count`` rows, padding and all, which may be none."""
    return PromptBatch(
        tokens=prompts.tokens[:count], mask=prompts.mask[:count], texts=prompts.texts[:count],
        columns={name: values[:count] for name, values in prompts.columns.items()},
        indices=prompts.indices[:count], episodes=prompts.episodes[:count])


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
        **{name: getattr(rollout, name)[index] for name in (
            "response_tokens", "response_mask", "logprobs", "ref_logprobs", "values", "kl",
            "valid", "finished")},
        scores=listed(rollout.scores), responses=listed(rollout.responses),
        dense=None if rollout.dense is None else rollout.dense[index],
        frozen_states=listed(rollout.frozen_states),
        parts={name: listed(values) for name, values in rollout.parts.items()})


def take_prompts(prompts: PromptBatch, rows: Sequence[int]) -> PromptBatch:
    """The given rows, with the padding that none of them needs cut off."""
    index = torch.tensor(list(rows))
    mask = prompts.mask[index]
    skip = prompts.tokens.shape[1] - max(int(mask.sum(1).max()), 1)
    return PromptBatch(
        tokens=prompts.tokens[index, skip:], mask=mask[:, skip:],
        texts=[prompts.texts[i] for i in rows],
        columns={name: [values[i] for i in rows] for name, values in prompts.columns.items()},
        indices=[prompts.indices[i] for i in rows], episodes=[prompts.episodes[i] for i in rows])


def _pad(tensors: list[torch.Tensor], *, left: bool) -> torch.Tensor:
    width = max(t.shape[1] for t in tensors)
    side = [(width - t.shape[1], 0) if left else (0, width - t.shape[1]) for t in tensors]
    return torch.cat([torch.nn.functional.pad(t, s) for t, s in zip(tensors, side, strict=True)])


def merge_rollouts(parts: list[Rollout]) -> Rollout:
    """One rollout of all chunks, padded to the widest."""
    if len(parts) == 1:
        return parts[0]

    def right(name: str) -> torch.Tensor:
        return _pad([getattr(p, name) for p in parts], left=False)

    def joined(lists: list[list[Any]]) -> list[Any]:
        return [x for one in lists for x in one]

    dense = None
    if any(p.dense is not None for p in parts):
        dense = _pad([p.dense if p.dense is not None else torch.zeros(p.response_mask.shape)
                      for p in parts], left=False)
    prompts = PromptBatch(
        tokens=_pad([p.prompts.tokens for p in parts], left=True),
        mask=_pad([p.prompts.mask for p in parts], left=True),
        texts=joined([p.prompts.texts for p in parts]),
        columns={c: joined([p.prompts.columns[c] for p in parts])
                 for c in parts[0].prompts.columns},
        indices=joined([p.prompts.indices for p in parts]),
        episodes=joined([p.prompts.episodes for p in parts]))
    return Rollout(
        prompts=prompts, response_tokens=right("response_tokens"),
        response_mask=right("response_mask"), logprobs=right("logprobs"),
        ref_logprobs=right("ref_logprobs"), values=right("values"), kl=right("kl"),
        scores=joined([p.scores for p in parts]), dense=dense,
        valid=torch.cat([p.valid for p in parts]), finished=torch.cat([p.finished for p in parts]),
        has_reference=parts[0].has_reference, responses=joined([p.responses for p in parts]),
        parts={n: joined([p.parts[n] for p in parts]) for n in parts[0].parts},
        frozen_states=joined([p.frozen_states for p in parts]))
