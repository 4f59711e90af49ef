"""The prompts of a run: loaded once, tokenised once, handed out in left-padded batches. Which of
them a step uses is a pure function, so that a position is all a resume needs."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ppocli.columns import joined, rows_of
from ppocli.config.schema import PromptsConfig
from ppocli.data import render
from ppocli.data.files import Row
from ppocli.data.sources import Source, evaluation_spec, open_rows, training_spec
from ppocli.data.tokens import encode
from ppocli.errors import InputError


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """B prompts, left-padded to Q tokens. Made by :meth:`PromptSet.batch`,
    read by the rollout."""

    tokens: torch.Tensor
    """[B, Q] int64 token ids; padding carries the pad id."""
    mask: torch.Tensor
    """[B, Q] bool, true on prompt tokens. Every row has at least one."""
    texts: list[str]
    """[B] the prompts as the reward sees them."""
    columns: dict[str, list[Any]]
    """metadata by column name, each of length B"""
    episodes: list[int]
    """[B] number of the sample within the run; sampling noise is a function of it"""
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """[B] conversations, as of :class:`PromptSet`"""

    def __len__(self) -> int:
        return len(self.texts)

    def first(self, count: int) -> Self:
        """The first ``count`` rows, padding and all, which may be none."""
        return rows_of(self, slice(count))

    def rows(self, places: Sequence[int]) -> Self:
        """The rows at ``places``, with the padding that none of them needs cut off."""
        batch = rows_of(self, list(places))
        longest = max(int(batch.mask.sum(1).max()), 1)
        return replace(batch, tokens=batch.tokens[:, -longest:], mask=batch.mask[:, -longest:])

    @staticmethod
    def joined(parts: "Sequence[PromptBatch]") -> "PromptBatch":
        """The rows of several, padded to the widest."""
        width = max(part.tokens.shape[1] for part in parts)

        def widened(part: PromptBatch) -> PromptBatch:
            pad = partial(torch.nn.functional.pad, pad=(width - part.tokens.shape[1], 0))
            return replace(part, tokens=pad(part.tokens), mask=pad(part.mask))
        return joined(list(map(widened, parts)))


@dataclass(frozen=True, slots=True)
class PromptSet:
    """n tokenised prompts. Made by the loaders below, read by rollout and evaluation."""

    token_ids: list[list[int]]
    """n lists of token ids, none empty, unpadded"""
    texts: list[str]
    """n prompts as the reward sees them: what the tokens say, without BOS"""
    columns: dict[str, list[Any]]
    """metadata by column name, each of length n"""
    notes: tuple[str, ...]
    """sentences for the user about what was dropped, cut or ignored"""
    eval_rows: tuple[Row, ...] = ()
    """raw rows spread evenly over the set, at most ``prompts.eval.limit``, which become the
    evaluation prompts when no others are given; empty if the prompts are the BOS token alone"""
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """n prompts as conversations, where the chat template rendered them; else empty"""
    warnings: tuple[str, ...] = ()
    """sentences about what is likely wrong with them"""

    def __len__(self) -> int:
        return len(self.token_ids)

    def batch(self, indices: Sequence[int], episodes: Sequence[int], pad_id: int) -> PromptBatch:
        """B prompts, left-padded to the longest of them.

        Args:
            indices: [B] positions in this set; may repeat.
            episodes: [B] numbers of the samples within the run.
            pad_id: id in padded places; those are masked, so any valid id will do.
        """
        rows = self.rows(indices)
        tokens, mask = padded_left(rows.token_ids, pad_id)
        return PromptBatch(tokens, mask, rows.texts, rows.columns, list(episodes), rows.messages)

    def rows(self, places: Sequence[int]) -> Self:
        """The prompts at ``places``, with what is said of the whole."""
        return rows_of(self, list(places))

    def digest(self) -> str:
        """SHA-256 (hex) over token ids and metadata: equal exactly if a resumed run sees the same.

        Texts are left out, they follow from the ids. Metadata of a kind that no file format here
        can hold (an object handed over from Python) counts by its type alone.
        """
        sha = hashlib.sha256()
        names = sorted(self.columns)
        sha.update(_canonical_json(names))
        for i, ids in enumerate(self.token_ids):
            sha.update(_canonical_json([ids, [self.columns[name][i] for name in names]]))
        return sha.hexdigest()


def padded_left(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, Q] ids and mask, padded on the left to the longest of B rows."""
    width = max(map(len, rows), default=0)
    tokens = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows],
                          dtype=torch.int64).reshape(len(rows), width)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return tokens, torch.arange(width)[None, :] >= width - lengths[:, None]


def load_prompts(cfg: PromptsConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
                 items: list[Any] | None = None, whole: bool = False) -> PromptSet:
    """The training prompts.

    Rows are read from ``cfg.path`` or ``cfg.items``; without either, the set is one prompt, the BOS
    token alone with the text "". Blank prompts are dropped, duplicates kept, long ones cut or, with
    ``cfg.overlong=drop``, dropped; the notes count them. ``cfg.shuffle`` is left to
    :func:`prompt_indices`.

    Args:
        seed: of the length sampler.
        max_prompt_tokens: what fits the model beside the response; at least 1.
        items: prompts given from Python (texts or mappings); they replace ``cfg.path``.
        whole: whether an encoder reads them, instead of a causal model that continues them.

    Raises:
        ConfigError: contradictory keys, a template that names no column.
        InputError: the source is missing, unreadable or empty, a row holds no prompt, a column is
            missing, or the tokenizer lacks what is needed.
    """
    spec = training_spec(cfg, items)
    if not spec.has_source:
        return _bos_set(tokenizer, 1)
    notes: list[str] = []
    rows = render.take_rows(open_rows(spec, notes), spec, notes, most=spec.limit)
    return _build(rows, spec, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens,
                  notes=notes, num_eval=cfg.eval.limit, whole=whole)


def load_eval_prompts(cfg: PromptsConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
                      training: PromptSet, items: list[Any] | None = None, whole: bool = False
                      ) -> PromptSet:
    """The evaluation prompts: at most ``cfg.eval.limit``, spread evenly over their source.

    The source is ``items``, ``cfg.eval.items``, ``cfg.eval.path``, or another split or
    configuration of ``cfg.path``; without any, the rows of ``training``. Keys of ``cfg.eval`` that
    are null take those of ``cfg``. The result is a function of the arguments alone, so it stays the
    same for the whole run and across resumes.

    Args:
        training: what :func:`load_prompts` returned for the same ``cfg``.
        items: evaluation prompts given from Python.
        whole: as of :func:`load_prompts`.

    Raises:
        ConfigError, InputError: as :func:`load_prompts`.
    """
    spec = evaluation_spec(cfg, items)
    notes: list[str] = []
    if not spec.has_source and not training.eval_rows:
        return _bos_set(tokenizer, cfg.eval.limit)
    source = open_rows(spec, notes) if spec.has_source else training.eval_rows
    # the whole source is read: its first rows are often of one kind (imdb is sorted by label)
    rows = render.take_rows(source, spec, notes)
    if spec.overlong != "drop":  # else whatever is left is spread
        rows = _spread(rows, cfg.eval.limit)
    prompts = _build(rows, spec, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens,
                     notes=notes, whole=whole)
    return prompts.rows(_evenly(len(prompts), cfg.eval.limit))


def prompt_indices(start: int, count: int, *, n: int, seed: int, shuffle: bool) -> list[int]:
    """Which prompts stand at positions ``start`` to ``start + count - 1`` of the endless order.

    Position p belongs to epoch ``p // n``. Each epoch goes through all n prompts once, in their own
    order, or, shuffled, in a permutation that depends on (seed, epoch) alone.

    Args:
        start: first position, at least 0: how many prompts were used before.
        count: how many; may span several epochs.
        n: size of the prompt set, at least 1.
        seed: at least 0.
        shuffle: draw a new order for each epoch.
    """
    indices: list[int] = []
    end = start + count
    for epoch in range(start // n, -(-end // n)):
        order = _order(n, seed, epoch) if shuffle else np.arange(n)
        indices += order[max(start - epoch * n, 0):end - epoch * n].tolist()
    return indices


@lru_cache(2)
def _order(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The permutation of an epoch; kept, for many steps take a part of it each."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def _build(rows: list[Row], spec: Source, tokenizer: Any, *, seed: int,
           max_prompt_tokens: int, notes: list[str], whole: bool, num_eval: int = 0) -> PromptSet:
    columns = render.metadata(rows, spec)
    cells = render.prompt_cells(rows, spec, notes)
    if spec.tools is not None and spec.tools not in render.column_names(rows):
        raise render.no_column(spec.tools, rows[0], f"{spec.key}.tools={spec.tools}")
    encoded = encode(render.prompt_texts(cells, rows, spec, tokenizer), spec, tokenizer,
                     seed=seed, max_prompt_tokens=max_prompt_tokens, whole=whole)
    drops = spec.overlong == "drop"
    if not encoded.kept and encoded.overlong:
        raise InputError(f"All prompts are longer than {encoded.longest} tokens "
                         f"({encoded.overlong} of {len(rows)}).", where=f"{spec.key}.overlong=drop",
                         fix=f"{spec.key}.overlong=cut, or a higher {spec.key}.max_length or lower "
                             "generation.max_new_tokens")
    if not encoded.kept:
        raise InputError(f"The tokenizer makes no token of any of the {len(rows)} prompts.",
                         where=f"{spec.key}.column={spec.column}",
                         fix="is it the tokenizer of this model? (model.tokenizer_path)")
    same = len(encoded.kept) - len({tuple(ids) for ids in encoded.token_ids})
    render.note_count(notes, len(rows) - len(encoded.kept) - drops * encoded.overlong,
                      "had no token: dropped")
    render.note_count(notes, encoded.overlong, f"{{was}} longer than {encoded.longest} tokens: " + (
        "dropped" if drops else f"cut on the {spec.truncation_side}"))
    render.note_count(notes, same, "{was} the same as an earlier one: kept")
    render.note_tools(notes, ((row.place, cell, render.row_tools(row, spec)) for row, cell in zip(
        rows, cells, strict=True)), tokenizer, prompt=True, column=spec.tools or "")
    return PromptSet(
        token_ids=encoded.token_ids, texts=encoded.texts,
        columns={name: [values[i] for i in encoded.kept] for name, values in columns.items()},
        messages=[cells[i] for i in encoded.kept] if spec.chat else [],
        notes=tuple(notes), warnings=() if not encoded.ended else (render.ends_in_eos(
            [rows[i] for i in encoded.ended], tokenizer.eos_token),),
        eval_rows=tuple(_spread([rows[i] for i in encoded.kept] if drops else rows, num_eval)))


def _bos_set(tokenizer: Any, n: int) -> PromptSet:
    """The id that starts a text, n times: BOS, or EOS where a tokenizer has no BOS."""
    name = "BOS" if tokenizer.bos_token_id is not None else "EOS"
    token = tokenizer.bos_token_id if name == "BOS" else tokenizer.eos_token_id
    if token is None:
        raise InputError("There are no prompts, and the tokenizer has neither a BOS nor an EOS "
                         "token to start from.", where="prompts.path=null",
                         fix="prompts.path=FILE or prompts.items=[...]")
    return PromptSet(token_ids=[[token]] * n, texts=[""] * n, columns={},
                     notes=(f"no prompts were given: every response starts from {name} alone",))


def _spread(rows: list[Row], most: int) -> list[Row]:
    """At most ``most`` rows, evenly spread, each with every column of the whole (None if empty)."""
    names = render.column_names(rows)
    picked = (rows[i] for i in _evenly(len(rows), most))
    return [replace(row, values={name: row.values.get(name) for name in names}) for row in picked]


def _evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of so many places."""
    picked = min(count, most)
    return [i * count // picked for i in range(picked)]


_TEXTS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (bytes, bytes.hex), ((date, time), lambda value: value.isoformat()), (Decimal, str))
"""cells that JSON can't hold, and how they are written"""


def _canonical_json(value: Any) -> bytes:
    return json.dumps(_canonical(value), separators=(",", ":")).encode() + b"\n"


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
    write = next((write for kinds, write in _TEXTS if isinstance(value, kinds)), lambda value: "")
    return [type(value).__qualname__, write(value)]
