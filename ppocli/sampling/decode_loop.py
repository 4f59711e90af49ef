"""Decoding token by token with kept keys and values: prompts to sampled responses, with logprobs
and values from the same pass. Rows are dropped when they end, and others take their places."""

from collections.abc import Iterator
from typing import Any

import torch

from ppocli.models import transformers_internals
from ppocli.parallel.backend import to_host
from ppocli.sampling.decoder import Decoder
from ppocli.sampling.live_rows import LiveRows, Stepped
from ppocli.sampling.samples import Generation
from ppocli.sampling.token_graph import Feeding

SHRINK_AT = 0.75
"""rows that have ended are dropped, and others take their places, once at most this share of all is
still alive"""
CHECK_EVERY = 16
"""tokens after which a device other than a CPU is asked which rows have ended, since it has to be
waited for; what it has drawn behind their ends is left out"""


@torch.no_grad()
def decode_in_steps(decoder: Decoder, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                    uniform: Any, *, limits: Any, at_once: int, chunk: int) -> Iterator[Generation]:
    """As :func:`ppocli.sampling.decoding.decode`, by our own loop.

    Rows that have ended are dropped, and the next prompts take their places where the model can do
    that; else they wait for the last of them.
    """
    lm, count = decoder.lm, len(prompt_tokens)
    drawn = Stepped(decoder, prompt_tokens, prompt_mask, uniform, limits)
    # keys and values of rows under way are moved to the right then, behind padding: not with an
    # encoder, nor where a layer keeps something else
    refills = (at_once < count and decoder.all_alive is int and decoder.start is None
               and transformers_internals.caches_all_keys(lm))
    check_every = 1 if lm.base_model.device.type == "cpu" else CHECK_EVERY
    feeding = Feeding(drawn)
    live: LiveRows | None = None
    taken = passes = handed = 0

    while live is not None or taken < count:
        if live is None or (refills and taken < count and len(live) < at_once):
            feeding.settle()
            free = at_once if live is None else at_once - len(live)
            fresh = drawn.first_rows(range(taken, min(taken + free, count)), prompt_tokens,
                                     prompt_mask)
            taken += len(fresh)
            drawn.token(fresh)
            if live is None:
                live = fresh
            else:
                live.take_in(fresh)
        else:
            feeding.token(live, drawn.steps - live.youngest)
        passes += 1
        if passes % check_every and live.youngest < drawn.steps:
            continue
        rows, at, done = to_host(live.rows, live.at, live.done)
        remaining = int((~done).sum())
        if decoder.all_alive(remaining) == 0:
            live, ended = None, taken
            feeding.settle()
        else:
            ended = int(rows[~done].min()) if count > chunk and remaining else 0
            if remaining <= SHRINK_AT * len(live) and len(live) > 1:
                feeding.settle()
                live.drop_done(done, at)
        while handed < count and min(handed + chunk, count) <= ended:
            end = min(handed + chunk, count)
            feeding.settle()  # whoever asks leaves the autocast context meanwhile
            yield drawn.found(slice(handed, end))
            handed = end
