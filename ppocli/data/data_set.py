"""Training data as tokens: examples and pairs, in the order of their source."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ppocli.config.text import counted
from ppocli.data.columns import rows_of
from ppocli.errors import InputError

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Rows:
    """n rows of training data, in the order of their source."""

    places: list[str]
    """n places in the source, as in ``line 3 of reviews.jsonl``"""
    notes: tuple[str, ...]
    """sentences for the user about rows that were left out or cut, and settings without effect"""

    def __len__(self) -> int:
        return len(self.places)

    def rows(self, places: Sequence[int]) -> Self:
        """The rows at ``places``, with the notes of the whole."""
        return rows_of(self, places)

    def split_off(self, share: float, seed: int) -> tuple[Self, Self]:
        """The rows to train on, and ``share`` of all rows, rounded, held back at random. The choice
        depends on (n, share, seed) alone; both parts keep the order of the source.

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
    """n texts as tokens, from :mod:`ppocli.data.encoding` to the task that trains on them."""

    tokens: list[Ids]
    """n arrays of ids, [T]: prompt and response for a causal model; for an encoder-decoder the
    decoder's output, without its start token"""
    trained: list[Mask]
    """n arrays, [T], true where a token is trained on: at least once in each, and never at place 0
    for a causal model, which doesn't predict its first token"""
    encoder_tokens: list[Ids]
    """n arrays of the encoder's input ids; empty for a causal model"""
    prompts: list[str]
    """n texts: the text before the last part that is trained on, without BOS; "" where a row is one
    text or is cut within its prompt"""
    prompt_lengths: list[int]
    """n token counts: ``tokens[i][:prompt_lengths[i]]`` is the prompt as PPO would see it; 0
    without a prompt, and for an encoder-decoder"""
    chat: bool = False
    """whether the chat template rendered them"""

    def prompt_tokens(self, place: int) -> list[int]:
        """The ids of a prompt, as PPO would pass them to the model or its encoder; empty where a
        row is one text."""
        ids = self.encoder_tokens[place] if self.encoder_tokens else (
            self.tokens[place][:self.prompt_lengths[place]])
        return [int(token) for token in ids]

    def digest(self) -> str:
        """SHA-256 (hex) over ids and masks: equal exactly if a resumed run has the same data."""
        return _digest(self.tokens, self.trained, self.encoder_tokens)


@dataclass(frozen=True, slots=True)
class Pairs(_Rows):
    """n pairs as tokens, from and to the same modules as :class:`Examples`."""

    chosen: list[Ids]
    """n arrays of ids, [T]: the prompt and the better answer, with the token that ends it"""
    rejected: list[Ids]
    """the same with the worse answer"""
    margins: list[float]
    """n minimum differences between the scores of the two; 0 where the data has none"""
    prompt_lengths: list[int]
    """n token counts of the prompt, with which both texts begin: ``len(chosen[i]) -
    prompt_lengths[i]`` is the length of an answer"""
    chat: bool = False
    """as of :class:`Examples`"""

    def digest(self) -> str:
        """SHA-256 (hex) over ids and margins: equal exactly if a resumed run has the same data."""
        return _digest(self.chosen, self.rejected, [np.array(self.margins, np.float64),
                                                    np.array(self.prompt_lengths)])


def _digest(*columns: Sequence[npt.NDArray[Any]]) -> str:
    sha = hashlib.sha256()
    for arrays in columns:
        for array in arrays:
            sha.update(f"{len(array)} ".encode())
            sha.update(array.tobytes())
    return sha.hexdigest()
