"""The prompts of a run: loaded and tokenised once, served in left-padded batches. The prompts of a
step depend on its position alone, so that a position is all that a resume needs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ppocli.config.schema import PromptsConfig
from ppocli.data import chat_text
from ppocli.data.columns import joined, rows_of
from ppocli.data.files import Row
from ppocli.data.sources import Source, evaluation_spec, open_rows, training_spec
from ppocli.data.tokens import encode
from ppocli.errors import InputError


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

    def first(self, count: int) -> Self:
        """The first ``count`` rows, possibly none, with all padding."""
        return rows_of(self, slice(count))

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
class PromptSet:
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

    def __len__(self) -> int:
        return len(self.token_ids)

    def batch(self, indices: Sequence[int], episodes: Sequence[int], pad_id: int) -> PromptBatch:
        """B prompts, left-padded to the longest of them.

        Args:
            indices: [B] positions in this set; may repeat.
            episodes: [B] numbers of the samples within the run.
            pad_id: id in padded places; any valid id works, since they are masked.
        """
        rows = self.rows(indices)
        tokens, mask = padded_left(rows.token_ids, pad_id)
        return PromptBatch(tokens, mask, rows.texts, rows.columns, list(episodes), rows.messages)

    def rows(self, places: Sequence[int]) -> Self:
        """The prompts at ``places``, with the notes of the whole set."""
        return rows_of(self, list(places))

    def digest(self) -> str:
        """SHA-256 (hex) over token ids and metadata: equal exactly if a resumed run has the same.

        Texts are left out, since they follow from the ids. Of metadata that JSON can't hold, such
        as an object passed from Python, only the type counts, and of a date also its text.
        """
        sha = hashlib.sha256()
        names = sorted(self.columns)
        sha.update(_canonical_json(names))
        for i, ids in enumerate(self.token_ids):
            sha.update(_canonical_json([ids, [self.columns[name][i] for name in names]]))
        return sha.hexdigest()


def padded_left(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, [B, Q] each, padded on the left to the longest of B rows."""
    width = max(map(len, rows), default=0)
    tokens = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows],
                          dtype=torch.int64).reshape(len(rows), width)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return tokens, torch.arange(width)[None, :] >= width - lengths[:, None]


def load_prompts(cfg: PromptsConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
                 items: list[Any] | None = None, whole: bool = False) -> PromptSet:
    """The training prompts.

    Rows come from ``cfg.path`` or ``cfg.items``; without either, the set is one prompt: the BOS
    token alone, with the text "". Blank prompts are dropped, duplicates kept, long prompts cut or,
    with ``cfg.overlong=drop``, dropped; the notes count them. :func:`prompt_indices` applies
    ``cfg.shuffle``.

    Args:
        seed: of the length sampler.
        max_prompt_tokens: tokens that the model can read besides the response; at least 1.
        items: prompts from Python (texts or mappings) in place of ``cfg.path``.
        whole: whether an encoder reads the prompts, instead of a causal model that continues them.

    Raises:
        ConfigError: contradictory keys, or a template that names no column.
        InputError: the source is missing, unreadable or empty, a row has no prompt, a column is
            missing, or the tokenizer has no chat template or no token to start from.
    """
    spec = training_spec(cfg, items)
    if not spec.has_source:
        return _bos_set(tokenizer, 1)
    notes: list[str] = []
    rows = chat_text.take_rows(open_rows(spec, notes), spec, notes, most=spec.limit)
    return _build(rows, spec, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens,
                  notes=notes, num_eval=cfg.eval.limit, whole=whole)


def load_eval_prompts(cfg: PromptsConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int,
                      training: PromptSet, items: list[Any] | None = None, whole: bool = False
                      ) -> PromptSet:
    """The evaluation prompts: at most ``cfg.eval.limit``, spread evenly over their source.

    The source is ``items``, ``cfg.eval.items``, ``cfg.eval.path``, or another split or
    configuration of ``cfg.path``; without any, the rows of ``training``. Keys of ``cfg.eval`` that
    are null take the value in ``cfg``. The result depends on the arguments alone, so it stays the
    same for the whole run and across resumes.

    Args:
        training: the result of :func:`load_prompts` for the same ``cfg``.
        items: evaluation prompts from Python.
        whole: as of :func:`load_prompts`.

    Raises:
        ConfigError, InputError: as :func:`load_prompts`.
    """
    spec = evaluation_spec(cfg, items)
    notes: list[str] = []
    if not spec.has_source and not training.eval_rows:
        return _bos_set(tokenizer, cfg.eval.limit)
    source = open_rows(spec, notes) if spec.has_source else training.eval_rows
    # read the whole source: its first rows are often of one kind (imdb is sorted by label)
    rows = chat_text.take_rows(source, spec, notes)
    if spec.overlong != "drop":  # else spread the rows that are left
        rows = _spread(rows, cfg.eval.limit)
    prompts = _build(rows, spec, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens,
                     notes=notes, whole=whole)
    return prompts.rows(_evenly(len(prompts), cfg.eval.limit))


def prompt_indices(start: int, count: int, *, n: int, seed: int, shuffle: bool) -> list[int]:
    """Indices of the prompts at positions ``start`` to ``start + count - 1`` of the endless order.

    Position p belongs to epoch ``p // n``. Each epoch goes through all n prompts once, in the order
    of their source or, shuffled, in a permutation that depends on (seed, epoch) alone.

    Args:
        start: first position, at least 0: the number of prompts used before.
        count: number of positions; may span several epochs.
        n: size of the prompt set, at least 1.
        seed: at least 0.
        shuffle: use a new permutation in each epoch.
    """
    indices: list[int] = []
    end = start + count
    for epoch in range(start // n, -(-end // n)):
        order = _order(n, seed, epoch) if shuffle else np.arange(n)
        indices += order[max(start - epoch * n, 0):end - epoch * n].tolist()
    return indices


@lru_cache(2)
def _order(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The permutation of an epoch; cached, since each of many steps takes a part of it."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def _build(rows: list[Row], spec: Source, tokenizer: Any, *, seed: int,
           max_prompt_tokens: int, notes: list[str], whole: bool, num_eval: int = 0) -> PromptSet:
    columns = chat_text.metadata(rows, spec)
    cells = chat_text.prompt_cells(rows, spec, notes)
    if spec.tools is not None and spec.tools not in chat_text.column_names(rows):
        raise chat_text.no_column(spec.tools, rows[0], f"{spec.key}.tools={spec.tools}")
    encoded = encode(chat_text.prompt_texts(cells, rows, spec, tokenizer), spec, tokenizer,
                     seed=seed, max_prompt_tokens=max_prompt_tokens, whole=whole)
    drops = spec.overlong == "drop"
    if not encoded.kept and encoded.overlong:
        raise InputError(f"All prompts are longer than {encoded.longest} tokens "
                         f"({encoded.overlong} of {len(rows)}).", where=f"{spec.key}.overlong=drop",
                         fix=f"{spec.key}.overlong=cut, or a higher {spec.key}.max_length or lower "
                             "generation.max_new_tokens")
    if not encoded.kept:
        raise InputError(f"The tokenizer returns no token for any of the {len(rows)} prompts.",
                         where=f"{spec.key}.column={spec.column}",
                         fix="is it the tokenizer of this model? (model.tokenizer_path)")
    same = len(encoded.kept) - len({tuple(ids) for ids in encoded.token_ids})
    chat_text.note_count(notes, len(rows) - len(encoded.kept) - drops * encoded.overlong,
                         "had no token: dropped")
    chat_text.note_count(notes, encoded.overlong, f"{{was}} longer than {encoded.longest} tokens: "
                         + ("dropped" if drops else f"cut on the {spec.truncation_side}"))
    chat_text.note_count(notes, same, "{was} the same as an earlier one: kept")
    chat_text.note_tools(notes, ((row.place, cell, chat_text.row_tools(row, spec))
                                 for row, cell in zip(rows, cells, strict=True)),
                         tokenizer, column=spec.tools or "")
    return PromptSet(
        token_ids=encoded.token_ids, texts=encoded.texts,
        columns={name: [values[i] for i in encoded.kept] for name, values in columns.items()},
        messages=[cells[i] for i in encoded.kept] if spec.chat else [], notes=tuple(notes),
        eval_rows=tuple(_spread([rows[i] for i in encoded.kept] if drops else rows, num_eval)))


def _bos_set(tokenizer: Any, n: int) -> PromptSet:
    """n prompts of one token, which starts a text: BOS, or EOS for a tokenizer without BOS."""
    name = "BOS" if tokenizer.bos_token_id is not None else "EOS"
    token = tokenizer.bos_token_id if name == "BOS" else tokenizer.eos_token_id
    if token is None:
        raise InputError("There are no prompts, and the tokenizer has neither a BOS nor an EOS "
                         "token to start from.", where="prompts.path=null",
                         fix="prompts.path=FILE or prompts.items=[...]")
    return PromptSet(token_ids=[[token]] * n, texts=[""] * n, columns={},
                     notes=(f"no prompts were given: every response starts from {name} alone",))


def _spread(rows: list[Row], most: int) -> list[Row]:
    """At most ``most`` rows, evenly spread, each with all columns of all rows (None if empty)."""
    names = chat_text.column_names(rows)
    picked = (rows[i] for i in _evenly(len(rows), most))
    return [replace(row, values={name: row.values.get(name) for name in names}) for row in picked]


def _evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` places, evenly spread."""
    picked = min(count, most)
    return [i * count // picked for i in range(picked)]


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
    return [type(value).__qualname__, value.isoformat() if hasattr(value, "isoformat") else ""]
