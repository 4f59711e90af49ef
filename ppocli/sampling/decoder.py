"""What the decode loops have in common: what they are told (the model, how tokens are chosen, who
watches), and the responses that they fill in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ppocli.models.layer_stack import SplitPoint
from ppocli.models.vocabulary import vocabulary_of
from ppocli.parallel.backend import to_device, to_host
from ppocli.sampling import samples, token_choice

CONTEXT = 4
"""tokens in front of those that are looked at, as much as a tokenizer lets their text depend on"""
Watch = Callable[[torch.Tensor, torch.Tensor], None]
"""is shown tokens and mask [B, R + 1] of the responses so far, on the model's device"""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that continues prompts, and how. Made by samplers, read by decode loops."""

    lm: Any
    """a transformers causal LM or encoder-decoder in eval mode"""
    spec: token_choice.SamplingSpec
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
    watch: Watch = lambda tokens, mask: None
    """shown all tokens so far after every token"""
    records: bool = False
    """whether a GPU may be given what feeds a token as a recorded graph"""
    all_alive: Callable[[int], int] = int
    """from the number of rows that are still alive here to the most that are anywhere; decoding
    goes on until none is. For ranks whose forward passes must be equally many, which all decode the
    same number of rows at once and never refill"""


class Drawn:
    """What has been drawn so far of the responses to N prompts, on the model's device.

    Rows that have ended may be fed on: what is drawn for them then is left out.

    Args:
        prompt_tokens, prompt_mask: [N, Q], as :func:`ppocli.sampling.decoding.decode`.
        uniform: [N, R] array in (0, 1), as :func:`ppocli.sampling.decoding.decode`.
        limits: [N] most tokens of each response, or None.
    """

    frozen_states: torch.Tensor | None = None
    """[N, Q + R, D] what entered the layer of :attr:`Decoder.split`"""

    def __init__(self, decoder: Decoder, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor,
                 uniform: Any, limits: Any) -> None:
        self.decoder, self.prompt_tokens = decoder, prompt_tokens.shape[1]
        device = decoder.lm.base_model.device
        noise = to_device(torch.as_tensor(uniform, dtype=torch.float64), device)
        count, self.steps = noise.shape
        # what is drawn behind the end of a row goes to the column after the last, at the latest
        self.noise = torch.nn.functional.pad(noise, (0, 1), value=0.5)
        self.tokens, self.mask, self.logprobs, self.values = (
            torch.zeros(count, self.steps + 1, dtype=kind, device=device)
            for kind in (torch.long, torch.bool, torch.float32, torch.float32))
        self.finished = torch.zeros(count, dtype=torch.bool, device=device)
        self.limits = torch.full((count,), self.steps, device=device) if limits is None else \
            to_device(torch.as_tensor(limits, dtype=torch.long), device)
        self.vocabulary = vocabulary_of(decoder.lm)
        self.gaps = self.vocabulary.gaps_on(device)
        self.stops = to_device(torch.tensor(
            [i for i in decoder.spec.stop_ids if i < self.vocabulary.size], dtype=torch.long),
            device)
        self.before: list[list[int]] = [[]] * count
        """what the text of each response stands behind: the last tokens of its prompt"""
        if decoder.spec.stop_sequences and decoder.start is None:
            special = set(decoder.tokenizer.all_special_ids)
            self.before = [[i for i in row[kept].tolist() if i not in special][-CONTEXT:]
                           for row, kept in zip(prompt_tokens, prompt_mask, strict=True)]
        self.penalises = decoder.spec.repetition_penalty != 1.0
        if self.penalises:
            # what stands before a response: its prompt, or the one token that a decoder starts from
            self.given = (to_device(prompt_tokens.masked_fill(~prompt_mask, -1), device)
                          if decoder.start is None else
                          torch.full((count, 1), decoder.start, device=device))

    def add(self, rows: torch.Tensor, at: torch.Tensor, done: torch.Tensor, logits: torch.Tensor,
            hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one more token of some rows.

        Args:
            rows: [b] their places among all.
            at: [b] how many tokens each has.
            done: [b] bool, true where the response has ended before.
            logits: [b, V] of all rows of the output embedding.
            hidden: [b, D] the states before the token; not needed without a value head.

        Returns:
            The tokens [b], and bool [b] that is true where the response has ended now.
        """
        spec, value_head, alive = self.decoder.spec, self.decoder.value_head, ~done
        logits = self.vocabulary.cut(logits, self.gaps)
        seen = self._seen(rows, logits.shape[1]) if self.penalises else None
        chosen, logprobs = token_choice.choose(logits, self.noise[rows, at], spec, at, self.stops,
                                               seen)
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
        drawn = torch.where(self.mask[rows], self.tokens[rows], -1)
        ids = torch.cat([self.given[rows], drawn], dim=1)
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
        newest, numbers, ats = (found.tolist() for found in to_host(
            self.tokens[rows[:, None], places.clamp(min=0)], rows, at))
        starts = [max(last + 1 - window, 0) for last in ats]
        found = samples.texts_and_stops(
            self.decoder.tokenizer,
            [[] if start else self.before[row]
             for row, start in zip(numbers, starts, strict=True)],
            [ids[-min(window, last + 1):] for ids, last in zip(newest, ats, strict=True)],
            spec.stop_sequences, [max(spec.min_new_tokens - 1 - start, 0) for start in starts])
        return to_device(torch.tensor([place is not None for _, place in found]), at.device)

    def found(self, rows: slice) -> samples.Generation:
        """The responses in these places, all of which have ended."""
        finished, *drawn = to_host(self.finished[rows], *(
            one[rows, :self.steps] for one in (self.tokens, self.logprobs, self.values, self.mask)))
        width = max(int(drawn[-1].sum(1).max()), 1)
        tokens, logprobs, values, mask = (one[:, :width] for one in drawn)
        return samples.Generation(
            tokens, mask, logprobs, values, finished, None if self.frozen_states is None else
            self.frozen_states[rows, :self.prompt_tokens + width - 1])
