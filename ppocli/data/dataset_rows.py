"""Rows that the `datasets` library finds: in folders, saved data sets, on the Hub, at addresses."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ppocli.config.text import first_line, nearest, pasted
from ppocli.data.arrow_rows import dataset_rows
from ppocli.data.files import SUFFIX_WORDS, SUFFIXES, Row, read_file
from ppocli.errors import InputError
from ppocli.runs import hub

if TYPE_CHECKING:
    from ppocli.data.sources import Source


def folder_rows(folder: Path, spec: "Source") -> Iterator[Row]:
    """The rows of the split and the configuration of a folder that ``spec`` names. A folder is what
    ``save_to_disk`` wrote, or else is read as `datasets` reads a folder: the files that its README
    lists, or files by the splits in their names.

    Raises:
        InputError: the folder has no rows, no such split or configuration, or a malformed file.
    """
    import datasets

    saved = folder / (spec.name or "")
    if (saved / "dataset_dict.json").is_file() or (saved / "state.json").is_file():
        def load(split: str) -> Any:
            data = datasets.load_from_disk(str(saved))
            return data[split] if isinstance(data, datasets.DatasetDict) else data
    else:
        def load(split: str) -> Any:
            return datasets.load_dataset(str(folder), name=spec.name, split=split, streaming=True)
    return _rows_of_splits(load, spec, str(folder), folder.name)


def _rows_of_splits(load: Callable[[str], Any], spec: "Source", path: str, name: str
                    ) -> Iterator[Row]:
    for split in spec.split.split("+"):
        place = f"{name} ({split.strip()})"
        try:
            for number, values in enumerate(dataset_rows(load(split.strip())), start=1):
                yield Row(f"row {number} of {place}", values)
        except Exception as error:  # what the readers of `datasets`, YAML and fsspec raise
            raise _load_error(path, spec, error) from error


def hub_rows(spec: "Source", path: str) -> Iterator[Row]:
    """The rows of a data set on the Hub, or of its copy in the cache.

    Raises:
        InputError: there is no such data set, it can't be read, or it has several configurations
            and none is named.
    """
    offline = None if hub.hub_reachable() else hub.offline_hint()
    if offline:
        hub.go_offline()
    import datasets

    if offline is None and datasets.config.HF_HUB_OFFLINE:
        offline = "HF_DATASETS_OFFLINE forbids downloading"
    try:
        data = datasets.load_dataset(path, name=spec.name, split=spec.split)
    except Exception as error:  # remote content: the library lets through errors of many libraries
        if offline and isinstance(error, ConnectionError | FileNotFoundError):
            raise InputError(f"Data set '{path}' is not on this machine and {offline}.",
                             where=spec.where, fix="give a local file or folder: "
                             f"{spec.path_key}=/path, or run once with network: hf download "
                             f"--repo-type dataset {path} --local-dir {Path(path).name}") from error
        raise _load_error(path, spec, error, private=not offline) from error
    for number, values in enumerate(dataset_rows(data), start=1):
        yield Row(f"row {number} of {path} ({spec.split})", values)


def _load_error(name: str, spec: "Source", error: Exception, *, private: bool = False
                ) -> InputError:
    """The error for a data set that can't be loaded; it lists the configurations if ``spec`` names
    none of several."""
    import datasets

    try:
        configurations = datasets.get_dataset_config_names(name)
    except Exception:  # loading has failed before; that error says why
        configurations = []
    if len(configurations) > 1 and spec.name not in configurations:
        near = nearest(spec.name or "", configurations, count=1) or configurations
        lacks = "has several configurations:" if spec.name is None else (
            f"has no configuration {spec.name!r}; it has")
        return InputError(f"Data set {name} {lacks} {', '.join(configurations)}.",
                          where=f"{spec.where} {spec.key}.name={spec.name or 'null'}",
                          fix=f"name one: {pasted(f'{spec.key}.name={near[0]}')}")
    cause = error.__cause__ or error
    return InputError(
        f"Data set '{name}' cannot be loaded: {first_line(cause)}",
        where=f"{spec.where} {spec.key}.name={spec.name or 'null'} {spec.key}.split={spec.split}",
        fix=f"check the name, {spec.key}.name and {spec.key}.split"
        + ("; a private data set needs `hf auth login`" if private else ""))


def url_rows(spec: "Source", url: str) -> Iterator[Row]:
    """The rows of the file at an address that `datasets` can download (``https://``, ``hf://`` and
    other schemes of fsspec). It stays in the cache of `datasets`.

    Raises:
        InputError: the address can't be downloaded, or is a file of another kind.
    """
    name = Path(unquote(urlsplit(url).path)).name
    if Path(name).suffix.lower() not in SUFFIXES:
        raise InputError(f"The name of {url} doesn't end in {SUFFIX_WORDS}.", where=spec.where,
                         fix="download the file and give it such a name; a data set on the Hub is "
                         f"{spec.path_key}=OWNER/NAME")
    import datasets

    try:
        if url.startswith("hf://") and not hub.hub_reachable():
            raise ConnectionError(hub.offline_hint())
        file = str(datasets.DownloadManager().download(url))
    except Exception as error:  # of fsspec and its servers, of many kinds
        lacks = "pip install aiohttp requests; or " * ("aiohttp" in str(error))
        raise InputError(f"{url} cannot be downloaded: {first_line(error).rstrip('.')}.",
                         where=spec.where, fix=f"{lacks}download the file by other means, then "
                         f"{pasted(f'{spec.path_key}={name}')}") from error
    with tempfile.TemporaryDirectory() as folder:  # the cache names files by hashes
        link = Path(folder) / name
        link.symlink_to(file)
        try:
            yield from read_file(link, spec.column, spec.noun)
        except InputError as error:
            raise error.reworded(where=spec.where) from error
