"""Rows of different lengths as one row without padding: every layer but attention works on single
tokens and sees real ones only; attention spreads them out over a grid and packs its output again.

A batch that is packed tells the attention so by the mask that it is handed: transformers passes a
mask of four dimensions on to the attention of every layer as it is.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch

from ppocli.parallel.backend import to_device

_NAME = "ppocli_packing"


MULTIPLE = 16
"""packed rows are filled up to a multiple of so many tokens: libraries prepare themselves for every
new shape of a matrix, and keep what they prepared"""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the N tokens of b packed rows, and a few to fill up, lie in a grid [b, W], rows padded
    on the right."""

    rows: int
    width: int
    to_grid: torch.Tensor
    """[b * W] int64 index of a token, N where there is none"""
    to_pack: torch.Tensor
    """[N] int64 index into b * W, which itself stands for one that only fills up"""

    def to(self, device: torch.device) -> Self:
        """The same on ``device``."""
        return type(self)(self.rows, self.width, to_device(self.to_grid, device),
                          to_device(self.to_pack, device))

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """[1, N] of one value for each token of the rows, one row after the other; zeros fill up.
        """
        return torch.nn.functional.pad(values, (0, len(self.to_pack) - len(values)))[None]

    def mask(self) -> torch.Tensor:
        """What a model is handed as ``attention_mask``; it means nothing but this packing."""
        return stand_in(self.to_pack.device, self)


def packing_of_lengths(lengths: torch.Tensor) -> Packing:
    """The packing of rows of these many tokens, [b] int64, each at least 1."""
    width, rows = int(lengths.max()), len(lengths)
    there = torch.arange(width)[None, :] < lengths[:, None]
    to_pack = there.reshape(-1).nonzero().squeeze(-1)
    count = len(to_pack)
    to_pack = torch.nn.functional.pad(to_pack, (0, -count % MULTIPLE), value=rows * width)
    to_grid = torch.full((rows * width,), len(to_pack))
    to_grid[to_pack[:count]] = torch.arange(count)
    return Packing(rows, width, to_grid, to_pack)


def stand_in(device: torch.device, packing: Packing | None = None) -> torch.Tensor:
    """What a model is handed as ``attention_mask`` in place of one: for a packing, or for none at
    all. Without any, transformers asks the device in every pass whether rows are packed."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    setattr(mask, _NAME, packing)
    return mask


def meant_by(mask: Any) -> tuple[Packing | None, Any]:
    """The packing that an attention mask stands for, and the mask unless it stands for something.
    """
    return getattr(mask, _NAME, None), None if hasattr(mask, _NAME) else mask


class _Moved(torch.autograd.Function):
    """[n, D] rows by an index [m], n for a row of zeros; ``back`` is the index of the opposite
    move, so that the gradient is gathered too and not scattered."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, back: torch.Tensor
                ) -> torch.Tensor:
        ctx.save_for_backward(index, back)
        return torch.nn.functional.pad(rows, (0, 0, 0, 1)).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        index, back = ctx.saved_tensors
        return _Moved.apply(grads[0], back, index), None, None


def spread(heads: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[1, H, N, D] of packed tokens to [b, H, W, D], zeros where there is no token."""
    _, count, _, depth = heads.shape
    flat = heads[0].transpose(0, 1).reshape(-1, count * depth)
    grid: torch.Tensor = _Moved.apply(flat, packing.to_grid, packing.to_pack)
    return grid.view(packing.rows, packing.width, count, depth).transpose(1, 2)


def gathered(heads: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[b, W, H, D] back to [1, N, H, D] of packed tokens."""
    _, _, count, depth = heads.shape
    flat = heads.reshape(-1, count * depth)
    out: torch.Tensor = _Moved.apply(flat, packing.to_pack, packing.to_grid)
    return out.view(1, -1, count, depth)
