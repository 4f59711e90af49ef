"""Responses to contexts that grow: what a sampler does for episodes of several turns."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import numpy as np
import torch

from ppocli.data.data_set import padded_left
from ppocli.distributed.backend import to_device, to_host
from ppocli.models import transformers_internals
from ppocli.sampling.decode_state import CHECK_EVERY, SHRINK_AT, Decoder, DecodeState, LiveRows
from ppocli.sampling.samples import Generation, TokenRows
from ppocli.sampling.token_graph import Feeding

Conversation = Callable[[Sequence[int], TokenRows, Sequence[int]], Generation]
"""Samples responses to contexts that are continued again and again.

Args:
    rows: numbers of some contexts, rising.
    contexts: all that is in each of these now: what was there in its last turn, the response, and
        what is fed behind it, which may be nothing.
    limits: most tokens of each response, at least 1.
"""


@dataclass(slots=True, eq=False)
class IdleRows:
    """b rows whose turn is over: all of their tokens but the last have been fed."""

    rows: torch.Tensor
    """[b] their numbers"""
    seen: torch.Tensor
    """[b, past] bool, the columns of the cache that are theirs: not padding, nor what was fed
    behind the end of a turn while others went on"""
    cache: Any

    def with_others(self, others: Self) -> Self:
        """These rows, then others."""
        widths = [one.seen.shape[1] for one in (self, others)]
        most = max(widths)
        transformers_internals.append_rows(self.cache, others.cache, most)
        seen = torch.cat([torch.nn.functional.pad(one.seen, (most - width, 0))
                          for one, width in zip((self, others), widths, strict=True)])
        return type(self)(torch.cat([self.rows, others.rows]), seen, self.cache)


class KeptKeys:
    """Keeps keys and values over turns: what a model has read it doesn't read again. For models
    that allow gaps between a row's keys, and sampling that looks at nothing but the newest state.

    Args:
        contexts: [N] ids to begin with.
        noise: [N, most tokens] as :func:`ppocli.sampling.sampler.decode`; those of a sample are
            used one after another, whichever turn a token is of.
        context: in which a turn is computed.
    """

    def __init__(self, decoder: Decoder, contexts: TokenRows, noise: np.ndarray,
                 context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.context = context
        self.read = [0] * len(contexts)
        """tokens of each that were there when its last turn was over"""
        self.device = decoder.lm.base_model.device
        tokens, mask = padded_left(contexts)
        self.state = DecodeState(decoder, tokens, mask, noise, None)
        self.graphs = Feeding(self.state) if decoder.records else None
        self.parked: list[IdleRows] = []

    @torch.no_grad()
    def speak(self, rows: Sequence[int], contexts: TokenRows, limits: Sequence[int]) -> Generation:
        """As :data:`Conversation`; contexts that speak together once do so from then on, and one
        that misses a turn of the others' speaks no more."""
        live, state = self._begun(rows, contexts), self.state
        before = live.at.clone()
        state.finished[live.rows] = False
        state.limits[live.rows] = before + to_device(torch.tensor(limits), self.device)
        pieces: list[IdleRows] = []
        check_every = 1 if self.device.type == "cpu" else CHECK_EVERY
        passes, most, graphs = 0, max(limits), self.graphs
        with self.context():
            while True:
                if graphs is None:
                    state.token(live)
                else:
                    graphs.token(live, most - passes)
                passes += 1
                if passes % check_every and passes < most:
                    continue
                done, at = to_host(live.done, live.at)
                left = int((~done).sum())
                if left == 0 or left <= SHRINK_AT * len(live.rows):
                    if graphs is not None:
                        graphs.settle()
                    pieces.append(self._park(live, done.nonzero().squeeze(-1)))
                    if left == 0:
                        break
                    live.drop_done(done, at)
        self.parked.append(reduce(IdleRows.with_others, pieces))
        out = self._responses(torch.tensor(rows, device=self.device), before)
        for row, ids, count in zip(rows, contexts, out.mask.sum(1).tolist(), strict=True):
            self.read[row] = len(ids) + count
        return out

    def _begun(self, rows: Sequence[int], contexts: TokenRows) -> LiveRows:
        """Rows with what they are to read next."""
        state, group = self.state, next(
            (one for one in self.parked if rows[0] in one.rows.tolist()), None)
        if group is None:
            tokens, mask = padded_left(contexts)
            live = state.first_rows(range(len(rows)), tokens, mask)
            live.rows = to_device(torch.tensor(rows), self.device)
            return live
        self.parked.remove(group)
        place = {row: i for i, row in enumerate(group.rows.tolist())}
        index = to_device(torch.tensor([place[row] for row in rows]), self.device)
        group.cache.batch_select_indices(index)
        seen, live_rows = group.seen[index], group.rows[index]
        at = state.mask[live_rows].sum(1)
        tokens, mask = (to_device(one, self.device) for one in padded_left(
            [ids[self.read[row] - 1:] for row, ids in zip(rows, contexts, strict=True)]))
        attention = torch.cat([seen, mask], dim=1)
        youngest, padding = to_host(at.min(), (~attention).long().cumprod(1).sum(1))
        return LiveRows(
            rows=live_rows, at=at, youngest=int(youngest), inputs=tokens, attention=attention,
            positions=seen.sum(1, keepdim=True) + (mask.long().cumsum(1) - 1).clamp(min=0),
            done=torch.zeros_like(live_rows, dtype=torch.bool), padding=padding,
            cache=group.cache)

    def _park(self, live: LiveRows, ended: torch.Tensor) -> IdleRows:
        """The rows at these places, out of the live ones."""
        index = to_device(ended, self.device)
        width = transformers_internals.cached_tokens(live.cache)
        rows = live.rows[index]
        seen = (torch.ones(len(rows), width, dtype=torch.bool, device=self.device)
                if live.attention is None else live.attention[index, :width])
        behind = live.at[index] - self.state.mask[rows].sum(1)
        columns = torch.arange(width, device=self.device)
        return IdleRows(rows, seen & (columns[None, :] < width - behind[:, None]),
                      transformers_internals.taken_rows(live.cache, index))

    def _responses(self, rows: torch.Tensor, before: torch.Tensor) -> Generation:
        """The tokens of these rows since they had ``before`` of them."""
        state = self.state
        counts = state.mask[rows].sum(1) - before
        places = torch.arange(int(counts.max()), device=self.device)[None, :]
        mask = places < counts[:, None]
        columns = (before[:, None] + places).clamp(max=state.steps)
        finished, mask_, tokens, logprobs, values = to_host(state.finished[rows], mask, *(
            one[rows[:, None], columns] * mask
            for one in (state.tokens, state.logprobs, state.values)))
        return Generation(tokens, mask_, logprobs, values, finished)
