"""Choosing the next token from logits and one uniform number per row, and these numbers: sampling
noise is a pure function of (seed, stream, episode, token position).

It comes from a counter-based generator instead of one stream: a rollout does not depend on chunk
size, number of ranks or the order in which rows finish; resuming needs no generator state;
evaluation before and after training uses the same random numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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


def inverse_transform(logits: torch.Tensor, uniform: torch.Tensor
                      ) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution in two levels (blocks, then inside one).

    One exponential pass over the vocabulary, no sort and no softmax; -inf logits are never drawn.

    Args:
        logits: [b, V] fp32, at least one finite entry a row.
        uniform: [b] in (0, 1).

    Returns:
        token ids [b] int64, and [b] fp32 the logarithm of the sum of the logits' exponentials.
    """
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
    """Next tokens and their logprobs under softmax(logits / temperature), before any restriction.

    Args:
        logits: [b, V] raw logits.
        uniform: [b] in (0, 1).
        position: [b] number of response tokens already there.
        stops: ``spec.stop_ids`` on the logits' device.
        seen: [b, V] bool, true for the tokens that ``spec.repetition_penalty`` makes less likely;
            None without a penalty.

    Returns:
        tokens [b] int64 and logprobs [b] fp32.
    """
    logits = logits.float()
    if spec.temperature != 1.0:
        logits = logits / spec.temperature
    restricted = _restrict(logits, spec, position, stops, seen)
    if spec.do_sample:
        tokens, total = inverse_transform(restricted, uniform)
    else:
        tokens = restricted.argmax(-1)
    if not spec.do_sample or restricted is not logits:
        total = torch.logsumexp(logits, -1)
    return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - total


# Noise --------------------------------------------------------------------------------------------

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
    """[len(episodes), num_tokens] float64 in (0, 1), one number per sample and token position.

    Args:
        seed: the run's seed.
        stream: ROLLOUT, EVALUATION, USER or LENGTHS; streams are independent.
        episodes: number of each sample within its stream.
    """
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
