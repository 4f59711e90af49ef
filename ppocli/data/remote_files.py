"""Rows of data sets on the Hugging Face Hub, and of files at an address."""

import glob
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ppocli.config.text import first_line, pasted
from ppocli.data.files import SUFFIX_WORDS, SUFFIXES, Row, read_file
from ppocli.data.folders import configuration_error, named_rows
from ppocli.errors import InputError
from ppocli.runs import hub

if TYPE_CHECKING:
    from ppocli.data.sources import Source

_HUB_PAGE = re.compile(r"(?:hf:/|https?://(?:www\.)?(?:huggingface\.co|hf\.co))/datasets/"
                       r"([\w.-]+/[\w.-]+)(?:/|/(?:tree|viewer)(?:/.*)?)?")


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
        loaded = datasets.load_dataset(path, name=spec.name, split=spec.split)
    except Exception as error:  # remote content: the library lets through errors of many libraries
        if offline and isinstance(error, ConnectionError | FileNotFoundError):
            raise InputError(f"Data set '{path}' is not on this machine and {offline}.",
                             where=spec.where, fix="give a local file or folder: "
                             f"{spec.path_key}=/path, or run once with network: hf download "
                             f"--repo-type dataset {path} --local-dir {Path(path).name}") from error
        raise configuration_error(path, spec) or InputError(
            f"Data set '{path}' cannot be loaded: {first_line(error)}",
            where=f"{spec.where} {spec.key}.name={spec.name or 'null'} "
                  f"{spec.key}.split={spec.split}",
            fix=f"check the name, {spec.key}.name and {spec.key}.split"
            + ("" if offline else "; a private data set needs `hf auth login`")) from error
    return named_rows(loaded, path)


def url_rows(spec: "Source", url: str) -> Iterator[Row]:
    """The rows of the file at an address that `datasets` can download (``https://``, ``hf://`` and
    other schemes of fsspec), or of all files that match a pattern. Files stay in the cache of
    `datasets`.

    Raises:
        InputError: the address can't be downloaded, or is a web page or a file of another kind.
    """
    if page := _HUB_PAGE.fullmatch(url):
        if url.startswith("hf://"):
            yield from hub_rows(spec, page[1])
            return
        raise InputError(f"{url} is the web page of a data set.", where=spec.where,
                         fix=f"{spec.path_key}={page[1]}")
    if "/blob/" in url and "/datasets/" in url:
        raise InputError(f"{url} is the web page of a file.", where=spec.where,
                         fix=f"{spec.path_key}={url.replace('/blob/', '/resolve/')}")
    if url.startswith("hf://") and not hub.hub_reachable():
        raise _not_downloaded(spec, url, hub.offline_hint())
    import datasets

    for each in _matching(spec, url):
        name = Path(unquote(urlsplit(each).path)).name
        if Path(name).suffix.lower() not in SUFFIXES:
            raise InputError(f"The name of {each} doesn't end in {SUFFIX_WORDS}.",
                             where=spec.where, fix="download it, and give the file such a name")
        with _download_errors(spec, each):
            file = str(datasets.DownloadManager().download(each))
        with tempfile.TemporaryDirectory() as folder:  # the cache names files by hashes
            link = Path(folder) / name
            link.symlink_to(file)
            try:
                yield from read_file(link, spec.column, spec.noun)
            except InputError as error:
                raise error.reworded(where=spec.where) from error


def _matching(spec: "Source", url: str) -> list[str]:
    """The addresses that match a pattern, on servers that can list files; web servers can't."""
    if url.startswith(("http://", "https://")) or not glob.has_magic(url):
        return [url]
    from datasets.data_files import resolve_pattern

    with _download_errors(spec, url):
        return list(resolve_pattern(url, base_path=""))


@contextmanager
def _download_errors(spec: "Source", url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of fsspec and its servers, of many kinds
        raise _not_downloaded(spec, url, first_line(error)) from error


def _not_downloaded(spec: "Source", url: str, reason: str) -> InputError:
    name = Path(unquote(urlsplit(url).path)).name
    fetch = (f"curl -L -o {shlex.quote(name)} {shlex.quote(url)}" if url.startswith("http")
             else "download the file by other means")
    lacks = "pip install aiohttp requests; or " if "aiohttp" in reason else ""
    return InputError(f"{url} cannot be downloaded: {reason.rstrip('.') or 'no answer'}.",
                      where=spec.where, fix=f"{lacks}{fetch}, then "
                      f"{pasted(f'{spec.path_key}={name}')}")
