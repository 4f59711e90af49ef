"""Training data as tokens: examples and pairs, in the order of their source."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ppocli.columns import rows_of
from ppocli.errors import InputError
from ppocli.text import counted

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Rows:
    """n rows of training data, in the order of their source."""

    places: list[str]
    """n places in the source, as in ``line 3 of reviews.jsonl``"""
    notes: tuple[str, ...]
    """sentences for the user about what was left out, cut or ignored in the source"""

    def __len__(self) -> int:
        return len(self.places)

    def rows(self, places: Sequence[int]) -> Self:
        """Those at ``places``, with what is said of the whole."""
        return rows_of(self, places)

    def split_off(self, share: float, seed: int) -> tuple[Self, Self]:
        """The rows to train on and those held back, ``share`` of them, rounded. Which those are is
        a function of (n, share, seed) alone, and both keep the order of the source.

        Raises:
            InputError: one of the two would be empty.
        """
        held = round(share * len(self))
        if not 0 < held < len(self):
            raise InputError(f"{share:g} of {counted(len(self), 'row')} leaves nothing "
                             f"{'to evaluate on' if held == 0 else 'to train on'}.",
                             where=f"data.val={share:g}", fix="another share, or data.val=FILE")
        order = np.random.default_rng([seed, 0x76616C]).permutation(len(self))
        return self.rows(sorted(order[held:].tolist())), self.rows(sorted(order[:held].tolist()))


@dataclass(frozen=True, slots=True)
class Examples(_Rows):
    """n texts as tokens. Made by :mod:`ppocli.data.encoding`, read by the task that trains on
    them."""

    tokens: list[Ids]
    """n arrays of ids, [T]: of a causal model prompt and response, for an encoder-decoder what its
    decoder says, without the token that it starts from"""
    trained: list[Mask]
    """n arrays, [T], true where a token is trained on; at least once in each. Never true at place
    0 of a causal model's tokens: nothing predicts it"""
    encoder_tokens: list[Ids]
    """n arrays of what an encoder reads; empty for a causal model"""
    prompts: list[str]
    """n texts of what is before the last thing that is trained on, without BOS; "" where a row is
    one text, or is cut within that"""
    prompt_lengths: list[int]
    """n numbers of tokens: ``tokens[i][:prompt_lengths[i]]`` is that prompt, as PPO would see it;
    0 where there is none, and for an encoder-decoder"""

    def prompt_tokens(self, place: int) -> list[int]:
        """The ids of a prompt: what PPO would let the model continue, or its encoder read. Empty
        where a row is one text."""
        ids = self.encoder_tokens[place] if self.encoder_tokens else (
            self.tokens[place][:self.prompt_lengths[place]])
        return [int(token) for token in ids]

    def digest(self) -> str:
        """SHA-256 (hex) over ids and masks: equal exactly if a resumed run sees the same."""
        return _digest(self.tokens, self.trained, self.encoder_tokens)


@dataclass(frozen=True, slots=True)
class Pairs(_Rows):
    """n pairs as tokens, the better answer first. Made and read as :class:`Examples`."""

    chosen: list[Ids]
    """n arrays of ids, [T]: the prompt and the answer through its end"""
    rejected: list[Ids]
    """the same of the worse answer"""
    margins: list[float]
    """n numbers by which the scores should differ; 0 where the data has none"""
    prompt_lengths: list[int]
    """n numbers of tokens that both begin with: ``len(chosen[i]) - prompt_lengths[i]`` is the
    length of an answer"""
    chat: bool = False
    """whether they are conversations, which the chat template has rendered"""

    def digest(self) -> str:
        """SHA-256 (hex) over ids and margins: equal exactly if a resumed run sees the same."""
        return _digest(self.chosen, self.rejected, [np.array(self.margins, np.float64),
                                                    np.array(self.prompt_lengths)])


def _digest(*columns: Sequence[npt.NDArray[Any]]) -> str:
    sha = hashlib.sha256()
    for arrays in columns:
        for array in arrays:
            sha.update(f"{len(array)} ".encode())
            sha.update(array.tobytes())
    return sha.hexdigest()
