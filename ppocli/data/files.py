"""Rows out of files of prompts or training data: json, jsonl, csv, parquet and txt.

Each reader is a generator, so that a limit stops it early, and each error names the file
and the line (text formats) or the row (parquet, json lists), counted from 1.
"""

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ppocli.errors import InputError
from ppocli.text import first_line

MAX_LINE_BYTES = 16 * 2**20
MAX_JSON_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One raw row. Made by the readers, read by :mod:`ppocli.data.render`."""

    place: str
    """where it came from, as in ``line 3 of prompts.jsonl``"""
    values: dict[str, Any]
    """cells by column name"""


def read_file(path: Path, column: str, noun: str = "prompt") -> Iterator[Row]:
    """The rows of one file.

    Args:
        path: an existing file; its suffix says how it is read. A ``.json`` file may hold a list of
            objects or texts, or JSON lines. A ``.txt`` file holds one prompt a line.
        column: the name that a bare text (a line of a txt file, a text in a JSON list) goes by.
        noun: what errors call its content: ``prompt`` or ``data``.

    Raises:
        InputError: unknown suffix, unreadable, not UTF-8, or malformed.
    """
    named = f"{noun.capitalize()} file {path.name}"
    if (reader := _READERS.get(path.suffix.lower())) is None:
        kind = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        read = "prompts are" if noun == "prompt" else f"{noun} is"
        raise InputError(f"{named} has {kind}; {read} read from {SUFFIX_WORDS} files.",
                         where=str(path), fix="convert it, or give it the suffix of what it holds")
    try:
        yield from reader(path, column, noun)
    except OSError as error:
        raise InputError(f"{named} cannot be read: {error.strerror or error}.",
                         where=str(path)) from error


def _malformed(path: Path, place: str, problem: str, fix: str | None = None) -> NoReturn:
    raise InputError(f"{place} of {path.name} {problem}.", where=str(path), fix=fix)


def _decode(path: Path, raw: bytes, first_line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        utf16 = first_line == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        encoding = "utf-16" if utf16 else "latin-1"
        byte = f"byte 0x{raw[error.start]:02x} at byte {column} of the line"
        _malformed(path, f"Line {line}", f"is not UTF-8: {byte}", "save the file as UTF-8, e.g. "
                   f"iconv -f {encoding} -t utf-8 {path.name} > utf8{path.suffix}")


def _lines(path: Path, noun: str) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line ends. Only a line feed ends a line, unlike ``splitlines``."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                _malformed(path, f"Line {number}", f"is longer than {MAX_LINE_BYTES >> 20} MiB",
                           f"one {noun} is one line; is this a text file?")
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            line = _decode(path, raw, number)
            if "\0" in line:
                _malformed(path, f"Line {number}", "holds a NUL byte: this is not a text file")
            yield number, line


def _read_txt(path: Path, column: str, noun: str) -> Iterator[Row]:
    for number, line in _lines(path, noun):
        text = line.removesuffix("\n").removesuffix("\r")
        yield Row(f"line {number} of {path.name}", {column: text})


def _parsed(path: Path, text: str, line: int, fix: str | None = None) -> Any:
    """The JSON that begins in that line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        _malformed(path, f"Line {line + error.lineno - 1}",
                   f"is not valid JSON: {error.msg} (character {error.colno})", fix)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        _malformed(path, f"Line {line}", f"is not valid JSON: {problem}", fix)


def _json_row(path: Path, place: str, value: Any, column: str) -> Row:
    if not isinstance(value, dict | str):
        _malformed(path, place.capitalize(), f"is a JSON {type(value).__name__}, not an object or "
                   "a text", f'each row looks like {{"{column}": "..."}}')
    return Row(f"{place} of {path.name}", {column: value} if isinstance(value, str) else value)


def _read_jsonl(path: Path, column: str, noun: str) -> Iterator[Row]:
    for number, line in _lines(path, noun):
        if line.strip():
            value = _parsed(path, line.rstrip(), number,
                            f'each line is one object, like {{"{column}": "..."}}')
            yield _json_row(path, f"line {number}", value, column)


def _read_json(path: Path, column: str, noun: str) -> Iterator[Row]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise InputError(f"{noun.capitalize()} file {path.name} is larger than "
                         f"{MAX_JSON_BYTES >> 30} GiB.", where=str(path),
                         fix="a file this size is read as .jsonl or .parquet")
    text = _decode(path, path.read_bytes().removeprefix(b"\xef\xbb\xbf"), 1)
    if not text.strip():
        return
    try:
        content = _parsed(path, text, 1)
    except InputError as error:
        if ": Extra data (" not in error.what:
            raise
        yield from _read_jsonl(path, column, noun)  # JSON lines under the wrong suffix are common
        return
    rows = [content] if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise InputError(f"{path.name} holds a JSON {type(content).__name__}, not a list of rows.",
                         where=str(path), fix=f'it should look like [{{"{column}": "..."}}, ...]')
    for number, value in enumerate(rows, start=1):
        yield _json_row(path, f"row {number}", value, column)


def _check_names(path: Path, place: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if name and count > 1:
            _malformed(path, place, f"names the column {name!r} twice")


def _read_csv(path: Path, column: str, noun: str) -> Iterator[Row]:
    """Columns without a name (such as the index that pandas writes) are left out. A header without
    commas may have semicolons, as spreadsheets of many countries write them, or tabs."""
    previous_limit = csv.field_size_limit(MAX_LINE_BYTES)
    lines = (line for _, line in _lines(path, noun))
    head = next(lines, "")
    delimiter = next((mark for mark in ",;\t" if mark in head), ",")
    reader = csv.reader(itertools.chain([head], lines), delimiter=delimiter, strict=True)
    try:
        if (header := next(reader, None)) is None:
            return
        names = [name.strip() for name in header]
        _check_names(path, "The header", names)
        line = reader.line_num
        for cells in reader:
            first_line, line = line + 1, reader.line_num
            if not cells:
                continue
            if len(cells) != len(names):
                _malformed(path, f"Line {first_line}", f"has {len(cells)} fields where the header "
                           f"has {len(names)}",
                           f"quote fields that hold {delimiter!r} or line breaks")
            values = {name: cell for name, cell in zip(names, cells, strict=True) if name}
            yield Row(f"line {first_line} of {path.name}", values)
    except csv.Error as error:
        _malformed(path, f"Line {reader.line_num}", f"is not valid CSV: {error}")
    finally:
        csv.field_size_limit(previous_limit)


def _read_parquet(path: Path, column: str, noun: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_names(path, "The schema", file.schema_arrow.names)
            batches = file.iter_batches(batch_size=1024)
            rows = (values for batch in batches for values in batch.to_pylist())
            for number, values in enumerate(rows, start=1):
                yield Row(f"row {number} of {path.name}", values)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = first_line(error).rstrip(".")
        raise InputError(f"{path.name} is not a readable parquet file: {reason}.",
                         where=str(path)) from error


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".csv": _read_csv,
            ".parquet": _read_parquet, ".txt": _read_txt}
SUFFIXES = tuple(_READERS)
SUFFIX_WORDS = ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
