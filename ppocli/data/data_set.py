"""Data as tokens: prompts, served in left-padded batches; examples and pairs to train on; and
records whose fields are columns, one value a row each.

The prompts of a step depend on its position alone, so that a position is all that a resume needs.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from ppocli.config.text import counted
from ppocli.data.files import Row
from ppocli.errors import InputError

T = TypeVar("T")


def rows_of(record: T, index: Any) -> T:
    """The rows of a record, or of a mapping, at ``index`` (a slice, or a list or a tensor of
    places): those of its tensors, lists and mappings, and of the records in it. A column of
    another kind, such as a tuple, describes the whole record and stays as it is."""
    whole: Any = record
    is_mapping, rows = isinstance(whole, dict), dict[str, Any]()
    for name in whole if is_mapping else map(attrgetter("name"), fields(whole)):
        value = whole[name] if is_mapping else getattr(whole, name)
        if isinstance(value, list) and not isinstance(index, slice):
            rows[name] = list(map(value.__getitem__, index)) if value else []
        elif isinstance(value, list | torch.Tensor):
            rows[name] = value[index]
        elif isinstance(value, dict):
            rows[name] = rows_of(value, index)
        else:
            rows[name] = value.rows(index) if hasattr(value, "rows") else value
    return cast(T, rows if is_mapping else type(whole)(**rows))


class RowRecord:
    """A record whose columns have a value of each row."""

    __slots__ = ()

    def rows(self, index: Any) -> Self:
        """The rows at ``index``, as of :func:`rows_of`, padding and all."""
        return rows_of(self, index)


def joined(parts: Sequence[T]) -> T:
    """Records concatenated along their rows, [B, X] tensors padded with zeros on the right to the
    widest. Columns that describe a whole record are the first one's."""
    return type(parts[0])(*(_concat_column(list(values))
                            for values in zip(*map(_columns, parts), strict=True)))


def _concat_column(values: list[Any]) -> Any:
    """One column of several records; records in it join themselves, if they are of rows."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _concat_column([value[name] for value in values]) for name in first}
    if isinstance(first, list):
        return list(chain.from_iterable(values))
    if not isinstance(first, torch.Tensor):
        return first.joined(values) if hasattr(first, "joined") else first
    if first.dim() == 1:
        return torch.cat(values)
    width = max(value.shape[1] for value in values)
    return torch.cat([torch.nn.functional.pad(value, (0, width - value.shape[1]))
                      for value in values])


def _columns(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]


# Prompts ------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class PromptBatch:
    """B prompts, left-padded to Q tokens, from :meth:`PromptSet.batch` to the rollout."""

    tokens: torch.Tensor
    """[B, Q] int64 token ids; padding carries the pad id."""
    mask: torch.Tensor
    """[B, Q] bool, true on prompt tokens. Every row has at least one."""
    texts: list[str]
    """[B] the prompts as the reward gets them."""
    columns: dict[str, list[Any]]
    """metadata by column name, each of length B"""
    episodes: list[int]
    """[B] number of the sample within the run, on which its sampling noise depends"""
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """[B] conversations, as of :class:`PromptSet`"""

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, places: Sequence[int]) -> Self:
        """The rows at ``places``, padded only to the longest of them."""
        batch = rows_of(self, list(places))
        longest = max(int(batch.mask.sum(1).max()), 1)
        return replace(batch, tokens=batch.tokens[:, -longest:], mask=batch.mask[:, -longest:])

    @staticmethod
    def joined(parts: "Sequence[PromptBatch]") -> "PromptBatch":
        """The rows of several batches, padded to the widest."""
        width = max(part.tokens.shape[1] for part in parts)

        def widened(part: PromptBatch) -> PromptBatch:
            pad = partial(torch.nn.functional.pad, pad=(width - part.tokens.shape[1], 0))
            return replace(part, tokens=pad(part.tokens), mask=pad(part.mask))
        return joined(list(map(widened, parts)))


@dataclass(frozen=True, slots=True)
class PromptSet(RowRecord):
    """n tokenised prompts, from the loaders below to rollout and evaluation."""

    token_ids: list[list[int]]
    """n lists of token ids, none empty, unpadded"""
    texts: list[str]
    """n prompts as the reward gets them: the text of the tokens, without BOS"""
    columns: dict[str, list[Any]]
    """metadata by column name, each of length n"""
    notes: tuple[str, ...]
    """sentences for the user about prompts that were dropped or cut, and settings without effect"""
    eval_rows: tuple[Row, ...] = ()
    """at most ``prompts.eval.limit`` raw rows, spread evenly over the set: the evaluation prompts
    unless others are configured; empty if the prompts are the BOS token alone"""
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """n prompts as conversations, if the chat template rendered them; else empty"""
    mix: tuple[tuple[int, float], ...] = ()
    """size and weight of each source of a mix, whose prompts follow one another; else empty"""

    def __len__(self) -> int:
        return len(self.token_ids)

    def indices(self, start: int, count: int, *, seed: int, shuffle: bool) -> list[int]:
        """Indices of the prompts at positions ``start`` to ``start + count - 1`` of the endless
        order: that of :func:`prompt_indices`, or with a mix of :func:`source_counts`, in which each
        source goes through its own prompts by the former."""
        if self.mix:
            return self._mixed_indices(start, count, seed=seed, shuffle=shuffle)
        return prompt_indices(start, count, n=len(self), seed=seed, shuffle=shuffle)

    def _mixed_indices(self, start: int, count: int, *, seed: int, shuffle: bool) -> list[int]:
        """As :meth:`indices`, of a mix."""
        sizes, weights = zip(*self.mix, strict=True)
        indices, offset = np.zeros(count, np.int64), 0
        for size, counts in zip(sizes, source_counts(start, count, weights), strict=True):
            first, end = int(counts[0]), int(counts[-1])
            indices[np.diff(counts) > 0] = np.array(prompt_indices(
                first, end - first, n=size, seed=seed, shuffle=shuffle), np.int64) + offset
            offset += size
        return [int(index) for index in indices]

    def batch(self, indices: Sequence[int], episodes: Sequence[int], pad_id: int) -> PromptBatch:
        """The prompts at ``indices`` [B], which may repeat, for the samples ``episodes`` [B] of the
        run, left-padded to the longest; any id will do as ``pad_id``, since it is masked."""
        rows = self.rows(indices)
        tokens, mask = padded_left(rows.token_ids, pad_id)
        return PromptBatch(tokens, mask, rows.texts, rows.columns, list(episodes), rows.messages)

    def digest(self) -> str:
        """SHA-256 (hex) over token ids and metadata: equal exactly if a resumed run has the same.

        Texts are left out, since they follow from the ids. Of metadata that JSON can't hold, such
        as an object passed from Python, only the type counts, and of a date also its text.
        """
        sha, names = hashlib.sha256(), sorted(self.columns)
        rows = ([ids, [self.columns[name][i] for name in names]]
                for i, ids in enumerate(self.token_ids))
        for row in chain([names], rows):
            sha.update(json.dumps(_canonical(row), separators=(",", ":")).encode() + b"\n")
        return sha.hexdigest()


def padded_left(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, [B, Q] each, padded on the left to the longest of B rows."""
    lengths = torch.tensor(list(map(len, rows)), dtype=torch.int64)
    width = max(map(len, rows), default=0)
    filled = [[fill] * (width - len(row)) + list(row) for row in rows]
    return torch.tensor(filled, dtype=torch.int64).reshape(len(rows), width), (
        torch.arange(width)[None, :] >= width - lengths[:, None])


def prompt_indices(start: int, count: int, *, n: int, seed: int, shuffle: bool) -> list[int]:
    """Indices of the ``count`` prompts from position ``start`` on of the endless order. Position p
    belongs to epoch ``p // n``. Each epoch goes through all n prompts once, in the order of their
    source or, with ``shuffle``, in a permutation that depends on (seed, epoch) alone."""
    indices: list[int] = []
    end = start + count
    for epoch in range(start // n, -(-end // n)):
        order = _order(n, seed, epoch) if shuffle else np.arange(n)
        indices += order[max(start - epoch * n, 0):end - epoch * n].tolist()
    return indices


def source_counts(start: int, count: int, weights: Sequence[float]
                  ) -> list[npt.NDArray[np.int64]]:
    """How many prompts of each source of a mix lie before the positions ``start`` to ``start +
    count``: K arrays [count + 1], which grow by 1 behind a position of that source.

    They are a function of position and weights alone. The heaviest source has its share of all
    positions, rounded; the next one its share of what is left, and so on. Before any position,
    each of two sources is at most half a prompt away from its exact share, and of three less than
    one.
    """
    counts, rest = [np.zeros(0, np.int64)] * len(weights), np.arange(start, start + count + 1)
    left = list(weights)
    for source in sorted(range(len(weights)), key=lambda i: -weights[i]):
        share = weights[source] / math.fsum(left)
        left[source] = 0.0
        counts[source] = np.floor(rest * share + 0.5).astype(np.int64)
        rest = rest - counts[source]
    return counts


@lru_cache(8)
def _order(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The permutation of an epoch; cached, since each of many steps takes a part of it."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def _canonical(value: Any) -> Any:
    """``value`` in lists, texts, numbers, booleans and None, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_canonical(cell) for cell in value]
    if isinstance(value, Mapping):
        pairs = ([str(name), _canonical(cell)] for name, cell in value.items())
        return ["map", *sorted(pairs, key=lambda pair: pair[0])]
    if hasattr(value, "tolist"):  # numpy and torch
        return _canonical(value.tolist())
    return [type(value).__qualname__, value.isoformat() if hasattr(value, "isoformat") else ""]


# Training data ------------------------------------------------------------------------------------

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Rows(RowRecord):
    """n rows of training data, in the order of their source."""

    places: list[str]
    """n places in the source, as in ``line 3 of reviews.jsonl``"""
    notes: tuple[str, ...]
    """sentences for the user about rows that were left out or cut, and settings without effect"""

    def __len__(self) -> int:
        return len(self.places)

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
