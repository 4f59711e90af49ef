"""Forward passes over sampled responses: what policy and reference say of each token; and what the
layers below the first one that trains make of a sample. That stays the same until the next rollout,
so they are run once for all passes over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ppocli.models import layer_stack, layout, trunk
from ppocli.models.head import HeadWeights, full_kl, token_logprobs
from ppocli.models.policy import Policy, Reference, ValueBranch, ValueModel


@dataclass(frozen=True, slots=True)
class RowBatch:
    """b of B samples, which go through a model together, and their N response tokens."""

    batch: layout.SequenceBatch
    places: torch.Tensor
    """[N] index of each response token into [B, R] laid flat; on the CPU"""
    rows: list[int]
    """places of the b rows among the B samples"""
    lengths: list[int]
    """tokens of each of them"""


@dataclass(frozen=True, slots=True)
class Scored:
    """What policy or reference say of the N tokens of a :class:`RowBatch`; None what wasn't asked
    for."""

    logprobs: torch.Tensor | None
    """[N]"""
    states: torch.Tensor | None
    """[N, D] final ones"""
    frozen_states: torch.Tensor | None
    """[b, T, D] what entered the layer where passes are split"""
    values: torch.Tensor | None = None
    """[N] of the policy"""
    full_kl: torch.Tensor | None = None
    """[N] from the policy to the reference, over the whole vocabulary"""


def longest_first(lengths: torch.Tensor) -> torch.Tensor:
    """Row numbers sorted by length: neighbours are of like length, so that little is padded, and
    the largest group of them shows at once whether it fits."""
    return torch.argsort(lengths, descending=True, stable=True)


def in_groups(order: torch.Tensor, lengths: torch.Tensor, rows: int, tokens: int | None
              ) -> list[torch.Tensor]:
    """Rows in the order of :func:`longest_first`, in groups.

    Args:
        rows: most of a group.
        tokens: most of a group, rows times the longest of them; one row may have more.
    """
    groups, start = [], 0
    while start < len(order):
        size = rows if tokens is None else max(
            1, min(rows, tokens // max(int(lengths[order[start]]), 1)))
        groups.append(order[start:start + size])
        start += size
    return groups


def lay_out_rows(samples: layout.Sequences, size: int, device: torch.device, *, pack: bool,
                 tokens: int | None = None) -> list[RowBatch]:
    """All samples that have actions, at most ``size`` rows per pass.

    Args:
        pack: as of :func:`lay_out`.
        tokens: of a pass, as of :func:`in_groups`.
    """
    batches = []
    for rows in in_groups(longest_first(samples.spans), samples.spans, size, tokens):
        part = samples.rows(rows)
        if not bool(part.mask.any()):
            continue
        row, column = part.mask.nonzero(as_tuple=True)
        places = rows[row] * samples.mask.shape[1] + column
        batches.append(RowBatch(layout.lay_out(part, pack=pack).to(device), places, rows.tolist(),
                              (part.lengths - 1).tolist()))
    return batches


def score_policy(policy: Policy, one: RowBatch, *, temperature: float, want_logprobs: bool,
                 want_values: bool, keep_hidden: bool, split: layer_stack.SplitPoint | None = None
                 ) -> Scored:
    """What is wanted of the policy's logprobs, values and final states, and no more.

    Args:
        split: the layer whose inputs are kept.
    """
    hidden, logprobs, shared = None, None, list[torch.Tensor]()
    with layer_stack.inputs_at(split, policy.lm) as frozen:
        if want_logprobs or keep_hidden or not isinstance(policy.value_trunk, ValueModel):
            hidden, shared = policy.trunk(one.batch)
    if want_logprobs and hidden is not None:
        logprobs = token_logprobs(hidden, HeadWeights.of(policy.lm), one.batch.targets,
                                  temperature=temperature, want_entropy=False).logprobs
    values = policy.values(one.batch, hidden, shared) if want_values else None
    return Scored(logprobs, hidden if keep_hidden else None, frozen[-1] if frozen else None, values)


def score_reference(reference: Reference, view: Any, one: RowBatch, head: HeadWeights, *,
                    temperature: float, hidden: torch.Tensor | None = None,
                    frozen_states: torch.Tensor | None = None,
                    split: layer_stack.SplitPoint | None = None) -> Scored:
    """The reference's logprobs and, given the policy's states, the KL over the whole vocabulary.

    Args:
        view: the reference as a model.
        head: of the policy, which the view may have put the reference's in the place of.
        hidden, frozen_states: of the policy's pass. Where the reference is split as the policy is,
            it starts from the latter.
        split: the layer whose inputs are kept where ``frozen_states`` are not there.
    """
    # which may be run on another device than the policy
    batch = one.batch.to(view.get_output_embeddings().weight.device)
    lm = view if frozen_states is None or reference.split is None else (
        reference.split.resumed(view, frozen_states))
    if split is None or frozen_states is not None:
        states = trunk.response_hidden(lm, batch)
    else:
        with layer_stack.inputs_at(split, view) as entering:
            states = trunk.response_hidden(lm, batch)
        frozen_states = entering[-1]
    ref_head = HeadWeights.of(view)
    logprobs = token_logprobs(states, ref_head, batch.targets, temperature=temperature,
                              want_entropy=False).logprobs
    kl = None if hidden is None else full_kl(hidden, head, states, ref_head,
                                             temperature=temperature)
    return Scored(logprobs, states, frozen_states, full_kl=kl)


def states_of_samples(passes: Sequence[RowBatch], states: Sequence[torch.Tensor | None], count: int,
                      most: int) -> list[torch.Tensor | None]:
    """[n, D] for each of ``count`` samples of [b, T, D] for each pass; None where there is nothing,
    or all of it takes more than ``most`` bytes."""
    by_sample: list[torch.Tensor | None] = [None] * count
    if most and sum(one.nbytes for one in states if one is not None) <= most:
        for one, one_states in zip(passes, states, strict=True):
            if one_states is not None:
                keep_states(by_sample, most, one.rows, one.lengths, one.batch, one_states)
    return by_sample


def states_by_sample(passes: Sequence[RowBatch], states: Sequence[Any], counts: torch.Tensor
                     ) -> list[torch.Tensor]:
    """[n, D] on the CPU for each of B samples, of [N, D] for each pass, in the places of its own.

    Args:
        counts: [B] tokens of each sample.
    """
    by_sample = [torch.empty(0)] * len(counts)
    for one, flat in zip(passes, states, strict=True):
        for i, row in zip(one.rows, flat.cpu().split(counts[one.rows].tolist()), strict=True):
            by_sample[i] = row.clone()  # whoever pickles a view sends the whole
    return by_sample


def spread(passes: Sequence[RowBatch], scores: Sequence[Scored], name: str, shape: torch.Size
           ) -> torch.Tensor:
    """A column [N] of each pass as [B, R] on the CPU; 0 where there is no token."""
    full = torch.zeros(shape)
    if passes:  # one copy from the device instead of one a pass
        places = torch.cat(list(map(attrgetter("places"), passes)))
        full.view(-1)[places] = torch.cat(list(map(attrgetter(name), scores))).cpu()
    return full


# Layers that do not train -------------------------------------------------------------------------

def frozen_split(policy: Policy) -> layer_stack.SplitPoint | None:
    """The split of a policy that trains its top layers only; None where all layers train, or a
    layer that must be run lies below."""
    if trunk.num_virtual_tokens(policy.lm):
        return None
    try:
        split = layer_stack.trained_split(policy.lm)
    except ValueError:  # layers that are no plain sequence
        return None
    branch = policy.value_trunk
    if isinstance(branch, ValueBranch) and split and branch.split.layer < split.layer:
        return None
    return split


def known_states(kept: Sequence[torch.Tensor | None], chosen: list[int],
                 batch: layout.SequenceBatch) -> torch.Tensor | None:
    """What enters the first layer that trains, of some samples of a rollout, laid out as their
    ``batch`` is, zeros filling up; None unless that of all of them is known.

    Args:
        kept: [n, D] of each sample of the rollout, without gradient; None where it isn't known.
    """
    rows = [row for i in chosen if (row := kept[i]) is not None]
    if len(rows) < len(chosen):
        return None
    if batch.packing is None:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    flat = torch.cat(rows)
    missing = batch.tokens.shape[1] - len(flat)
    return (torch.nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat)[None]


def keep_states(kept: list[torch.Tensor | None], most: int, chosen: list[int], lengths: list[int],
                batch: layout.SequenceBatch, states: torch.Tensor) -> None:
    """Keep what entered that layer for some samples, unless all would take more than ``most``
    bytes: what goes beyond is computed again each time.

    Args:
        lengths: tokens of each of the samples.
        states: [b, T, D] of their batch.
    """
    if sum(row.nbytes for row in (*kept, states) if row is not None) > most:
        return
    states = states.detach()
    rows = states if batch.packing is None else states[0, :sum(lengths)].split(lengths)
    for i, row, count in zip(chosen, rows, lengths, strict=True):
        kept[i] = row[:count] if kept[i] is None else kept[i]
