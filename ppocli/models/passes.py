"""Forward passes over sampled responses: what policy and reference say of each token."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ppocli.models.fast.frozen_states import joined_rows, split_rows
from ppocli.models.head import HeadWeights, full_kl, token_logprobs
from ppocli.models.layer_stack import Border
from ppocli.models.layout import SequenceBatch, Sequences, lay_out
from ppocli.models.policy import Policy
from ppocli.models.reference import Reference
from ppocli.models.trunk import logit_scale, response_hidden

FIGURES = ("logprobs", "values", "ref_logprobs", "full_kl")


@dataclass(slots=True)
class ForwardPass:
    """b rows that go through a model together, and what has been found of their N tokens."""

    batch: SequenceBatch
    places: torch.Tensor
    """[N] index of each response token into [B, R] laid flat; on the CPU"""
    rows: list[int]
    """places of the b rows among the B samples"""
    lengths: list[int]
    """tokens of each of them"""
    found: dict[str, torch.Tensor] = field(default_factory=dict)
    """[N] each, on the device, by their names in ``FIGURES``"""
    hidden: torch.Tensor | None = None
    """[N, D] the policy's final states, for the KL over the whole vocabulary"""
    shared: list[torch.Tensor] = field(default_factory=list)
    """what the reference can take over from the policy's pass"""
    below: torch.Tensor | None = None
    """[b, T, D] what entered the lowest layer that trains, in whichever pass ran the layers below
    """

    def take_below(self, rows: list[torch.Tensor]) -> None:
        """Take over what entered that layer, [n, D] of each row, from the decoding pass."""
        self.below = joined_rows(rows, self.batch)
        self.shared = [self.below]


def rows_by_length(lengths: torch.Tensor, rows: int, tokens: int | None = None
                   ) -> list[torch.Tensor]:
    """Row numbers sorted by length, longest first, in groups: neighbours are of like length, so
    that little is padded, and the largest group shows at once whether it fits.

    Args:
        rows: most of a group.
        tokens: most of a group, rows times the longest of them; one row may have more.
    """
    return in_groups(torch.argsort(lengths, descending=True, stable=True), lengths, rows, tokens)


def in_groups(order: torch.Tensor, lengths: torch.Tensor, rows: int, tokens: int | None
              ) -> list[torch.Tensor]:
    """Rows that are sorted by length already, as :func:`rows_by_length` groups them."""
    groups, start = [], 0
    while start < len(order):
        size = rows
        if tokens is not None:
            size = max(1, min(rows, tokens // max(int(lengths[order[start]]), 1)))
        groups.append(order[start:start + size])
        start += size
    return groups


def lay_out_rows(samples: Sequences, size: int, device: torch.device, *, pack: bool,
                 tokens: int | None = None) -> list[ForwardPass]:
    """All samples that have actions, at most ``size`` rows per pass.

    Args:
        pack: as of :func:`lay_out`.
        tokens: of a pass, as of :func:`rows_by_length`.
    """
    passes = []
    for rows in rows_by_length(samples.spans, size, tokens):
        some = samples.rows(rows)
        if not bool(some.mask.any()):
            continue
        row, column = some.mask.nonzero(as_tuple=True)
        places = rows[row] * samples.mask.shape[1] + column
        passes.append(ForwardPass(lay_out(some, pack=pack).to(device), places, rows.tolist(),
                                  (some.lengths - 1).tolist()))
    return passes


def score_policy(policy: Policy, reference: Reference | None, one: ForwardPass, *,
                 temperature: float, want_logprobs: bool, want_values: bool, keep_hidden: bool,
                 border: Border | None = None) -> None:
    """Find what is wanted of the policy's logprobs, values and final states, and no more.

    Args:
        border: of the policy, to keep what enters it.
    """
    hidden, branched = None, list[torch.Tensor]()
    if want_logprobs or keep_hidden or not policy.values_apart:
        tap = nullcontext([]) if reference is None else reference.tap(policy.lm)
        with tap as one.shared, _at(border, policy.lm) as below:
            hidden, branched = policy.trunk(one.batch)
        one.below = below[-1] if below else one.below
    one.hidden = hidden if keep_hidden else None
    if want_logprobs and hidden is not None:
        one.found["logprobs"], _ = token_logprobs(
            hidden, policy.lm.get_output_embeddings(), one.batch.targets,
            temperature=temperature / logit_scale(policy.lm), want_entropy=False)
    values = policy.values(one.batch, hidden, branched) if want_values else None
    if values is not None:
        one.found["values"] = values


def _at(border: Border | None, lm: Any) -> AbstractContextManager[list[torch.Tensor]]:
    return nullcontext([]) if border is None else border.tap(lm)


def score_reference(reference: Reference, view: Any, one: ForwardPass, head: HeadWeights, *,
                    temperature: float, border: Border | None = None) -> None:
    """Find the reference's logprobs and, where the policy's states were kept, the KL over the whole
    vocabulary.

    Args:
        view: the reference as a model.
        head: of the policy, which the view may have put the reference's in the place of.
        border: of the policy where the view is its own model, to keep what enters it.
    """
    # which may be run on another device than the policy
    batch = one.batch.to(view.get_output_embeddings().weight.device)
    with reference.entered(view, one.shared), _at(border, view) as below:
        hidden = response_hidden(view, batch)
    one.shared = []
    if one.below is None and below:
        one.below = below[-1]
    one.found["ref_logprobs"], _ = token_logprobs(
        hidden, view.get_output_embeddings(), batch.targets,
        temperature=temperature / logit_scale(view), want_entropy=False)
    if one.hidden is not None:
        one.found["full_kl"] = full_kl(one.hidden, head, hidden, HeadWeights.of(view),
                                       temperature=temperature)
        one.hidden = None


def states_below(passes: list[ForwardPass], count: int, most: int) -> list[torch.Tensor | None]:
    """What entered the policy's lowest layer that trains, [n, D] of each of ``count`` samples; None
    where no pass ran the layers below it, or all of it takes more than ``most`` bytes."""
    found: list[torch.Tensor | None] = [None] * count
    states = [one.below for one in passes if one.below is not None]
    if sum(state.numel() * state.element_size() for state in states) > most:
        return found
    for one in passes:
        if one.below is not None:
            for i, row in zip(one.rows, split_rows(one.below, one.batch, one.lengths),
                              strict=True):
                found[i] = row
    return found


def collect(passes: list[ForwardPass], shape: torch.Size) -> dict[str, torch.Tensor]:
    """Every figure of all passes as [B, R] on the CPU, 0 where there is no token or no figure."""
    full = {name: torch.zeros(shape) for name in FIGURES}
    for name in FIGURES:
        parts = [(one.places, one.found[name]) for one in passes if name in one.found]
        if parts:  # one copy from the device instead of one a pass
            places, flats = zip(*parts, strict=True)
            full[name].view(-1)[torch.cat(places)] = torch.cat(flats).cpu()
    return full
