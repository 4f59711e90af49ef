"""The prompts of a run: loaded once, tokenised once, handed out in left-padded batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import torch

from ppocli.config.schema import PromptsConfig
from ppocli.data.batch import PromptBatch
from ppocli.data.files import Row
from ppocli.data.render import column_names, metadata, prompt_texts, take_rows
from ppocli.data.sources import open_rows
from ppocli.data.spec import PromptSpec, evaluation_spec, training_spec
from ppocli.data.tokenise import bos_alone, encode
from ppocli.errors import InputError
from ppocli.text import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PromptSet:
    """n tokenised prompts. Made by the loaders below, read by rollout and evaluation."""

    token_ids: list[list[int]]
    """n lists of token ids, none empty, unpadded"""
    texts: list[str]
    """n prompts as the reward sees them: what the tokens say, without BOS"""
    columns: dict[str, list[Any]]
    """metadata by column name, each of length n"""
    notes: list[str]
    """sentences for the user about what was dropped, cut or ignored"""
    eval_rows: tuple[Row, ...] = ()
    """raw rows spread evenly over the set, at most ``prompts.eval.limit``, which become the
    evaluation prompts when no others are given; empty if the prompts are the BOS token alone"""

    def __len__(self) -> int:
        return len(self.token_ids)

    def batch(self, indices: Sequence[int], episodes: Sequence[int], pad_id: int) -> PromptBatch:
        """B prompts, left-padded to the longest of them.

        Args:
            indices: [B] positions in this set; may repeat.
            episodes: [B] numbers of the samples within the run.
            pad_id: id in padded places; those are masked, so any valid id will do.
        """
        if len(indices) != len(episodes):
            raise ValueError(f"{len(indices)} indices but {len(episodes)} episodes")
        rows = [self.token_ids[i] for i in indices]
        width = max((len(row) for row in rows), default=0)
        tokens = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows],
                              dtype=torch.int64).reshape(len(rows), width)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        mask = torch.arange(width)[None, :] >= width - lengths[:, None]
        return PromptBatch(
            tokens=tokens, mask=mask, texts=[self.texts[i] for i in indices],
            columns={name: [cells[i] for i in indices] for name, cells in self.columns.items()},
            indices=list(indices), episodes=list(episodes))

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


def load_prompts(cfg: PromptsConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int,
                 max_prompt_tokens: int, items: list[Any] | None = None, whole: bool = False
                 ) -> PromptSet:
    """The training prompts.

    Rows are read from ``cfg.path`` or ``cfg.items``; without either, the set is one prompt, the BOS
    token alone with the text "". Blank prompts are dropped, duplicates kept, long ones cut; the
    notes count them. ``cfg.shuffle`` is left to :mod:`ppocli.data.batch`.

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
    rows, blank = take_rows(open_rows(spec, notes), spec, most=spec.limit)
    notes.extend(_blank_note(blank))
    return _build(rows, spec, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens,
                  notes=notes, eval_rows=tuple(_spread(rows, cfg.eval.limit)), whole=whole)


def load_eval_prompts(cfg: PromptsConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int,
                      max_prompt_tokens: int, training: PromptSet,
                      items: list[Any] | None = None, whole: bool = False) -> PromptSet:
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
    rows, blank = take_rows(source, spec, most=None)
    notes.extend(_blank_note(blank))
    return _build(_spread(rows, cfg.eval.limit), spec, tokenizer, seed=seed,
                  max_prompt_tokens=max_prompt_tokens, notes=notes, whole=whole)


def _build(rows: list[Row], spec: PromptSpec, tokenizer: PreTrainedTokenizerBase, *, seed: int,
           max_prompt_tokens: int, notes: list[str], whole: bool,
           eval_rows: tuple[Row, ...] = ()) -> PromptSet:
    columns = metadata(rows, spec)
    encoded = encode(prompt_texts(rows, spec, tokenizer), spec, tokenizer, seed=seed,
                     max_prompt_tokens=max_prompt_tokens, whole=whole)
    if not encoded.kept:
        raise InputError(f"The tokenizer makes no token of any of the {len(rows)} prompts.",
                         where=f"{spec.key}.column={spec.column}",
                         fix="is it the tokenizer of this model? (model.tokenizer_path)")
    notes = [*notes, *_counted(len(rows) - len(encoded.kept), "had no token: dropped"),
             *_counted(encoded.cut, f"longer than {encoded.longest} tokens: cut on the "
                                    f"{spec.truncation_side}", verb=True),
             *_counted(len(encoded.kept) - len({tuple(ids) for ids in encoded.token_ids}),
                       "the same as an earlier one: kept", verb=True)]
    return PromptSet(
        token_ids=encoded.token_ids, texts=encoded.texts,
        columns={name: [cells[i] for i in encoded.kept] for name, cells in columns.items()},
        notes=notes, eval_rows=eval_rows)


def _bos_set(tokenizer: PreTrainedTokenizerBase, n: int) -> PromptSet:
    token, name = bos_alone(tokenizer)
    return PromptSet(token_ids=[[token]] * n, texts=[""] * n, columns={},
                     notes=[f"no prompts were given: every response starts from {name} alone"])


def _spread(rows: list[Row], most: int) -> list[Row]:
    """At most ``most`` rows, evenly spread, each with every column of the whole (None if empty)."""
    count = min(len(rows), most)
    names = column_names(rows)
    picked = (rows[i * len(rows) // count] for i in range(count))
    return [Row(row.place, {name: row.values.get(name) for name in names}) for row in picked]


def _blank_note(blank: int) -> Iterable[str]:
    return _counted(blank, "blank: dropped", verb=True)


def _counted(count: int, what: str, *, verb: bool = False) -> Iterable[str]:
    if count:
        was = (" was" if count == 1 else " were") if verb else ""
        yield f"{counted(count, 'prompt')}{was} {what}"


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
    if isinstance(value, bytes):
        text = value.hex()
    elif isinstance(value, datetime | date | time):
        text = value.isoformat()
    elif isinstance(value, Decimal):
        text = str(value)
    else:
        text = ""
    return [type(value).__qualname__, text]
