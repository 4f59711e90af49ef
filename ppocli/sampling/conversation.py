"""Responses to contexts that grow: what a sampler does for episodes of several turns."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from ppocli.models import layout, trunk
from ppocli.sampling import decoding, samples
from ppocli.sampling.decoder import Decoder


class Conversation(Protocol):
    """N contexts that a model continues again and again."""

    def speak(self, rows: Sequence[int], fed: Sequence[Sequence[int]], limits: Sequence[int]
              ) -> samples.Generation:
        """Put ids behind some contexts and sample a response to each, which joins it.

        Args:
            rows: numbers of the contexts, rising.
            fed: ids for each; may be empty.
            limits: most tokens of each response, at least 1.
        """


class Rereading:
    """Reads each context anew in every turn, by any loop.

    Args:
        contexts: [N] ids to begin with.
        noise: [N, most tokens] as :func:`ppocli.sampling.decoding.decode`; those of a sample are
            used one after another, whichever turn a token is of.
    context: in which a turn is computed.
    """

    def __init__(self, decoder: Decoder, contexts: Sequence[Sequence[int]], noise: np.ndarray,
                 method: trunk.Decoding,
                 context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.decoder, self.noise, self.method, self.context = decoder, noise, method, context
        self.contexts, self.said = [list(ids) for ids in contexts], [0] * len(contexts)

    def speak(self, rows: Sequence[int], fed: Sequence[Sequence[int]], limits: Sequence[int]
              ) -> samples.Generation:
        """As :class:`Conversation`."""
        for row, ids in zip(rows, fed, strict=True):
            self.contexts[row] += ids
        tokens, mask = padded_left([self.contexts[row] for row in rows])
        noise = np.full((len(rows), max(limits)), 0.5)
        for i, row in enumerate(rows):
            own = self.noise[row, self.said[row]:][:limits[i]]
            noise[i, :len(own)] = own
        with self.context():
            out, = decoding.decode(self.decoder, tokens, mask, noise, limits=list(limits),
                                   method=self.method)
        for row, ids in zip(rows, out.ids, strict=True):
            self.contexts[row] += ids
            self.said[row] += len(ids)
        return out


def padded_left(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, Q] ids and mask, padded on the left."""
    mask = layout.padded([[True] * len(row) for row in rows], torch.bool, "left")
    return layout.padded(rows, side="left", fill=fill), mask
