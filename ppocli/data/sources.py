"""Sources of prompts and training data: the keys of ``prompts``, ``prompts.eval`` or ``data``, and
the raw rows that they name, in files, folders, saved data sets, the Hub, or inline lists."""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from ppocli.builtin.names import BUILTIN_PREFIX, resolve_builtin
from ppocli.config import schema
from ppocli.config.row_paths import row_paths
from ppocli.config.text import nearest
from ppocli.data.arrow_rows import batch_rows, dataset_rows, without_nulls
from ppocli.data.dataset_rows import folder_rows, hub_rows, url_rows
from ppocli.data.files import SUFFIX_WORDS, SUFFIXES, Row, holds_rows, read_file
from ppocli.errors import ConfigError, InputError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


@dataclass(kw_only=True)
class Source(schema.PromptsConfig):
    """The effective keys of one set: where its rows come from, and how they become texts. Made here
    and in :mod:`ppocli.data.examples`, read by the other modules of this package. ``column`` is the
    column of prompts, and of bare texts."""

    key: str = "prompts"
    """``prompts``, ``prompts.eval`` or ``data``: how errors name the settings"""
    noun: str = "prompt"
    """a row's content, for errors: ``prompt`` or ``data``"""
    path_key: str = "prompts.path"
    """the key that ``path`` comes from; evaluation prompts may inherit it"""
    split_is_set: bool
    """whether the split was set for this source, so that a note says where it has no effect"""

    @property
    def where(self) -> str:
        """The source, for errors."""
        return f"{self.path_key}={self.path}" if self.items is None else f"{self.key}.items"

    @property
    def has_source(self) -> bool:
        """False if the prompts are the BOS token alone."""
        return self.path is not None or self.items is not None


def training_spec(cfg: schema.PromptsConfig, items: list[Any] | None) -> Source:
    """The source of the training prompts.

    Args:
        items: prompts from Python, in place of ``prompts.path``.

    Raises:
        ConfigError: ``items`` is one text in place of a list.
    """
    if items is None:
        items = cfg.items
    return Source(split_is_set=cfg.split != "train", **vars(cfg) | {
        "items": as_list(items), "path": cfg.path if items is None else None})


def evaluation_spec(cfg: schema.PromptsConfig, items: list[Any] | None) -> Source:
    """The source of the evaluation prompts. Keys of ``prompts.eval`` that are null take their value
    in ``prompts``.

    The result has a path or items only if some are set for evaluations: ``items``,
    ``prompts.eval.items``, ``prompts.eval.path``, or another ``split`` or ``name`` of
    ``prompts.path``.

    Raises:
        ConfigError: as :func:`training_spec`.
    """
    section, path = cfg.eval, cfg.eval.path
    if items is None:
        items = section.items
    if path is None and items is None and (section.split is not None or section.name is not None):
        path = cfg.path
    overrides = {name: value for name, value in vars(section).items()
                 if value is not None and name != "repeat"}
    return Source(key="prompts.eval", split_is_set=section.split is not None,
                  path_key="prompts.path" if section.path is None else "prompts.eval.path",
                  **vars(cfg) | overrides | {"path": path, "items": as_list(
                      items, where="prompts.eval.items")})


def as_list(items: Any, what: str = "Inline prompts", where: str = "prompts.items"
            ) -> list[Any] | None:
    """Rows from Python, in a list or a table, as a list; None for None.

    Raises:
        ConfigError: one text or mapping in place of a list.
    """
    if items is None:
        return None
    if hasattr(items, "to_batches") and hasattr(items, "schema"):  # a table of pyarrow
        return list(batch_rows(items.to_batches(), items.schema))
    if hasattr(items, "with_format") and hasattr(items, "features"):  # a data set of `datasets`
        return list(dataset_rows(items))
    if hasattr(items, "columns"):  # a table of pandas or polars: it iterates over columns
        as_rows = getattr(items, "to_dicts", None)
        if as_rows or hasattr(items, "to_dict"):
            return [{name: without_nulls(cell) for name, cell in row.items()}
                    for row in (as_rows() if as_rows else items.to_dict("records"))]
    try:
        if not isinstance(items, str | bytes | Mapping):
            return list(items)
    except TypeError:  # it can't be iterated over, such as a path
        pass
    raise ConfigError(f"{what} must be a list, not one {type(items).__name__}.", where=where,
                      fix="put it in a list: [...]")


def open_rows(spec: Source, notes: list[str]) -> Iterator[Row]:
    """The rows of a source, in its order.

    ``spec.path`` is a path on this machine if it starts with ``.``, ``/`` or ``~``, exists, ends
    like a prompt file, or can't be a Hub name; relative paths start from the current directory.
    ``builtin:NAME`` stands for prompts that come with ppocli; a pattern such as ``data/*.jsonl``
    for all files that match, sorted by name; ``{a,b}`` for a, then b; ``https://`` and ``hf://``
    for a download. Anything else is a data set on the Hub.

    Args:
        spec: has ``items`` or a ``path``.
        notes: sentences about settings without effect are appended here.

    Raises:
        InputError: nothing is there, it can't be read, or the Hub is needed and can't be reached.
    """
    if spec.items is not None:
        return _inline_rows(spec, spec.items)
    assert spec.path is not None
    if not spec.path.strip():
        what, none = ("prompts", f", or {spec.path_key}=null for the BOS token alone") \
            if spec.noun == "prompt" else (spec.noun, "")
        raise InputError(f"The path of the {what} is empty.", where=f"{spec.path_key}=''",
                         fix=f"{spec.path_key}=FILE{none}")
    if len(paths := row_paths(spec.path)) > 1:
        return chain.from_iterable(open_rows(replace(spec, path=path), notes) for path in paths)
    if "://" in spec.path:
        return url_rows(spec, spec.path)
    if names_hub_dataset(spec.path):
        return hub_rows(spec, spec.path)
    path = (resolve_builtin(spec.path) if spec.path.startswith(BUILTIN_PREFIX)
            else Path(spec.path).expanduser())
    if path.is_dir():
        return folder_rows(path, spec)
    files = [path] if path.exists() else [Path(name) for name in sorted(
        glob.glob(str(path), recursive=True)) if holds_rows(Path(name))]
    if not files:
        _missing(path, spec)
    if spec.name is not None:
        notes.append(f"{path.name} has no configurations: {spec.key}.name={spec.name} was ignored")
    if spec.split_is_set:
        notes.append(f"{path.name} has no splits: {spec.key}.split={spec.split} was ignored and "
                     "all its rows were used")
    return (row for file in files for row in read_file(file, spec.column, spec.noun))


def names_hub_dataset(path: str) -> bool:
    """Whether ``prompts.path``, or one of several paths in it, names a data set on the Hub: it can
    be such a name, and means neither a file nor a built-in."""
    return any(_REPO_ID.fullmatch(each) is not None and Path(each).suffix.lower() not in SUFFIXES
               and not Path(each).exists() for each in row_paths(path))


def _missing(path: Path, spec: Source) -> NoReturn:
    parent = path.parent
    if glob.has_magic(str(path)):
        raise InputError(f"No {SUFFIX_WORDS} file matches {path} (looked in {Path.cwd()}).",
                         where=spec.where, fix="quote the pattern, so that the shell leaves it as "
                         f"it is, as in '{spec.path_key}=data/*.jsonl'; ** stands for any folders")
    if not parent.is_dir():
        raise InputError(f"{spec.noun.capitalize()} file {path} does not exist: there is no "
                         f"folder {parent} (looked in {Path.cwd()}).", where=spec.where)
    near = nearest(path.name, os.listdir(parent))
    hint = f"did you mean {' or '.join(str(parent / name) for name in near)}?" if near else (
        f"give a {SUFFIX_WORDS} file, a folder, or a Hub data set")
    raise InputError(f"{spec.noun.capitalize()} file or folder {path} does not exist (looked in "
                     f"{Path.cwd()}).", where=spec.where, fix=hint)


# Inline lists -------------------------------------------------------------------------------------

def _inline_rows(spec: Source, items: Sequence[Any]) -> Iterator[Row]:
    for number, item in enumerate(items, start=1):
        values = ({str(name): value for name, value in item.items()}
                  if isinstance(item, Mapping) else {spec.column: item})
        if spec.noun == "prompt" and spec.column not in values and "prompt" in values:
            values[spec.column] = values.pop("prompt")
        yield Row(f"item {number} of {spec.key}.items", values)


