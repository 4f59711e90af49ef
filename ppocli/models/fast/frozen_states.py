"""The layers below the first one that trains: what they make of a sample stays the same until the
next rollout, so they are run once for all passes over it."""

import torch

from ppocli.models import layer_stack, layout
from ppocli.models.policy import Policy, ValueBranch
from ppocli.models.trunk import num_virtual_tokens


def frozen_split(policy: Policy) -> layer_stack.SplitPoint | None:
    """The split of a policy that trains its top layers only; None where all layers train, or a
    layer that must be run lies below."""
    if num_virtual_tokens(policy.lm):
        return None
    try:
        split = layer_stack.trained_split(policy.lm)
    except ValueError:  # layers that are no plain sequence
        return None
    trunk = policy.value_trunk
    branches = isinstance(trunk, ValueBranch) and split is not None and trunk.start < split.layer
    return None if branches else split


def split_rows(states: torch.Tensor, batch: layout.SequenceBatch, lengths: list[int]
               ) -> list[torch.Tensor]:
    """[b, T, D] states of a batch, packed or not, as [n, D] for each of its rows.

    Args:
        lengths: tokens of each row.
    """
    if batch.packing is not None:
        return list(states[0].split([*lengths, states.shape[1] - sum(lengths)]))[:len(lengths)]
    return [row[:count] for row, count in zip(states, lengths, strict=True)]


def joined_rows(rows: list[torch.Tensor], batch: layout.SequenceBatch) -> torch.Tensor:
    """The opposite of :func:`split_rows`; zeros fill up."""
    if batch.packing is None:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    flat = torch.cat(rows)
    missing = batch.tokens.shape[1] - len(flat)
    return (torch.nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat)[None]


def known_states(kept: list[torch.Tensor | None], chosen: list[int], batch: layout.SequenceBatch
                 ) -> torch.Tensor | None:
    """What enters the first layer that trains, of some samples of a rollout, laid out as their
    ``batch`` is; None unless that of all of them is known.

    Args:
        kept: [n, D] of each sample of the rollout, without gradient; None where it isn't known.
    """
    rows = [row for i in chosen if (row := kept[i]) is not None]
    return joined_rows(rows, batch) if len(rows) == len(chosen) else None


def keep_states(kept: list[torch.Tensor | None], most: int, chosen: list[int], lengths: list[int],
                batch: layout.SequenceBatch, states: torch.Tensor) -> None:
    """Keep what entered that layer for some samples, unless all would take more than ``most``
    bytes: what goes beyond is computed again each time."""
    if sum(row.nbytes for row in (*kept, states) if row is not None) > most:
        return
    for i, row in zip(chosen, split_rows(states.detach(), batch, lengths), strict=True):
        kept[i] = row if kept[i] is None else kept[i]
