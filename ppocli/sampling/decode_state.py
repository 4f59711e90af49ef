"""One token of our decode loop (:func:`ppocli.sampling.sampler.decode`), with cached keys and
values: the model and how it samples (``Decoder``), the responses so far (``DecodeState``), the rows
fed next (``LiveRows``). Rows are dropped when they end, others take their places."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from ppocli.distributed.backend import to_device, to_host
from ppocli.models import head, layout, transformers_internals, trunk
from ppocli.models.trunk import SplitPoint
from ppocli.sampling import samples

SHRINK_AT = 0.75
"""rows that have ended are dropped, and others take their places, once at most this share of all is
still alive"""
CHECK_EVERY = 16
"""tokens after which a device other than a CPU is asked which rows have ended, since it has to be
waited for; what it has drawn behind their ends is left out"""
CONTEXT = 4
"""tokens in front of those that are looked at, as much as a tokenizer lets their text depend on"""
Watch = Callable[[torch.Tensor, torch.Tensor], None]
"""is shown tokens and mask [B, R + 1] of the responses so far, on the model's device"""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that continues prompts, and how. Made by samplers, read by decode loops."""

    lm: Any
    """a transformers causal LM or encoder-decoder in eval mode"""
    spec: samples.SamplingSpec
    tokenizer: Any = None
    """finds stop sequences; not needed without any"""
    start: int | None = None
    """the token that a decoder beside an encoder starts from; None for a causal LM"""
    value_head: Any = None
    """adds the value of the state before each token"""
    split: SplitPoint | None = None
    """the layer whose inputs are kept (:attr:`Generation.frozen_states`)"""
    poll: Callable[[], None] = lambda: None
    """called before every token; may raise to stop"""
    watch: Watch | None = None
    """shown all tokens so far after every token"""
    records: bool = False
    """whether a GPU may be given what feeds a token as a recorded graph"""
    all_alive: Callable[[int], int] = int
    """from the number of rows that are still alive here to the most that are anywhere; decoding
    goes on until none is. For ranks whose forward passes must be equally many, which all decode the
    same number of rows at once and never refill"""


@dataclass(slots=True)
class LiveRows:
    """b rows of a batch of N. Those that end are dropped, so they stop costing."""

    rows: torch.Tensor
    """[b] their places in the whole batch"""
    at: torch.Tensor
    """[b] response tokens that are there; counted on after the end"""
    youngest: int
    """the least of ``at``, where the device need not be asked for it"""
    inputs: torch.Tensor
    """[b, q] tokens to feed next"""
    attention: torch.Tensor | None
    """[b, past + q] bool, or [b, 1, 1, S] over a cache's whole room; None without padding"""
    positions: torch.Tensor
    """[b, q]"""
    done: torch.Tensor
    """[b] bool"""
    padding: torch.Tensor
    """[b] columns on the left that a row doesn't look at; on the CPU"""
    cache: Any
    """transformers' own"""
    encoded: torch.Tensor | None = None
    """[b, Q, D] what an encoder made of the prompts"""
    encoder_mask: torch.Tensor | None = None
    """[b, Q]"""

    def drop_done(self, done: torch.Tensor, at: torch.Tensor) -> None:
        """Go on without the rows that have ended, by ``done`` and ``at`` [b] on the CPU; one of
        them stays where all have, since others may go on and a pass needs a row."""
        keep = (~done).nonzero().squeeze(-1)
        keep = keep if len(keep) else torch.zeros(1, dtype=torch.long)
        self.padding, self.youngest = self.padding[keep], int(at[keep].min())
        keep = to_device(keep, self.rows.device)
        self.cache.batch_select_indices(keep)
        for name in ("rows", "at", "inputs", "positions", "done", "attention", "encoded",
                     "encoder_mask"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value[keep])

    def take_in(self, others: Self) -> Self:
        """Go on with these rows and others, each of which has a token to feed."""
        width, widest = (transformers_internals.cached_tokens(one.cache) for one in (self, others))
        if self.attention is not None:
            skip = int(self.padding.min())  # what no row that is left looks at
            self.padding, width = self.padding - skip, width - skip
            self.attention = self.attention[:, skip:]
            transformers_internals.drop_first_tokens(self.cache, skip)
        most = max(width, widest)
        if width != widest or self.attention is not None or others.attention is not None:
            self.attention = torch.cat([_padded_mask(one, most + 1) for one in (self, others)])
        transformers_internals.append_rows(self.cache, others.cache, most)
        self.padding, others.padding = (self.padding + most - width, others.padding + most - widest)
        for name in ("rows", "at", "inputs", "positions", "done", "padding"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(others, name)]))
        self.youngest = min(self.youngest, others.youngest)
        return self


def _padded_mask(live: LiveRows, width: int) -> torch.Tensor:
    """The attention over so many columns, the row's own on the right."""
    count, mask = transformers_internals.cached_tokens(live.cache) + 1, live.attention
    if mask is None:
        mask = torch.ones(len(live.rows), count, dtype=torch.bool, device=live.rows.device)
    return torch.nn.functional.pad(mask, (width - count, 0), value=False)


class DecodeState:
    """The responses to N prompts so far, on the model's device, and how live rows are fed to it.

    Rows that have ended may be fed on: what is drawn for them then is left out.

    Args:
        prompt_tokens, prompt_mask: [N, Q], padding on the left.
        uniform: [N, max_new_tokens] array in (0, 1); row i, column t decides token t of row i.
        limits: [N] most tokens of each response, at least 1; None: ``max_new_tokens``.
    """

    frozen_states: torch.Tensor | None = None
    """[N, Q + R, D] what entered the layer of :attr:`Decoder.split`"""

    def __init__(self, decoder: Decoder, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                 uniform: Any, limits: Any) -> None:
        lm, self.decoder, self.prompt_tokens = decoder.lm, decoder, prompt_tokens.shape[1]
        device = lm.base_model.device
        noise = to_device(torch.as_tensor(uniform, dtype=torch.float64), device)
        count, self.steps = noise.shape
        # what is drawn behind the end of a row goes to the column after the last, at the latest
        self.noise = torch.nn.functional.pad(noise, (0, 1), value=0.5)
        self.tokens = torch.zeros(count, self.steps + 1, dtype=torch.long, device=device)
        self.mask = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.logprobs = torch.zeros_like(self.tokens, dtype=torch.float32)
        self.values = torch.zeros_like(self.logprobs)
        self.finished = torch.zeros(count, dtype=torch.bool, device=device)
        self.limits = torch.full((count,), self.steps, device=device) if limits is None else \
            to_device(torch.as_tensor(limits, dtype=torch.long), device)
        self.vocabulary = head.vocabulary_of(lm)
        self.gaps = self.vocabulary.gaps_on(device) if self.vocabulary.gaps else None
        stops = torch.tensor(decoder.spec.stop_ids, dtype=torch.long)
        self.stops = to_device(stops[stops < self.vocabulary.size], device)
        self.logits = head.DecodingHead(lm)
        self._module = lm.base_model if decoder.start is None else lm.get_decoder()
        self._cache_name = transformers_internals.cache_name(self._module)
        self._takes_positions = "position_ids" in inspect.signature(
            lm.base_model.forward).parameters
        self.penalises = decoder.spec.repetition_penalty != 1.0
        if self.penalises or decoder.spec.stop_sequences:
            self._keep_contexts(prompt_tokens, prompt_mask)

    def _keep_contexts(self, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor) -> None:
        """Keep what stands before each response: ``context`` [N, n], -1 where there is nothing, its
        prompt or the one token that a decoder starts from; and ``before``, what its text stands
        behind, the last tokens of its prompt."""
        decoder, count = self.decoder, len(prompt_tokens)
        context = prompt_tokens.masked_fill(~prompt_mask, -1) if decoder.start is None else \
            torch.full((count, 1), decoder.start)
        self.context = to_device(context, self.tokens.device)
        self.before: list[list[int]] = [[]] * count
        if decoder.spec.stop_sequences and decoder.start is None:
            special = set(decoder.tokenizer.all_special_ids)
            self.before = [[i for i in row[kept].tolist() if i not in special][-CONTEXT:]
                           for row, kept in zip(prompt_tokens, prompt_mask, strict=True)]

    def add(self, rows: torch.Tensor, at: torch.Tensor, done: torch.Tensor, logits: torch.Tensor,
            hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one more token of some ``rows`` [b], which have ``at`` [b] tokens each and may be
        ``done`` [b] before, from the logits [b, V] of all rows of the output embedding; a value
        head needs the states [b, D] before the token. Returns the tokens [b], and bool [b] that is
        true where the response has ended now."""
        spec, value_head, alive = self.decoder.spec, self.decoder.value_head, ~done
        logits = self.vocabulary.cut(logits, self.gaps)
        seen = self._seen(rows, logits.shape[1]) if self.penalises else None
        chosen, logprobs = samples.choose(logits, self.noise[rows, at], spec, at, self.stops, seen)
        self.tokens[rows, at] = torch.where(alive, chosen, 0)
        self.mask[rows, at] = alive
        self.logprobs[rows, at] = torch.where(alive, logprobs, 0.0)
        if value_head is not None:
            self.values[rows, at] = torch.where(alive, value_head(hidden), 0.0)
        ended = torch.isin(chosen, self.stops)
        if spec.stop_sequences:
            ended |= self._ends_with_stop(rows, at)
        self.finished[rows] |= alive & ended
        return chosen, done | ended | (self.limits[rows] <= at + 1)

    def _seen(self, rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """[b, V] bool: the tokens that are in the prompt or the response so far."""
        tokens = torch.where(self.mask[rows], self.tokens[rows], -1)
        ids = torch.cat([self.context[rows], tokens], dim=1)
        # the column behind the last takes what is no token, and those that have no logit
        places = torch.where((ids < 0) | (ids > vocabulary), vocabulary, ids)
        seen = torch.zeros(len(rows), vocabulary + 1, dtype=torch.bool, device=ids.device)
        return seen.scatter_(1, places, True)[:, :vocabulary]

    def _ends_with_stop(self, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """[b] bool: a stop sequence is complete within the newest tokens of each row, and was not
        before there were ``min_new_tokens``.

        Looked for in decoded text, since a tokenizer may cut the same text in several ways.
        """
        spec = self.decoder.spec
        # a token holds at least one byte, and a few more are for context
        window = max(len(stop.encode()) for stop in spec.stop_sequences) + CONTEXT
        places = at[:, None] - torch.arange(window - 1, -1, -1, device=at.device)
        newest, numbers, ats = (stops.tolist() for stops in to_host(
            self.tokens[rows[:, None], places.clamp(min=0)], rows, at))
        starts = [max(last + 1 - window, 0) for last in ats]
        stops = samples.texts_and_stops(
            self.decoder.tokenizer,
            [[] if start else self.before[row]
             for row, start in zip(numbers, starts, strict=True)],
            [ids[-min(window, last + 1):] for ids, last in zip(newest, ats, strict=True)],
            spec.stop_sequences, [max(spec.min_new_tokens - 1 - start, 0) for start in starts])
        return to_device(torch.tensor([place is not None for _, place in stops]), at.device)

    def generation(self, rows: slice) -> samples.Generation:
        """The responses in these places, all of which have ended."""
        finished, tokens, logprobs, values, mask = to_host(
            self.finished[rows], self.tokens[rows], self.logprobs[rows], self.values[rows],
            self.mask[rows, :self.steps])
        width = max(int(mask.sum(1).max()), 1)
        return samples.Generation(
            tokens[:, :width], mask[:, :width], logprobs[:, :width], values[:, :width], finished,
            None if self.frozen_states is None else
            self.frozen_states[rows, :self.prompt_tokens + width - 1])

    def first_rows(self, rows: range, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor
                   ) -> LiveRows:
        """Rows whose prompts are to be fed, of the prompts of all, [N, Q], padded on the left."""
        from transformers import DynamicCache

        device, cpu_mask = self.decoder.lm.base_model.device, prompt_mask[rows.start:rows.stop]
        skip = cpu_mask.shape[1] - max(int(cpu_mask.sum(1).max()), 1)
        cpu_mask = cpu_mask[:, skip:]
        tokens = to_device(prompt_tokens[rows.start:rows.stop, skip:], device)
        mask = to_device(cpu_mask, device)
        columns: dict[str, Any] = {
            "rows": torch.arange(rows.start, rows.stop, device=device), "youngest": 0,
            "at": torch.zeros(len(mask), dtype=torch.long, device=device),
            "done": torch.zeros(len(mask), dtype=torch.bool, device=device),
            "padding": (~cpu_mask).sum(1)}
        if (start := self.decoder.start) is not None:
            return self._encoded_rows(start, tokens, mask, columns)
        cache = transformers_internals.give_room(
            DynamicCache(config=self.decoder.lm.config), self.prompt_tokens + self.steps - 1)
        return LiveRows(**columns, inputs=tokens, attention=None if bool(cpu_mask.all()) else mask,
                        positions=(mask.long().cumsum(1) - 1).clamp(min=0), cache=cache)

    def _encoded_rows(self, start: int, tokens: torch.Tensor, mask: torch.Tensor,
                      columns: dict[str, Any]) -> LiveRows:
        """As :meth:`first_rows`, of prompts that an encoder reads."""
        from transformers import DynamicCache, EncoderDecoderCache

        count, device = len(tokens), tokens.device
        tokens, mask = layout.right_padded(tokens, mask)
        encoded = self.decoder.lm.get_encoder()(input_ids=tokens, attention_mask=mask.long())
        cache = EncoderDecoderCache(transformers_internals.give_room(DynamicCache(), self.steps),
                                    DynamicCache())
        return LiveRows(
            **columns, attention=None, inputs=torch.full((count, 1), start, device=device),
            positions=torch.zeros(count, 1, dtype=torch.long, device=device), cache=cache,
            encoded=encoded.last_hidden_state, encoder_mask=mask.long())

    def token(self, live: LiveRows) -> None:
        """Feed the live rows and draw one more token of each."""
        self.decoder.poll()
        chosen, live.done = self.draw(live)
        live.inputs = chosen[:, None]
        # a row that has ended stays where it is: the model may have no further position
        live.positions = live.positions[:, -1:] + (~live.done)[:, None]
        live.at = live.at + 1
        live.youngest += 1
        if live.attention is not None:
            live.attention = torch.nn.functional.pad(live.attention, (0, 1), value=True)
        if self.decoder.watch is not None:
            self.decoder.watch(self.tokens, self.mask)

    def draw(self, live: LiveRows) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`token`, but the rows themselves stay as they are; returns as :meth:`add`."""
        split, at, mask = self.decoder.split, live.at.clamp(max=self.steps), live.attention
        arguments: dict[str, Any] = {"input_ids": live.inputs, self._cache_name: live.cache,
                                     "use_cache": True}
        if live.encoded is not None:
            arguments |= {"encoder_hidden_states": live.encoded,
                          "encoder_attention_mask": live.encoder_mask}
        elif self._takes_positions:
            arguments["position_ids"] = live.positions
        if mask is not None:
            arguments["attention_mask"] = mask.long() if mask.dim() == 2 else mask
        with trunk.inputs_at(split, self.decoder.lm) as entering:
            hidden = self._module(**arguments).last_hidden_state[:, -1]
        if entering:
            self._keep_frozen_states(live, at, entering[-1])
        return self.add(live.rows, at, live.done, self.logits(hidden), hidden)

    def _keep_frozen_states(self, live: LiveRows, at: torch.Tensor, states: torch.Tensor) -> None:
        """Keep what entered a layer in one step: [b, Q, D] of prompts, later [b, 1, D]."""
        if self.frozen_states is None:
            self.frozen_states = states.new_zeros(
                len(self.tokens), self.prompt_tokens + self.steps, states.shape[-1])
        width = live.inputs.shape[1]
        places = self.prompt_tokens - width + at[:, None] + torch.arange(width, device=at.device)
        self.frozen_states[live.rows[:, None], places] = states[:, -width:]
