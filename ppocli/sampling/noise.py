"""Sampling noise as a pure function of (seed, stream, episode, token position).

A counter-based generator instead of one stream: a rollout does not depend on chunk size, number of
ranks or the order in which rows finish; resuming needs no generator state; evaluation before and
after training uses the same random numbers.
"""

from collections.abc import Sequence

import numpy as np

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
    drawn = uniform(seed, LENGTHS, episodes, 1)[:, 0]
    return low + np.minimum((drawn * (high - low + 1)).astype(np.int64), high - low)
