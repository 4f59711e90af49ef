"""How responses are sampled (``SamplingSpec``), and the results: responses, as decode loops return
them, samples, as everything else reads them, and the texts that rewards see.

Noise is a pure function of (seed, stream, episode, token position). It comes from a counter-based
generator instead of one stream: a rollout does not depend on chunk size, number of ranks or the
order in which rows finish; resuming needs no generator state; evaluation before and after training
uses the same random numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np
import torch

from ppocli.data.data_set import RowRecord, joined
from ppocli.models.layout import Sequences
from ppocli.runs.episode import Episode

BLOCK = 256
"""vocabulary entries per block of the two-level inverse transform"""
NUCLEUS = 256
"""tokens that are tried first for ``top_p``"""

SAMPLING_KEYS = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p",
                 "repetition_penalty", "do_sample")
"""fields of a :class:`SamplingSpec` that are keys of the same name in the configuration"""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How responses are sampled; every field explicit, nothing taken from the model's config."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """ids that end a response: the tokenizer's and the model's EOS, and the user's own"""
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    do_sample: bool = True
    stop_sequences: tuple[str, ...] = ()
    length_range: tuple[int, int] | None = None
    """fewest and most tokens that each response is allowed, drawn by whoever generates"""

    @property
    def is_policy_distribution(self) -> bool:
        """True when tokens are drawn from softmax(logits / temperature) itself."""
        return (self.do_sample and self.top_k == 0 and self.top_p >= 1.0 and self.min_p == 0.0
                and self.repetition_penalty == 1.0 and self.min_new_tokens == 0)

    @property
    def looks_back(self) -> bool:
        """Whether a choice depends on tokens that were chosen before, beside the model's state."""
        return bool(self.stop_sequences) or self.min_new_tokens > 0 \
            or self.repetition_penalty != 1.0


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
class Samples(RowRecord):
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
        return response_ids(self.sequences.action_tokens, self.sequences.mask)

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
    """Samples with one response after each prompt, as :meth:`Sequences.of_responses`."""
    sequences = Sequences.of_responses(prompt_tokens, prompt_mask, out.tokens, out.mask,
                                       decoder_start)
    states = None if out.frozen_states is None else _states_of_rows(
        out.frozen_states, (~prompt_mask).sum(1), sequences.lengths)
    return Samples(sequences, out.logprobs, out.values, out.finished, states)


def _states_of_rows(states: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
                    ) -> list[torch.Tensor]:
    """Per row [n - 1, D], of states [B, Q + R - 1, D] that begin at ``starts`` [B], for samples of
    n tokens."""
    return [row[start:start + length - 1] for row, start, length in zip(
        states, starts.tolist(), lengths.tolist(), strict=True)]


def response_ids(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """[B] lists from right-padded [B, R] tensors."""
    return [row[:count] for row, count in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]


def decode_responses(tokenizer: Any, prompt_ids: TokenRows, responses: TokenRows,
                     spec: SamplingSpec) -> list[str]:
    """The responses as text: without special tokens, trimmed at the first stop sequence of ``spec``
    that is complete no sooner than with its token ``min_new_tokens``."""
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
    """As :func:`decode_responses`, untrimmed. A response is decoded behind its prompt, whose text
    is taken off again: tokenizers that mark words by a leading space would else lose the first."""
    rows, texts = list[list[int]](), list[str]()
    for prompt_row, response_row in zip(prompt_ids, responses, strict=True):
        rows += [*prompt_row, *response_row], [*prompt_row]
    decoded = tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []
    for whole, prompt, ids in zip(decoded[::2], decoded[1::2], responses, strict=True):
        texts.append(whole[len(prompt):] if whole.startswith(prompt) else
                     tokenizer.decode(list(ids), skip_special_tokens=True))
    return texts


def inverse_transform(logits: torch.Tensor, uniform: torch.Tensor
                      ) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution in two levels (blocks, then inside one):
    token ids [b] int64, and [b] fp32 the logarithm of the sum of the logits' exponentials, of fp32
    logits [b, V] with at least one finite entry a row and ``uniform`` [b] in (0, 1). One
    exponential pass over the vocabulary, no sort and no softmax; -inf logits are never drawn."""
    rows, vocabulary = logits.shape
    num_blocks = -(-vocabulary // BLOCK)
    most = logits.amax(-1, keepdim=True)
    weights = logits.new_empty(rows, num_blocks * BLOCK)
    weights[:, vocabulary:] = 0.0
    torch.sub(logits, most, out=weights[:, :vocabulary]).exp_()
    weights = weights.view(rows, num_blocks, BLOCK)
    block_ends = weights.sum(-1).double().cumsum(-1)
    threshold = uniform.double()[:, None] * block_ends[:, -1:]
    block = torch.searchsorted(block_ends, threshold, right=True).clamp_(max=num_blocks - 1)
    before = torch.where(block > 0, block_ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = weights[torch.arange(rows, device=logits.device), block.squeeze(-1)].double()
    ends = inside.cumsum(-1)
    # rounding must not step past the last entry that has any weight
    threshold = torch.minimum(threshold - before, ends[:, -1:] * (1.0 - 1e-12))
    offset = torch.searchsorted(ends, threshold, right=True).clamp_(max=BLOCK - 1)
    tokens = (block * BLOCK + offset).squeeze(-1).clamp_(max=vocabulary - 1)
    return tokens, (most.double() + block_ends[:, -1:].log()).squeeze(-1).float()


def _restrict(logits: torch.Tensor, spec: SamplingSpec, position: torch.Tensor,
              stops: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Logits / temperature as transformers' processors would leave them, in their order."""
    if seen is not None:
        # of a CTRL-like model (arXiv:1909.05858); a positive factor, the temperature, commutes
        penalty = spec.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty),
                             logits)
    if spec.min_new_tokens:
        early = (position < spec.min_new_tokens)[:, None]
        logits = torch.where(early, logits.index_fill(1, stops, float("-inf")), logits)
    if 0 < spec.top_k < logits.shape[-1]:
        kth = logits.topk(spec.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if spec.top_p < 1.0:
        logits = _nucleus(logits, spec.top_p)
    if spec.min_p:  # arXiv:2407.01082
        least = logits.amax(-1, keepdim=True) + math.log(spec.min_p)
        logits = logits.masked_fill(logits < least, float("-inf"))
    return logits


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The logits of the most probable tokens that make up ``top_p`` together, -inf for the others;
    the token that crosses it stays in. (Holtzman et al. 2020, arXiv:1904.09751)

    Only rows for which a few hundred tokens aren't enough are sorted. On a GPU all are: to ask
    which those are would cost more.
    """
    if logits.device.type != "cpu" or logits.shape[-1] <= NUCLEUS:
        return _kept(logits, *logits.sort(dim=-1, descending=True), top_p)[0]
    restricted, enough = _kept(logits, *logits.topk(NUCLEUS, dim=-1), top_p)
    if not bool(enough.all()):
        rest = logits[~enough]
        restricted[~enough] = _kept(rest, *rest.sort(dim=-1, descending=True), top_p)[0]
    return restricted


def _kept(logits: torch.Tensor, ordered: torch.Tensor, order: torch.Tensor, top_p: float
          ) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits with all others at -inf, and [b] bool, whether these suffice.

    Args:
        ordered, order: [b, k] the largest logits of each row and where they are.
    """
    probabilities = torch.exp(ordered - torch.logsumexp(logits, -1, keepdim=True))
    sums = probabilities.cumsum(-1)
    ordered = ordered.masked_fill(sums - probabilities >= top_p, float("-inf"))
    restricted = torch.full_like(logits, float("-inf")).scatter_(-1, order, ordered)
    return restricted, sums[:, -1] >= top_p


def choose(logits: torch.Tensor, uniform: torch.Tensor, spec: SamplingSpec,
           position: torch.Tensor, stops: torch.Tensor, seen: torch.Tensor | None = None
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [b] int64 and their logprobs [b] fp32 under softmax(logits / temperature), before
    any restriction, from raw logits [b, V] and ``uniform`` [b] in (0, 1) behind ``position`` [b]
    tokens. ``stops``: ``spec.stop_ids`` on the device; ``seen`` [b, V] bool: penalised tokens."""
    logits = logits.float()
    if spec.temperature != 1.0:
        logits = logits / spec.temperature
    restricted = logits if spec.is_policy_distribution else _restrict(
        logits, spec, position, stops, seen)
    tokens, total = inverse_transform(restricted, uniform) if spec.do_sample else (
        restricted.argmax(-1), torch.empty(0))
    if not spec.do_sample or restricted is not logits:
        total = torch.logsumexp(logits, -1)
    return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - total


ROLLOUT = 1
EVALUATION = 2
USER = 3
LENGTHS = 4


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, stream: int, episodes: Sequence[int], num_tokens: int) -> np.ndarray:
    """[len(episodes), num_tokens] float64 in (0, 1) by token position and the samples' numbers
    within their stream: ROLLOUT, EVALUATION, USER or LENGTHS, which are independent."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        root = _mix(np.array([seed], dtype=np.uint64) * golden + np.uint64(stream))
        rows = _mix(root ^ (np.asarray(episodes, dtype=np.uint64) * golden + golden))
        tokens = np.arange(1, num_tokens + 1, dtype=np.uint64) * golden
        bits = _mix(rows[:, None] + tokens[None, :]) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def lengths(seed: int, episodes: Sequence[int], low: int, high: int) -> np.ndarray:
    """[len(episodes)] int64, a whole number from ``low`` to ``high`` (both included) per sample:
    the longest its response may become. TRL's ``LengthSampler`` (``trl/core.py``, v0.11) draws one
    per batch and excludes ``high``."""
    noise = uniform(seed, LENGTHS, episodes, 1)[:, 0]
    return low + np.minimum((noise * (high - low + 1)).astype(np.int64), high - low)
