"""Sources of prompts and training data: the keys of ``prompts``, ``prompts.eval`` or ``data``, and
the raw rows that they name, in files, folders, saved data sets, the Hub, or inline lists."""

import glob
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ppocli.builtin.names import BUILTIN_PREFIX, resolve_builtin
from ppocli.config import schema
from ppocli.config.keys import row_paths, schema_keys
from ppocli.config.text import nearest
from ppocli.data import gym_tasks
from ppocli.data.files import SUFFIX_WORDS, SUFFIXES, Row, read_file, table_rows, without_nulls
from ppocli.errors import ConfigError, InputError
from ppocli.runs import hub

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
    mix_name: str = ""
    """name of this source in ``prompts.mix``; "" for the only one"""
    weight: float = 1.0
    """of this source in a mix"""

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
    ``prompts.path``, or other arguments of a task.

    Raises:
        ConfigError: as :func:`training_spec`.
    """
    section, path, kwargs = cfg.eval, cfg.eval.path, cfg.kwargs | cfg.eval.kwargs
    if items is None:
        items = section.items
    if path is None and items is None and (
            section.split is not None or section.name is not None or section.kwargs):
        path = cfg.path
    overrides = {name: value for name, value in vars(section).items()
                 if value is not None and name != "repeat"}
    return Source(key="prompts.eval", split_is_set=section.split is not None,
                  path_key="prompts.path" if section.path is None else "prompts.eval.path",
                  **vars(cfg) | overrides | {"path": path, "kwargs": kwargs, "items": as_list(
                      items, where="prompts.eval.items")})


def training_specs(cfg: schema.PromptsConfig, items: list[Any] | None) -> list[Source]:
    """The sources of the training prompts: those of ``prompts.mix``, or :func:`training_spec`."""
    return _mixed(cfg, training_spec(cfg, items))


def evaluation_specs(cfg: schema.PromptsConfig, items: list[Any] | None) -> list[Source]:
    """The sources of the evaluation prompts: :func:`evaluation_spec`, or, without a source of its
    own, those of ``prompts.mix``, whose keys those of ``prompts.eval`` replace."""
    return _mixed(cfg, evaluation_spec(cfg, items))


def _mixed(cfg: schema.PromptsConfig, base: Source) -> list[Source]:
    if base.has_source or not cfg.mix:
        return [base]
    replaced = {} if base.key == "prompts" else {
        name: value for name, value in vars(cfg.eval).items() if name != "limit" and value}
    specs, keys = list[Source](), schema_keys()
    for name, settings in cfg.mix.items():
        entry = {key: value if key in ("weight", "kwargs") else keys[f"prompts.{key}"].converted(
            value) for key, value in settings.items() if value is not None}
        values = {**entry, **replaced, "kwargs": {
            **cfg.kwargs, **entry.get("kwargs", {}), **replaced.get("kwargs", {})}}
        specs.append(replace(
            base, key=f"prompts.mix.{name}", path_key=f"prompts.mix.{name}.path", mix_name=name,
            split_is_set=base.split_is_set or "split" in entry,
            limit=entry.get("limit", cfg.limit), weight=float(entry.get("weight", 1)),
            **{key: value for key, value in values.items() if key in schema.MIX_KEYS
               and key not in ("limit", "weight")}))
    return specs


def as_list(items: Any, what: str = "Inline prompts", where: str = "prompts.items"
            ) -> list[Any] | None:
    """Rows from Python, in a list or a table, as a list; None for None.

    Raises:
        ConfigError: one text or mapping in place of a list.
    """
    if items is None:
        return None
    if hasattr(items, "to_pylist") or hasattr(items, "features"):  # of pyarrow or `datasets`
        return list(table_rows(items))
    if as_rows := getattr(items, "to_dicts", None):  # of polars
        return [without_nulls(row) for row in as_rows()]
    if hasattr(items, "columns") and hasattr(items, "to_dict"):  # of pandas
        return [{name: without_nulls(cell) for name, cell in row.items()}
                for row in items.to_dict("records")]
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
    for all files that match, sorted by name; ``{a,b}`` for a, then b. Anything else is a data set
    on the Hub.

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
        raise InputError(f"The {spec.noun} path is empty.", where=spec.where,
                         fix=f"{spec.path_key}=FILE, or null")
    if len(paths := row_paths(spec.path)) > 1:
        return chain.from_iterable(open_rows(replace(spec, path=path), notes) for path in paths)
    if spec.path.startswith(gym_tasks.PREFIX):
        return gym_tasks.gym_rows(spec.path.removeprefix(gym_tasks.PREFIX), spec.kwargs,
                                  spec.column if spec.noun == "prompt" else "prompt",
                                  spec.path_key)
    if "://" in spec.path:
        raise InputError(f"{spec.path} is an address, and nothing is downloaded from there.",
                         where=spec.where, fix=f"download it: {spec.path_key}=FILE; or name the "
                         f"data set on the Hub: {spec.path_key}=OWNER/NAME")
    if names_hub_dataset(spec.path):
        return _hub_rows(spec, spec.path)
    path = (resolve_builtin(spec.path) if spec.path.startswith(BUILTIN_PREFIX)
            else Path(spec.path).expanduser())
    if path.is_dir():
        return _folder_rows(path, spec, notes)
    files = [path] if path.exists() or not glob.has_magic(str(path)) else [
        Path(name) for name in sorted(glob.glob(str(path), recursive=True))
        if name.lower().endswith(SUFFIXES)]
    if not files or not files[0].is_file():
        raise _missing(path, spec)
    for name, is_set in (("name", spec.name is not None), ("split", spec.split_is_set)):
        if is_set:
            notes.append(f"{spec.key}.{name}={getattr(spec, name)} was ignored, which is for "
                         f"folders and the Hub: all rows of {path.name} are used")
    return (row for file in files
            for row in read_file(file, spec.column, typed=spec.noun == "prompt"))


def names_hub_dataset(path: str) -> bool:
    """Whether ``prompts.path``, or one of several paths in it, names a data set on the Hub: it can
    be such a name, and means neither a file nor a built-in."""
    return any(_REPO_ID.fullmatch(each) is not None and Path(each).suffix.lower() not in SUFFIXES
               and not Path(each).exists() for each in row_paths(path))


def _missing(path: Path, spec: Source) -> InputError:
    near = nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else []
    hint = f"did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else (
        f"give a {SUFFIX_WORDS} file, a pattern or folder of such, or a Hub data set")
    return InputError(f"{spec.noun.capitalize()} file or folder {path} does not exist (looked in "
                      f"{Path.cwd()}).", where=spec.where, fix=hint, code="no-such-file")


def _inline_rows(spec: Source, items: list[Any]) -> Iterator[Row]:
    for number, item in enumerate(items, start=1):
        values = ({str(name): value for name, value in item.items()}
                  if isinstance(item, Mapping) else {spec.column: item})
        if spec.noun == "prompt" and spec.column not in values and "prompt" in values:
            values[spec.column] = values.pop("prompt")
        yield Row(f"item {number} of {spec.key}.items", values)


# The datasets library -----------------------------------------------------------------------------

def _folder_rows(folder: Path, spec: Source, notes: list[str]) -> Iterator[Row]:
    """The rows of some splits of a folder, as `datasets` reads it: one that it has saved, or one of
    files, whose names or whose README say the splits."""
    import datasets

    splits = spec.split.split("+")
    with _library_errors(spec, str(folder)):
        if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            parts = [datasets.load_dataset(str(folder), spec.name, split=split, streaming=True)
                     for split in splits]
        elif isinstance(saved := datasets.load_from_disk(str(folder)), datasets.DatasetDict):
            parts = [_split_of(saved, split) for split in splits]
        else:
            parts = [saved]
            if spec.split_is_set:
                notes.append(f"{spec.key}.split={spec.split} was ignored: {folder.name} has no "
                             "splits")
    return chain.from_iterable(_rows_of(part, folder.name, spec) for part in parts)


def _split_of(saved: Any, split: str) -> Any:
    if split not in saved:
        raise ValueError(f"Bad split: {split}. Available splits: {list(saved)}")
    return saved[split]


def _hub_rows(spec: Source, path: str) -> Iterator[Row]:
    """The rows of a data set on the Hub, or of its copy in the cache."""
    offline = None if hub.hub_reachable() else hub.offline_hint()
    if offline:
        hub.go_offline()
    import datasets

    try:
        with _library_errors(spec, path):
            return _rows_of(datasets.load_dataset(path, spec.name, split=spec.split), path, spec)
    except InputError as error:
        if offline and isinstance(error.__cause__, ConnectionError | FileNotFoundError):
            raise InputError(f"Data set '{path}' is not on this machine and {offline}.",
                             where=spec.where, fix="give a local file or folder: "
                             f"{spec.path_key}=/path, or run once with network: hf download "
                             f"--repo-type dataset {path} --local-dir {Path(path).name}"
                             ) from error.__cause__
        raise


def _rows_of(dataset: Any, name: str, spec: Source) -> Iterator[Row]:
    """The rows of a ``datasets.Dataset`` or ``IterableDataset`` called ``name``."""
    place = f"{name} ({dataset.split})" if dataset.split else name
    with _library_errors(spec, place):
        for number, values in enumerate(table_rows(dataset), start=1):
            yield Row(f"row {number} of {place}", values)


@contextmanager
def _library_errors(spec: Source, name: str) -> Iterator[None]:
    """Turn what `datasets`, Arrow, fsspec and YAML raise in the block, of many kinds, into an error
    that names the settings."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).splitlines()[:2])  # the second may list configurations
        raise InputError(f"{name} cannot be loaded: {reason or type(error).__name__}",
                         where=f"{spec.where} {spec.key}.name={spec.name or 'null'} "
                         f"{spec.key}.split={spec.split}",
                         fix=f"correct it, {spec.key}.name or {spec.key}.split; a private data set "
                         "of the Hub needs `hf auth login`") from error
