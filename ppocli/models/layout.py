"""Samples laid out for a forward pass: right-padded rows, or all rows packed into one.

A sample is a row of tokens and the places of those that the policy said, its actions: one response
behind a prompt, or several between what others said. A causal model needs no attention mask for
rows that are padded on the right, absolute positions are right by construction, and the result of a
row does not depend on the rows beside it. Where rows differ much in length they are packed into one
row without padding instead. For an encoder-decoder the prompt goes to the encoder, with a mask, and
the decoder reads its start token and the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ppocli.data.data_set import RowRecord, joined
from ppocli.distributed.backend import to_device

PACK_ABOVE = 0.03
"""share of padding from which on rows are packed, where the model allows it: moving tokens into a
grid for the attention and back is not worth less"""
MULTIPLE = 16
"""packed rows are filled up to a multiple of so many tokens: libraries prepare themselves for every
new shape of a matrix, and keep what they prepared"""
PACKING = "ppocli_packing"
"""attribute of :func:`placeholder_mask`"""


@dataclass(frozen=True, slots=True)
class Sequences(RowRecord):
    """B samples as tokens with action places; on the CPU, padded with zeros on the right. Made by
    samplers, read by :func:`lay_out` and by whoever wants to know what was said."""

    tokens: torch.Tensor
    """[B, T] int64: the prompt (or the decoder's start token) and all that follows, through the
    last action"""
    lengths: torch.Tensor
    """[B] int64, tokens of each row"""
    actions: torch.Tensor
    """[B, R] int64, places in ``tokens`` of what the policy said, in order; 0 where the mask is
    false. Place 0 is never an action: nothing predicts it."""
    mask: torch.Tensor
    """[B, R] bool, true through the token that ended the last response"""
    encoder_tokens: torch.Tensor | None = None
    """[B, S] int64 prompts for an encoder; None for a model without one"""
    encoder_mask: torch.Tensor | None = None
    """[B, S] bool"""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def action_tokens(self) -> torch.Tensor:
        """[B, R] int64 ids of the actions, 0 where the mask is false."""
        return self.tokens.gather(1, self.actions).masked_fill(~self.mask, 0)

    @property
    def spans(self) -> torch.Tensor:
        """[B] tokens that a pass over each sample reads, those of an encoder included."""
        return self.lengths if self.encoder_mask is None else self.mask.sum(1) + \
            self.encoder_mask.sum(1)

    @staticmethod
    def joined(parts: Sequence[Sequences]) -> Sequences:
        """The samples of several, padded to the widest."""
        return joined(parts)

    @staticmethod
    def of_places(tokens: Sequence[Any], places: Sequence[Any], *encoder: torch.Tensor
                  ) -> Sequences:
        """Rows of tokens, with the places in each of what the policy said.

        Args:
            tokens, places: B lists or arrays, at least one place each.
            encoder: ``encoder_tokens`` and ``encoder_mask``, for a model that has one.
        """
        lengths = torch.tensor([len(row) for row in places])
        return Sequences(padded(tokens), torch.tensor([len(row) for row in tokens]), padded(places),
                         torch.arange(int(lengths.max())) < lengths[:, None], *encoder)

    @staticmethod
    def of_responses(prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                     response_tokens: torch.Tensor, response_mask: torch.Tensor,
                     decoder_start: int | None = None) -> Sequences:
        """One response [B, R], padding on the right, behind each prompt [B, Q] of at least one
        token, padding on the left; ``decoder_start`` is the token that a decoder beside an encoder
        starts from, None for a causal model."""
        if decoder_start is not None:
            return Sequences._beside_encoder(prompt_tokens, prompt_mask, response_tokens,
                                             response_mask, decoder_start)
        lengths, before = response_mask.sum(1), prompt_mask.sum(1)
        places = before[:, None] + torch.arange(response_mask.shape[1])
        tokens, _ = right_padded(torch.cat([prompt_tokens, response_tokens], dim=1),
                                 torch.cat([prompt_mask, response_mask], dim=1))
        return Sequences(tokens, before + lengths, places * response_mask, response_mask)

    @staticmethod
    def _beside_encoder(prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                        response_tokens: torch.Tensor, response_mask: torch.Tensor,
                        decoder_start: int) -> Sequences:
        """As :meth:`of_responses`, of a decoder beside an encoder that reads the prompts."""
        start = torch.full((len(response_tokens), 1), decoder_start, dtype=torch.long)
        decoded = Sequences.of_responses(start, torch.ones_like(start, dtype=torch.bool),
                                         response_tokens, response_mask)
        tokens, mask = right_padded(prompt_tokens, prompt_mask)
        return replace(decoded, encoder_tokens=tokens, encoder_mask=mask)


def padded(rows: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """[b, T] of b lists or arrays, filled up with zeros on the right to the longest."""
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row).to(dtype) for row in rows], True)


class Packing(NamedTuple):
    """Where the N tokens of b packed rows, and a few to fill up, lie in a grid [b, W], rows padded
    on the right."""

    rows: int
    width: int
    to_grid: torch.Tensor
    """[b * W] int64 place among the N of each place in the grid"""
    grid_padding: torch.Tensor
    """[k] int64 places in the grid without a token"""
    to_pack: torch.Tensor
    """[N] int64 place in the grid of each token"""
    pack_padding: torch.Tensor
    """[j] int64 places among the N that fill up"""
    ends: torch.Tensor
    """[b + 2] int32: 0, the end of each row among the N, and N"""


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """b rows of T tokens that hold N response tokens; packed, one row of all their tokens. Made per
    micro-batch, read by the models."""

    tokens: torch.Tensor
    """[b, T] int64, prompt (or the decoder's start) then response without its last token, then
    padding"""
    predictors: torch.Tensor
    """[N] int64 index into b*T of the position whose output predicts each response token"""
    targets: torch.Tensor
    """[N] int64 response token ids, row by row"""
    encoder_tokens: torch.Tensor | None = None
    """[b, Q] int64 prompts, padded on the right; None for a model without an encoder"""
    encoder_mask: torch.Tensor | None = None
    """[b, Q] int64, 1 where there is a token"""
    positions: torch.Tensor | None = None
    """[1, T] int64 place of each token in its own row, where rows are packed"""
    packing: Packing | None = None
    frozen_states: torch.Tensor | None = None
    """[b, T, D] what enters the lowest layer that trains; the layers below it need not run"""

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on ``device``."""
        return self if self.tokens.device == device else self._moved(device)

    def _moved(self, device: torch.device) -> SequenceBatch:
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.packing is not None:
            values["packing"] = Packing(*self.packing[:2], *(
                to_device(index, device) for index in self.packing[2:]))
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = to_device(value, device)
        return SequenceBatch(**values)


def right_padded(tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, Q] tokens and mask with their padding on the right, less what no row needs."""
    lengths = mask.sum(dim=1)
    places = torch.arange(max(int(lengths.max()), 1), device=tokens.device)[None, :]
    columns = places + mask.long().argmax(dim=1)[:, None]
    inside = places < lengths[:, None]
    return tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1)).masked_fill(~inside, 0), inside


def lay_out(samples: Sequences, *, pack: bool = False) -> SequenceBatch:
    """The forward pass over b samples that predicts their actions; packed, if the models that read
    it can take that (``pack``) and it pays."""
    lengths = samples.lengths - 1  # the last token predicts nothing
    width = max(int(lengths.max()), 1)
    places = torch.arange(width)[None, :]
    inside, tokens = places < lengths[:, None], samples.tokens[:, :width]
    row, position = samples.mask.nonzero(as_tuple=True)
    action = samples.actions[row, position]
    targets, before = samples.tokens[row, action], action - 1
    if pack and samples.encoder_tokens is None and (
            1.0 - int(lengths.sum()) / inside.numel() > PACK_ABOVE):
        starts, packing = lengths.cumsum(0) - lengths, packing_of_lengths(lengths)
        fill = (0, len(packing.pack_padding))
        return SequenceBatch(
            torch.nn.functional.pad(tokens[inside], fill)[None], starts[row] + before, targets,
            positions=torch.nn.functional.pad(places.expand(len(tokens), -1)[inside], fill)[None],
            packing=packing)
    batch = SequenceBatch(tokens.masked_fill(~inside, 0), row * width + before, targets)
    return batch if samples.encoder_tokens is None else _with_encoder(batch, samples)


def _with_encoder(batch: SequenceBatch, samples: Any) -> SequenceBatch:
    """The batch with what an encoder reads of the samples."""
    width = max(int(samples.encoder_mask.sum(1).max()), 1)
    return replace(batch, encoder_tokens=samples.encoder_tokens[:, :width],
                   encoder_mask=samples.encoder_mask[:, :width].long())


# Packed rows --------------------------------------------------------------------------------------
#
# Every layer but attention works on single tokens and sees real ones only; attention spreads them
# out over a grid and packs its output again, unless there is a kernel for packed rows. A batch that
# is packed tells it so by the mask that it is handed: transformers passes a mask of four dimensions
# on to the attention of every layer as it is.

def packing_of_lengths(lengths: torch.Tensor) -> Packing:
    """The packing of rows of these many tokens, [b] int64, each at least 1."""
    width, rows = int(lengths.max()), len(lengths)
    inside = (torch.arange(width)[None, :] < lengths[:, None]).reshape(-1)
    places = inside.nonzero().squeeze(-1)
    count = len(places)
    total = count + -count % MULTIPLE
    ends = torch.tensor([0, *lengths.cumsum(0).tolist(), total], dtype=torch.int32)
    return Packing(rows, width, inside.cumsum(0) - 1, (~inside).nonzero().squeeze(-1),
                   torch.nn.functional.pad(places, (0, total - count)), torch.arange(count, total),
                   ends)


def placeholder_mask(device: torch.device, packing: Packing | None = None) -> torch.Tensor:
    """What a model is handed as ``attention_mask`` in place of one: for a packing, or for none at
    all. Without any, transformers asks the device in every pass whether rows are packed."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    setattr(mask, PACKING, packing)
    return mask


class _MoveRows(torch.autograd.Function):
    """[n, D] rows to [m, D]: row ``index[i]`` becomes row i, rows ``padding`` become zeros.
    ``back`` and ``back_padding`` are the opposite move, so that the gradient is gathered too, not
    scattered."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, padding: torch.Tensor,
                back: torch.Tensor, back_padding: torch.Tensor) -> torch.Tensor:
        ctx.move_back = back, back_padding, index, padding
        return rows.index_select(0, index).index_fill_(0, padding, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _MoveRows.apply(grads[0], *ctx.move_back), None, None, None, None


def to_grid(heads: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[1, H, N, D] of packed tokens to [b, H, W, D], zeros where there is no token."""
    _, count, _, depth = heads.shape
    flat = heads[0].transpose(0, 1).reshape(-1, count * depth)
    grid: torch.Tensor = _MoveRows.apply(flat, *packing[2:6])
    return grid.view(packing.rows, packing.width, count, depth).transpose(1, 2)


def to_pack(heads: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[b, W, H, D] back to [1, N, H, D] of packed tokens."""
    _, _, count, depth = heads.shape
    flat = heads.reshape(-1, count * depth)
    out: torch.Tensor = _MoveRows.apply(flat, packing.to_pack, packing.pack_padding,
                                        packing.to_grid, packing.grid_padding)
    return out.view(1, -1, count, depth)


# Passes over many samples -------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class RowBatch:
    """b of B samples, which go through a model together, and their N response tokens."""

    batch: SequenceBatch
    places: torch.Tensor
    """[N] index of each response token into [B, R] laid flat; on the CPU"""
    rows: list[int]
    """places of the b rows among the B samples"""
    lengths: list[int]
    """tokens of each of them"""


def in_groups(lengths: torch.Tensor, rows: int, tokens: int | None, part: slice = slice(None)
              ) -> list[torch.Tensor]:
    """Row numbers, the longest first, or a ``part`` of that order, in groups of at most ``rows``
    and so many ``tokens``, rows times the longest of them; one row may have more. Neighbours are of
    like length, so that little is padded, and the first group shows at once whether it fits."""
    order, groups, start = lengths.argsort(descending=True, stable=True)[part], [], 0
    while start < len(order):
        size = rows if tokens is None else max(
            1, min(rows, tokens // max(int(lengths[order[start]]), 1)))
        groups.append(order[start:start + size])
        start += size
    return groups


def lay_out_rows(samples: Sequences, size: int, device: torch.device, *, pack: bool,
                 tokens: int | None = None) -> list[RowBatch]:
    """All samples that have actions, at most ``size`` rows per pass, and ``tokens`` as of
    :func:`in_groups`; packed as of :func:`lay_out`."""
    batches = []
    for rows in in_groups(samples.spans, size, tokens):
        part = samples.rows(rows)
        if not bool(part.mask.any()):
            continue
        row, column = part.mask.nonzero(as_tuple=True)
        places = rows[row] * samples.mask.shape[1] + column
        batches.append(RowBatch(lay_out(part, pack=pack).to(device), places, rows.tolist(),
                              (part.lengths - 1).tolist()))
    return batches


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


def spread(passes: Sequence[RowBatch], shape: torch.Size, scores: Sequence[Any], name: str
           ) -> torch.Tensor:
    """A column [N] of each pass as [B, R] on the CPU; 0 where there is no token."""
    full = torch.zeros(shape)
    if passes:  # one copy from the device instead of one a pass
        places = torch.cat(list(map(attrgetter("places"), passes)))
        full.view(-1)[places] = torch.cat(list(map(attrgetter(name), scores))).cpu()
    return full


def known_states(kept: Sequence[torch.Tensor | None], chosen: list[int],
                 batch: SequenceBatch) -> torch.Tensor | None:
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
                batch: SequenceBatch, states: torch.Tensor) -> None:
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
