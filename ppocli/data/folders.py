"""Rows of folders: files by split, downloaded data sets by the configurations that their README
lists, and data sets saved by `datasets`; and rows of the files that match a pattern."""

import dataclasses
import glob
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.config.text import first_line, nearest, pasted
from ppocli.data.arrow_rows import dataset_rows
from ppocli.data.files import SUFFIX_WORDS, SUFFIXES, Row, holds_rows, read_file
from ppocli.errors import InputError

if TYPE_CHECKING:
    from ppocli.data.sources import Source

_SPLITS = {"training": "train", "testing": "test", "evaluation": "eval"} | {
    name: name for name in ("train", "test", "validation", "valid", "val", "dev", "eval")}
"""split by the word in the name of a file or folder that stands for it, as in `datasets`"""
_WORD = re.compile(r"[^-._ 0-9]+")
_SHARD = re.compile(r"-\d{5}-of-\d{5}.*$")  # train-00000-of-00002.parquet
_CONFIGS = re.compile(r"\ufeff?---\s*\n(?:(?!---).*\n)*?configs\s*:")


def folder_rows(folder: Path, spec: "Source", notes: list[str]) -> Iterator[Row]:
    """The rows of one split of a folder, in the configuration ``spec.name``.

    Raises:
        InputError: the folder has no readable files, or no such split or configuration; or it has
            several configurations and ``spec.name`` is null.
    """
    if _is_saved(folder):
        note_ignored(folder, spec, notes, name=True)
        return _saved_rows(folder, spec, notes)
    if _lists_configurations(folder / "README.md"):
        return _configuration_rows(folder, spec)
    if spec.name is not None and _is_saved(folder / spec.name):
        return _saved_rows(folder / spec.name, spec, notes)
    if saved := sorted(part.name for part in folder.iterdir() if part.is_dir() and _is_saved(part)):
        raise InputError(f"Folder {folder} holds saved data sets: {', '.join(saved)}.",
                         where=spec.where, fix=f"name one: {pasted(f'{spec.key}.name={saved[0]}')}")
    return _file_rows(folder, spec, notes)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def matching_rows(pattern: Path, spec: "Source", notes: list[str]) -> Iterator[Row]:
    """The rows of all files that match a pattern such as ``data/**/*.jsonl``, sorted by name.

    Raises:
        InputError: no file matches.
    """
    matches = [Path(name) for name in sorted(glob.glob(str(pattern), recursive=True))]
    files = [file for file in matches if holds_rows(file)]
    if not files:
        raise InputError(f"No {SUFFIX_WORDS} file matches {pattern} (looked in {Path.cwd()}).",
                         where=spec.where, fix="quote the pattern, so that the shell leaves it as "
                         f"it is, as in '{spec.path_key}=data/*.jsonl'; ** stands for any folders")
    note_ignored(Path(pattern.name), spec, notes, name=True, split=True)
    return _rows_of(files, spec)


# Files and folders --------------------------------------------------------------------------------

def note_ignored(path: Path, spec: "Source", notes: list[str], *, name: bool = False,
                 split: bool = False) -> None:
    """Note ``name`` and ``split`` of ``spec`` where a file or folder has no configurations or no
    splits, so that they have no effect."""
    if name and spec.name is not None:
        notes.append(f"{path.name} has no configurations: {spec.key}.name={spec.name} was ignored")
    if split and spec.split_is_set:
        notes.append(f"{path.name} has no splits: {spec.key}.split={spec.split} was ignored and "
                     "all its rows were used")


def _file_rows(folder: Path, spec: "Source", notes: list[str]) -> Iterator[Row]:
    root = folder / (spec.name or "")
    if not root.is_dir():
        root = folder
        note_ignored(folder, spec, notes, name=True)
    files = sorted(file for file in root.rglob("*")
                   if holds_rows(file)
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
        files = [file for name in _chosen_splits(spec, splits) for file in splits[name]]
    else:
        note_ignored(folder, spec, notes, split=True)
    return _rows_of(files, spec)


def _rows_of(files: Iterable[Path], spec: "Source") -> Iterator[Row]:
    return (row for file in files for row in read_file(file, spec.column, spec.noun))


def _split_of(file: Path) -> str | None:
    """The split that a file's name or its folder's name stands for, as on the Hub; else None."""
    stem, shards = _SHARD.subn("", file.stem.lower())
    names = [stem, *(part.lower() for part in reversed(file.parts[:-1]))]
    whole = next((_SPLITS[name] for name in names if name in _SPLITS), None)
    if shards and not whole:
        return stem  # train_sft-00000-of-00001 belongs to a split named train_sft
    return whole or next((_SPLITS[word] for name in names for word in _WORD.findall(name)
                          if word in _SPLITS), None)


def _chosen_splits(spec: "Source", splits: Iterable[Any]) -> list[str]:
    present = [str(name) for name in splits]
    names = [name.strip() for name in spec.split.split("+")]
    for name in names:
        if name not in present:
            near = nearest(name, present, count=1)
            raise InputError(f"There is no split {name!r} in {spec.path}; it has "
                             f"{', '.join(present)}.", where=f"{spec.key}.split={spec.split}",
                             fix=pasted(f"{spec.key}.split={(near or present)[0]}"))
    return names


# The datasets library -----------------------------------------------------------------------------

def _saved_rows(folder: Path, spec: "Source", notes: list[str]) -> Iterator[Row]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder raises whatever arrow or json raise
        raise InputError(f"The data set saved in {folder} cannot be loaded: {first_line(error)}",
                         where=spec.where) from error
    if isinstance(saved, datasets.DatasetDict):
        parts = [saved[name] for name in _chosen_splits(spec, saved)]
        return (row for part in parts for row in named_rows(part, folder.name))
    note_ignored(folder, spec, notes, split=spec.split != str(saved.split))
    return named_rows(saved, folder.name)


def named_rows(dataset: Any, name: str, split: str | None = None) -> Iterator[Row]:
    """The rows of a ``datasets.Dataset`` or ``IterableDataset`` called ``name``."""
    split = split or dataset.split
    place = f"{name} ({split})" if split else name
    for number, values in enumerate(dataset_rows(dataset), start=1):
        yield Row(f"row {number} of {place}", values)


# Configurations of a README -----------------------------------------------------------------------

def _lists_configurations(card: Path) -> bool:
    """Whether a README has ``configs`` in its front matter."""
    return card.is_file() and _CONFIGS.match(
        card.read_text(encoding="utf-8", errors="replace")) is not None


def _configuration_rows(folder: Path, spec: "Source") -> Iterator[Row]:
    """The rows of the files that `datasets` finds for a configuration and a split. `datasets` reads
    them itself if the README sets options of its readers or types of columns."""
    import datasets

    with tempfile.TemporaryDirectory() as cache:  # for its lock file
        try:
            builder = datasets.load_dataset_builder(str(folder), name=spec.name, cache_dir=cache)
        except Exception as error:  # what YAML, fsspec and the library raise
            raise (configuration_error(str(folder), spec)
                   or InputError(f"The data set in {folder} cannot be loaded: {first_line(error)}",
                                 where=spec.where, fix="correct its README.md, or remove "
                                 "its configs")) from error
    files = {str(split): [Path(file) for file in paths]
             for split, paths in (builder.config.data_files or {}).items()}
    splits = _chosen_splits(spec, files)
    base = {field.name for field in dataclasses.fields(datasets.BuilderConfig)}
    plain = type(builder.config)()
    options = [field.name for field in dataclasses.fields(builder.config) if field.name not in base
               and getattr(builder.config, field.name) != getattr(plain, field.name)]
    ours = all(file.suffix.lower() in SUFFIXES for split in splits for file in files[split])
    if ours and not options and builder.info.features is None:
        return _rows_of((file for split in splits for file in files[split]), spec)
    return (row for split in splits
            for row in _streamed_rows(builder, split, folder.name, spec))


def _streamed_rows(builder: Any, split: str, name: str, spec: "Source") -> Iterator[Row]:
    try:
        yield from named_rows(builder.as_streaming_dataset(split=split), name, split)
    except Exception as error:  # what readers of all formats raise
        raise InputError(f"Split {split!r} of {name} cannot be read: {first_line(error)}",
                         where=spec.where) from error


def configuration_error(name: str, spec: "Source") -> InputError | None:
    """The error that lists a data set's configurations; None if ``spec.name`` is one of them, or
    there is at most one and ``spec.name`` is null.

    Args:
        name: of the data set, or its folder.
    """
    import datasets

    try:
        configurations = datasets.get_dataset_config_names(name)
    except Exception:  # loading has failed before; the caller reports that error
        return None
    if spec.name in configurations or (spec.name is None and len(configurations) < 2):
        return None
    lacks = (f"has several configurations: {', '.join(configurations)}" if spec.name is None
             else f"has no configuration {spec.name!r}; it has {', '.join(configurations)}")
    near = nearest(spec.name or "", configurations, count=1) or configurations
    return InputError(f"Data set {name} {lacks}.", where=spec.where if spec.name is None
                      else f"{spec.key}.name={spec.name}",
                      fix=f"name one: {pasted(f'{spec.key}.name={near[0]}')}")
