"""What a set of prompts or of training data is made from: the keys of ``prompts``, of
``prompts.eval`` with what it inherits, or of ``data``, and the raw rows that they name: files,
folders, saved data sets, the Hub, inline lists."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ppocli.builtin.names import BUILTIN_PREFIX, resolve_builtin
from ppocli.config import hub, schema
from ppocli.data.files import SUFFIX_WORDS, SUFFIXES, Row, read_file
from ppocli.errors import ConfigError, InputError
from ppocli.text import first_line, nearest, pasted

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_SPLITS = {"training": "train", "testing": "test", "evaluation": "eval"} | {
    name: name for name in ("train", "test", "validation", "valid", "val", "dev", "eval")}
"""a word in the name of a file or folder, as the datasets library takes it, and its split"""
_WORD = re.compile(r"[^-._ 0-9]+")
_SHARD = re.compile(r"-\d{5}-of-\d{5}.*$")  # train-00000-of-00002.parquet


@dataclass(kw_only=True)
class Source(schema.PromptsConfig):
    """Where rows come from, and the texts of their prompts: the keys of ``prompts``, as they count
    for one set. Made here and by :mod:`ppocli.data.examples`, read by the other modules of the
    room. ``column`` is the name of a bare text: of prompts, the column that holds them."""

    key: str = "prompts"
    """``prompts``, ``prompts.eval`` or ``data``: how errors name the settings"""
    noun: str = "prompt"
    """what errors call a row's content: ``prompt`` or ``data``"""
    path_key: str = "prompts.path"
    """the key that gave ``path``, which an evaluation set may have inherited"""
    split_asked: bool
    """whether the split was set for this very source, so that ignoring it is worth a note"""

    @property
    def where(self) -> str:
        """How errors name the source."""
        return f"{self.path_key}={self.path}" if self.items is None else f"{self.key}.items"

    @property
    def has_source(self) -> bool:
        """False if the prompts are the BOS token alone."""
        return self.path is not None or self.items is not None


def training_spec(cfg: schema.PromptsConfig, items: list[Any] | None) -> Source:
    """The training prompts; ``items``, given from Python, replace ``prompts.path``.

    Raises:
        ConfigError: one text in place of a list.
    """
    if items is None:
        items = cfg.items
    return Source(split_asked=cfg.split != "train", **vars(cfg) | {
        "items": as_list(items), "path": cfg.path if items is None else None})


def evaluation_spec(cfg: schema.PromptsConfig, items: list[Any] | None) -> Source:
    """The evaluation prompts. Keys of ``prompts.eval`` that are null take those of ``prompts``.

    The result has a source only if one was given for evaluation: ``items``, ``prompts.eval.items``,
    ``prompts.eval.path``, or another ``split`` or ``name`` of ``prompts.path``.

    Raises:
        ConfigError: as :func:`training_spec`.
    """
    own, path = cfg.eval, cfg.eval.path
    if items is None:
        items = own.items
    if path is None and items is None and (own.split is not None or own.name is not None):
        path = cfg.path
    given = {name: value for name, value in vars(own).items()
             if value is not None and name != "repeat"}
    return Source(key="prompts.eval", split_asked=own.split is not None,
                  path_key="prompts.path" if own.path is None else "prompts.eval.path",
                  **vars(cfg) | given | {"path": path, "items": as_list(
                      items, where="prompts.eval.items")})


def as_list(items: Any, what: str = "Inline prompts", where: str = "prompts.items"
            ) -> list[Any] | None:
    """Rows from Python, a list of them or a table, as a list; None without any.

    Raises:
        ConfigError: one text or mapping in place of a list.
    """
    if items is None:
        return None
    if hasattr(items, "columns"):  # a table of pandas, polars or pyarrow: it iterates over columns
        as_rows = getattr(items, "to_dicts", getattr(items, "to_pylist", None))
        if as_rows or hasattr(items, "to_dict"):
            return list(as_rows() if as_rows else items.to_dict("records"))
    try:
        if not isinstance(items, str | bytes | Mapping):
            return list(items)
    except TypeError:  # it holds nothing, as a path
        pass
    raise ConfigError(f"{what} must be a list, not one {type(items).__name__}.", where=where,
                      fix="put it in a list: [...]")


def open_rows(spec: Source, notes: list[str]) -> Iterator[Row]:
    """The rows of a source, in the order of their source.

    ``spec.path`` is a path on this machine if it starts with ``.``, ``/`` or ``~``, exists, ends
    like a prompt file, or cannot be a Hub name; relative paths start from the current directory.
    ``builtin:NAME`` names prompts that come with ppocli. Anything else is a data set on the Hub.

    Args:
        spec: has ``items`` or a ``path``.
        notes: sentences about what was ignored are appended here.

    Raises:
        InputError: nothing there, nothing readable there, or the Hub is needed and out of reach.
    """
    if spec.items is not None:
        return _inline_rows(spec, spec.items)
    assert spec.path is not None
    if not spec.path.strip():
        what, none = ("prompts", f", or {spec.path_key}=null for the BOS token alone") \
            if spec.noun == "prompt" else (spec.noun, "")
        raise InputError(f"The path of the {what} is empty.", where=f"{spec.path_key}=''",
                         fix=f"{spec.path_key}=FILE{none}")
    if names_hub_dataset(spec.path):
        return _hub_rows(spec, spec.path)
    path = (resolve_builtin(spec.path) if spec.path.startswith(BUILTIN_PREFIX)
            else Path(spec.path).expanduser())
    if not path.exists():
        _missing(path, spec)
    if path.is_dir():
        saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        return (_saved_rows if saved else _folder_rows)(path, spec, notes)
    _note_ignored(path, spec, notes, name=True, split=True)
    return read_file(path, spec.column, spec.noun)


def names_hub_dataset(path: str) -> bool:
    """Whether ``prompts.path`` names a Hub data set: no builtin, and nothing that means a file."""
    return (_REPO_ID.fullmatch(path) is not None and Path(path).suffix.lower() not in SUFFIXES
            and not Path(path).exists())


def _missing(path: Path, spec: Source) -> NoReturn:
    parent = path.parent
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


# Files and folders --------------------------------------------------------------------------------

def _note_ignored(path: Path, spec: Source, notes: list[str], *, name: bool = False,
                  split: bool = False) -> None:
    if name and spec.name is not None:
        notes.append(f"{path.name} has no configurations: {spec.key}.name={spec.name} was ignored")
    if split and spec.split_asked:
        notes.append(f"{path.name} has no splits: {spec.key}.split={spec.split} was ignored and "
                     "all its rows were used")


def _folder_rows(folder: Path, spec: Source, notes: list[str]) -> Iterator[Row]:
    root = folder / (spec.name or "")
    if not root.is_dir():
        root = folder
        _note_ignored(folder, spec, notes, name=True)
    files = sorted(file for file in root.rglob("*")
                   if file.suffix.lower() in SUFFIXES and file.is_file()
                   and not any(part.startswith(".") for part in file.relative_to(root).parts))
    if not files:
        raise InputError(f"Folder {root} has no {spec.noun} files.",
                         where=spec.where, fix=f"it should hold {SUFFIX_WORDS} files, or what "
                         "`datasets.save_to_disk` writes")
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file.relative_to(root)), []).append(file)
    strays = splits.pop(None, [])
    if splits:
        notes.extend(f"{file.relative_to(root)} belongs to no split of {folder.name}: left out"
                     for file in strays)
        files = [file for name in _wanted_splits(spec, splits) for file in splits[name]]
    else:
        _note_ignored(folder, spec, notes, split=True)
    return (row for file in files for row in read_file(file, spec.column, spec.noun))


def _split_of(file: Path) -> str | None:
    """The split that a file belongs to by its name or its folder's, as on the Hub, or None."""
    stem, shards = _SHARD.subn("", file.stem.lower())
    names = [stem, *(part.lower() for part in reversed(file.parts[:-1]))]
    whole = next((_SPLITS[name] for name in names if name in _SPLITS), None)
    if shards and not whole:
        return stem  # train_sft-00000-of-00001 is of a split of this very name
    return whole or next((_SPLITS[word] for name in names for word in _WORD.findall(name)
                          if word in _SPLITS), None)


def _wanted_splits(spec: Source, splits: Iterable[Any]) -> list[str]:
    present = [str(name) for name in splits]
    wanted = [name.strip() for name in spec.split.split("+")]
    for name in wanted:
        if name not in present:
            near = nearest(name, present, count=1)
            raise InputError(f"There is no split {name!r} in {spec.path}; it has "
                             f"{', '.join(present)}.", where=f"{spec.key}.split={spec.split}",
                             fix=pasted(f"{spec.key}.split={(near or present)[0]}"))
    return wanted


# The datasets library -----------------------------------------------------------------------------

def _saved_rows(folder: Path, spec: Source, notes: list[str]) -> Iterator[Row]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder raises whatever arrow or json raise
        raise InputError(f"The data set saved in {folder} cannot be loaded: {first_line(error)}",
                         where=spec.where) from error
    _note_ignored(folder, spec, notes, name=True)
    if isinstance(saved, datasets.DatasetDict):
        parts = [saved[name] for name in _wanted_splits(spec, saved)]
        return (row for part in parts for row in _dataset_rows(part, folder.name))
    _note_ignored(folder, spec, notes, split=spec.split != str(saved.split))
    return _dataset_rows(saved, folder.name)


def _dataset_rows(dataset: Any, name: str) -> Iterator[Row]:
    split = f" ({dataset.split})" if dataset.split else ""
    batches = dataset.with_format(None).iter(batch_size=1024)
    rows = (cells for batch in batches for cells in zip(*batch.values(), strict=True))
    for number, cells in enumerate(rows, start=1):
        yield Row(f"row {number} of {name}{split}",
                  dict(zip(dataset.column_names, cells, strict=True)))


def _hub_rows(spec: Source, path: str) -> Iterator[Row]:
    offline = None if hub.hub_reachable() else hub.offline_hint()
    if offline:
        hub.go_offline()
    import datasets

    if offline is None and datasets.config.HF_HUB_OFFLINE:
        offline = "HF_DATASETS_OFFLINE forbids downloading"
    try:
        loaded = datasets.load_dataset(path, name=spec.name, split=spec.split)
    except Exception as error:  # remote content: the library lets through errors of many libraries
        if offline and isinstance(error, ConnectionError | FileNotFoundError):
            raise InputError(f"Data set '{path}' is not on this machine and {offline}.",
                             where=spec.where, fix="give a local file or folder: "
                             f"{spec.path_key}=/path, or run once with network: hf download "
                             f"--repo-type dataset {path} --local-dir {Path(path).name}") from error
        raise InputError(
            f"Data set '{path}' cannot be loaded: {first_line(error)}",
            where=f"{spec.where} {spec.key}.name={spec.name or 'null'} "
                  f"{spec.key}.split={spec.split}",
            fix=f"check the name, {spec.key}.name and {spec.key}.split"
            + ("" if offline else "; a private data set needs `hf auth login`")) from error
    return _dataset_rows(loaded, path)
