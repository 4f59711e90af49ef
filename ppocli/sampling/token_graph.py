"""Decoding on a GPU without telling it each kernel anew: what feeding one token takes is recorded
once as a CUDA graph, and replayed for every token after, as long as the same rows go on.

A small model's layers are done before Python has named the next ones, so that a GPU that is told
them one by one idles most of the time. What is recorded reads and writes the same memory each time:
keys and values have room for all tokens to come, attention looks at the whole room under a mask,
and which column is next is a number on the device.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ppocli.config.text import first_line
from ppocli.distributed.ranks import is_out_of_memory
from ppocli.models import transformers_internals
from ppocli.models.kernels import takes_packed

if TYPE_CHECKING:
    from ppocli.sampling.decode_state import DecodeState, LiveRows

log = logging.getLogger("ppocli")

DEVICES = ("cuda",)
"""where it can be done"""
_recordable: dict[type, bool] = {}
"""kinds of models that have been tried"""


class Feeding:
    """Feeds live rows token after token, by a graph where that is possible.

    The graphs of one decoding share their memory: one is kept until the next one is recorded.
    """

    def __init__(self, state: DecodeState) -> None:
        self.state, self.enabled = state, can_record(state)
        self.graph: TokenGraph | None = None
        self.newest: Any = None

    def token(self, live: LiveRows, most: int) -> None:
        """As :meth:`DecodeState.token`; the same rows each time until :meth:`settle`.

        Args:
            most: tokens that will be fed to these rows, this one included.
        """
        if (not self.enabled or live.inputs.shape[1] > 1 or not live.cache.get_seq_length()
                or not _recordable.get(type(self.state.decoder.lm), True)):
            self.settle()
            self.state.token(live)
            return
        if self.graph is not None and self.graph.live is not live:  # whose feeding was broken off
            self.settle()
        self.graph = self.graph or TokenGraph(self.state, live, most)
        self.graph.token(self.newest)

    def settle(self) -> None:
        """Before rows join or leave, or autocast's context ends."""
        if self.graph is not None:
            self.graph.release()
            self.newest = self.graph.recorded or self.newest
        self.graph = None


def can_record(state: DecodeState) -> bool:
    """Whether the tokens of these responses can be fed so: nothing on the host may have a say in
    them, and the model must do with a mask of attention that is made for it."""
    decoder, lm = state.decoder, state.decoder.lm
    if (not decoder.records or lm.base_model.device.type not in DEVICES
            or decoder.spec.stop_sequences or decoder.all_alive is not int):
        return False
    packs = getattr(lm, "ppocli_packs", None)
    return takes_packed(lm) if packs is None else packs


class TokenGraph:
    """The feeding of live rows, of which none joins or leaves until :meth:`release`. Rows and graph
    share their memory.

    Replaying must not outlast the autocast context that it was recorded in: weights that were
    rounded for it are freed then.
    """

    def __init__(self, state: DecodeState, live: LiveRows, most: int) -> None:
        width = transformers_internals.cached_tokens(live.cache)
        most += width
        most += -most % 8  # rows of matrices that kernels for tensor cores can read
        self.state, self.live, self.fed = state, live, 0
        self.column = transformers_internals.hold_room(live.cache, most)
        self.seen = torch.zeros(len(live.rows), most, dtype=torch.bool, device=live.rows.device)
        self.seen[:, :width] = True if live.attention is None else live.attention[:, :width]
        self.width = width
        live.positions = live.positions[:, -1:].clone()
        live.inputs, live.at, live.done = live.inputs.clone(), live.at.clone(), live.done.clone()
        self.fixed = replace(live, attention=self.seen[:, None, None, :])
        self.recorded: Any = None
        self.tells_each = False
        """whether kernels are told one by one after all"""

    def token(self, before: Any) -> None:
        """As :meth:`DecodeState.token`. The first is fed kernel by kernel, so that libraries
        prepare what they can't while it is recorded.

        Args:
            before: the recording whose memory this one's takes, or None.
        """
        self.state.decoder.poll()
        if self.fed == 0:
            self._first()
        else:
            if self.recorded is None and not self.tells_each:
                self._record(before)
            (self._feed if self.recorded is None else self.recorded.replay)()
        self.fed += 1
        self.live.youngest += 1
        if self.state.decoder.watch is not None:
            self.state.decoder.watch(self.state.tokens, self.state.mask)

    def release(self) -> None:
        """Make the rows such that others can join them, and some leave."""
        transformers_internals.let_go_of_room(self.live.cache, self.fed)
        if self.live.attention is not None:
            seen = self.seen[:, :self.width + self.fed]
            self.live.attention = torch.nn.functional.pad(seen, (0, 1), value=True)

    def _feed(self) -> None:
        """One token of each row, all of it on the device and in the same memory each time. What is
        the input of the next token changes last: one that fails can be fed again."""
        rows = self.fixed
        self.seen.index_fill_(1, self.column, True)
        chosen, done = self.state.draw(rows)
        rows.inputs.copy_(chosen[:, None])
        rows.done.copy_(done)
        rows.positions += (~done)[:, None]
        rows.at += 1
        self.column += 1

    def _first(self) -> None:
        """Feed a token; of a kind of model that was not tried before, find out whether it waits for
        the device, which can't be recorded. A recording that fails would leave torch's random
        numbers and its memory in a state that no later work can be done in."""
        kind = type(self.state.decoder.lm)
        if kind in _recordable:
            self._feed()
            return
        try:
            with waits_refused():
                self._feed()
            _recordable[kind] = True
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._refuse(error)
            self._feed()

    def _record(self, before: Any) -> None:
        try:
            self.recorded = recorded(self._feed, before)
        except RuntimeError as error:
            self.tells_each = True
            if is_out_of_memory(error):  # told one by one, kernels can do with what others left
                log.debug("no memory to record a CUDA graph in: %s", first_line(error))
            else:
                self._refuse(error)

    def _refuse(self, error: RuntimeError) -> None:
        _recordable[type(self.state.decoder.lm)], self.tells_each = False, True
        log.warning("The model's pass can't be recorded as a CUDA graph, so tokens are fed kernel "
                    "by kernel (%s).", first_line(error))


@contextmanager
def waits_refused() -> Iterator[None]:
    """Work in which waiting for the device is a RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@cache
def _stream(device: int) -> Any:
    """Where a device's graphs are recorded: cuBLAS keeps memory of its own for every stream."""
    return torch.cuda.Stream(device)


def recorded(work: Callable[[], None], before: Any) -> Any:
    """A CUDA graph whose ``replay()`` does on the device all that ``work`` would have done now.

    Args:
        before: another one, not to be replayed any more, whose memory this one takes. Without one
            what torch holds in reserve is given back first: while it records it can't be, and the
            memory of graphs that are gone would never be.

    Raises:
        RuntimeError: ``work`` waits for the device, say; or there is no memory for it.
    """
    if before is None:
        torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # a reward may wait for something in another thread meanwhile
        graph.capture_begin(pool=None if before is None else before.pool(),
                            capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
