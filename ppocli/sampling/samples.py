"""The results of sampling: responses, as decode loops return them, samples, as everything else
reads them, and the texts that rewards see."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any

import torch

from ppocli.data.columns import joined, rows_of
from ppocli.models.layout import Sequences
from ppocli.runs.episode import Episode
from ppocli.sampling.token_choice import SamplingSpec

TokenRows = Sequence[Sequence[int]]
"""ids of several prompts, responses or contexts"""


@dataclass(frozen=True, slots=True)
class Generation:
    """B sampled responses, right-padded to R tokens, on the CPU. Made by decode loops."""

    tokens: torch.Tensor
    """[B, R] int64; 0 where the mask is false"""
    mask: torch.Tensor
    """[B, R] bool, true through the token that ended the response"""
    logprobs: torch.Tensor
    """[B, R] fp32, under softmax(logits / temperature)"""
    values: torch.Tensor
    """[B, R] fp32, of the state before each token; zero without a value head"""
    finished: torch.Tensor
    """[B] bool, true where a stop token or stop sequence ended the response"""
    frozen_states: torch.Tensor | None = None
    """[B, Q + R - 1, D] what entered a layer that was asked for, of every token but the last, in
    the places of the left-padded prompts; on the device"""

    @property
    def ids(self) -> list[list[int]]:
        """[B] lists of the sampled ids."""
        return response_ids(self.tokens, self.mask)


@dataclass(frozen=True, slots=True)
class Samples:
    """B samples of one or several turns, on the CPU. Made by a sampler, read by tasks."""

    sequences: Sequences
    """their tokens, and the positions of those that the policy chose"""
    logprobs: torch.Tensor
    """[B, R] fp32 of each action, as computed by the sampler"""
    values: torch.Tensor
    """[B, R] fp32 of the state before each action; zero where the sampler computes none"""
    finished: torch.Tensor
    """[B] bool, true where the policy ended the sample itself"""
    frozen_states: list[torch.Tensor] | None = None
    """per sample [n, D], on the device: the inputs of
    :attr:`~ppocli.sampling.sampler.GenerationModel.split` for all tokens but the last"""
    episodes: list[Episode] | None = None
    """per sample what happened, where an environment answered"""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def mask(self) -> torch.Tensor:
        """[B, R] bool of the actions."""
        return self.sequences.mask

    @property
    def action_ids(self) -> list[list[int]]:
        """[B] lists of the ids that the policy chose."""
        return response_ids(self.sequences.action_tokens, self.mask)

    def first(self, count: int) -> Samples:
        """The first ``count`` samples."""
        return self.rows(slice(count))

    def rows(self, index: Any) -> Samples:
        """The samples at ``index`` (a slice or a tensor of places), padding and all."""
        return rows_of(self, index)

    def only(self, kept: torch.Tensor) -> Samples:
        """The same samples with only some of their actions, whose tokens the others stay in.

        Args:
            kept: [B, R] bool, within the mask; at least one in each row.
        """
        order = (~kept).int().argsort(dim=1, stable=True)[:, :int(kept.sum(1).max())]
        mask = kept.gather(1, order)
        actions, logprobs, values = (value.gather(1, order) * mask for value in (
            self.sequences.actions, self.logprobs, self.values))
        return replace(self, sequences=replace(self.sequences, actions=actions, mask=mask),
                       logprobs=logprobs, values=values)

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """The samples of several, padded to the widest; without states of layers."""
        return joined([replace(part, frozen_states=None) for part in parts])


def single_turn(prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor, out: Generation,
                decoder_start: int | None) -> Samples:
    """Samples with one response after each prompt.

    Args:
        prompt_tokens, prompt_mask: [B, Q], padding on the left.
        decoder_start: the token that a decoder beside an encoder starts from; None for a causal LM.
    """
    sequences = Sequences.of_responses(prompt_tokens, prompt_mask, out.tokens, out.mask,
                                       decoder_start)
    frozen_states = None
    if out.frozen_states is not None:
        starts = prompt_tokens.shape[1] - prompt_mask.sum(1)
        frozen_states = [states[start:start + length - 1] for states, start, length in zip(
            out.frozen_states, starts.tolist(), sequences.lengths.tolist(), strict=True)]
    return Samples(sequences, out.logprobs, out.values, out.finished, frozen_states)


def response_ids(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """[B] lists from right-padded [B, R] tensors."""
    return [row[:n] for row, n in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]


def decode_responses(tokenizer: Any, prompt_ids: TokenRows, responses: TokenRows,
                     spec: SamplingSpec) -> list[str]:
    """The responses as text: without special tokens, trimmed at the first stop sequence of ``spec``
    that is complete no sooner than with its token ``min_new_tokens``.

    A response is decoded behind its prompt and the prompt's text is taken off again: tokenizers
    that mark words by a leading space would lose that space on a response decoded alone.
    """
    if not spec.stop_sequences:
        return _texts_behind(tokenizer, prompt_ids, responses)
    early = [max(spec.min_new_tokens - 1, 0)] * len(responses)
    return [text[:cut] for text, cut in
            texts_and_stops(tokenizer, prompt_ids, responses, spec.stop_sequences, early)]


def texts_and_stops(tokenizer: Any, prompt_ids: TokenRows, responses: TokenRows,
                    stop_sequences: Sequence[str], early: Sequence[int]
                    ) -> list[tuple[str, int | None]]:
    """The responses as whole text, each with the place in it where the first stop sequence begins,
    None without one.

    Args:
        early: how many of the first tokens of each response come too soon: what is complete with
            these doesn't stop it.
    """
    texts = _texts_behind(tokenizer, prompt_ids, responses)
    soon = [""] * len(texts) if not any(early) else _texts_behind(
        tokenizer, prompt_ids, [ids[:n] for ids, n in zip(responses, early, strict=True)])
    texts_and_places: list[tuple[str, int | None]] = []
    for text, early_text in zip(texts, soon, strict=True):
        past = len(commonprefix((text, early_text)))  # noqa: RUF071 - character by character
        # where each stop begins that ends behind so many characters
        places = [text.find(stop, max(past - len(stop) + 1, 0)) for stop in stop_sequences]
        texts_and_places.append((text, min((i for i in places if i >= 0), default=None)))
    return texts_and_places


def places_of_ends(tokenizer: Any, prompt_ids: TokenRows, responses: TokenRows,
                   ends: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each end within the text of a response, a number of characters, the place of the token
    with which the text up to there is complete.

    Args:
        ends: of each response, rising.
    """
    def prefix_matches(before: Sequence[int], ids: Sequence[int], text: str, count: int) -> bool:
        # until a character is whole its tokens are read as another one
        return _texts_behind(tokenizer, [before], [ids[:count]])[0].startswith(text)

    all_places = [list[int]() for _ in ends]
    for places, before, ids, sample_ends in zip(all_places, prompt_ids, responses, ends,
                                                strict=True):
        whole = _texts_behind(tokenizer, [before], [ids])[0]
        for end in sample_ends:
            places.append(bisect_left(range(1, len(ids)), True, lo=max(places, default=0),
                                      key=partial(prefix_matches, before, ids, whole[:end])))
    return all_places


def _texts_behind(tokenizer: Any, prompt_ids: TokenRows, responses: TokenRows) -> list[str]:
    """As :func:`decode_responses`, untrimmed."""
    if not responses:
        return []
    rows: list[list[int]] = []
    for prompt_row, response_row in zip(prompt_ids, responses, strict=True):
        rows += [*prompt_row, *response_row], [*prompt_row]
    decoded = tokenizer.batch_decode(rows, skip_special_tokens=True)
    texts = []
    for whole, prompt, ids in zip(decoded[::2], decoded[1::2], responses, strict=True):
        texts.append(whole[len(prompt):] if whole.startswith(prompt) else
                     tokenizer.decode(list(ids), skip_special_tokens=True))
    return texts
