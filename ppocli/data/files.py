"""Rows of files of prompts or training data: json, jsonl, csv, tsv, parquet and txt.

Readers are generators, so that a limit stops them early. json files are read whole, and so are csv
files of prompts: the types of cells for rewards depend on whole columns. Errors name the file and
the line (text formats) or the row (parquet, json lists), counted from 1.
"""

import csv
import io
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ppocli.config.text import first_line
from ppocli.data.arrow_rows import batch_rows
from ppocli.errors import InputError

MAX_CELL = 16 * 2**20
"""characters of a csv cell"""


@dataclass(frozen=True, slots=True)
class Row:
    """One raw row, from the readers to :mod:`ppocli.data.chat_text`."""

    place: str
    """where it came from, as in ``line 3 of prompts.jsonl``"""
    values: dict[str, Any]
    """cells by column name"""


def holds_rows(path: Path) -> bool:
    """Whether a file's name says that it holds rows; ``config.json`` and the like don't."""
    return path.suffix.lower() in SUFFIXES and path.name not in _NO_ROWS and path.is_file()


def read_file(path: Path, column: str, noun: str = "prompt") -> Iterator[Row]:
    """The rows of one file.

    Args:
        path: an existing file; the suffix chooses the reader. A ``.json`` file may hold a list of
            objects or texts, one object, or JSON lines. A ``.txt`` file holds one prompt per line.
        column: the column of a bare text (a line of a txt file, a text in a JSON list).
        noun: the content, for errors: ``prompt`` or ``data``.

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
        _malformed(path, f"Line {line}", f"is not UTF-8: byte 0x{raw[error.start]:02x} at byte "
                   f"{column} of the line", "save the file as UTF-8; for one from Windows: iconv "
                   f"-f CP1252 -t UTF-8 {shlex.quote(str(path))} > utf8{path.suffix}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers, and lines with their ends. Only a line feed ends a line, unlike
    ``splitlines``."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            yield number, _decode(path, line, number)


def _read_txt(path: Path, column: str, noun: str) -> Iterator[Row]:
    for number, line in _lines(path):
        text = line.removesuffix("\n").removesuffix("\r")
        yield Row(f"line {number} of {path.name}", {column: text})


def _parsed(path: Path, text: str, line: int, fix: str | None = None) -> Any:
    """The value of a JSON text that begins in ``line``."""
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
    first = next((line for _, line in _lines(path) if line.strip()), "")
    if first.lstrip().startswith("["):
        yield from _read_json(path, column, noun)  # a list under the wrong suffix
    else:
        yield from _json_lines(path, column)


def _json_lines(path: Path, column: str) -> Iterator[Row]:
    for number, line in _lines(path):
        if line.strip():
            value = _parsed(path, line.rstrip(), number,
                            f'each line is one object, like {{"{column}": "..."}}')
            yield _json_row(path, f"line {number}", value, column)


def _read_json(path: Path, column: str, noun: str) -> Iterator[Row]:
    text = _decode(path, path.read_bytes().removeprefix(b"\xef\xbb\xbf"), 1)
    if not text.strip():
        return
    try:
        content = _parsed(path, text, 1)
    except InputError as error:
        if ": Extra data (" not in error.what:
            raise
        yield from _json_lines(path, column)  # under the wrong suffix, which is common
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
    """Columns without a name (such as the index that pandas writes) are left out. Cells are texts;
    for prompts, columns but ``column`` and those of texts to learn from have the types that
    `datasets` infers from whole columns."""
    rows = list(_csv_rows(path))
    typed = _typed([row.values for row in rows]) if noun == "prompt" else []
    for row, cells in zip(rows, typed, strict=False):
        row.values.update((name, cell) for name, cell in cells.items()
                          if name not in (column, *_TEXT_COLUMNS))
    yield from rows


_TEXT_COLUMNS = ("prompt", "completion", "text", "chosen", "rejected", "instruction", "input",
                 "output", "system")


def _typed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells as numbers, booleans, texts or None, as inferred from whole columns by pandas, with
    which `datasets` reads csv files."""
    if not rows or not rows[0]:
        return rows
    import pandas as pd

    with io.StringIO(newline="") as text:
        writer = csv.writer(text, quoting=csv.QUOTE_ALL)
        writer.writerows([rows[0], *(row.values() for row in rows)])
        text.seek(0)
        frame = pd.read_csv(text, low_memory=False, skip_blank_lines=False)
    cells = frame.astype(object).where(frame.notna(), None)
    return [{str(name): cell for name, cell in row.items()} for row in cells.to_dict("records")]


def _csv_rows(path: Path) -> Iterator[Row]:
    lines = (line for _, line in _lines(path))
    head = next(lines, "")
    delimiter = _delimiter(path, head)
    previous_limit = csv.field_size_limit(MAX_CELL)
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


def _delimiter(path: Path, head: str) -> str:
    """The delimiter of a csv file: the most common outside quotes in the header of comma, semicolon
    (as spreadsheets of many countries write), tab and bar."""
    bare = re.sub(r'"[^"]*"', "", head)
    marks = "\t,;|" if path.suffix.lower() == ".tsv" else ",;\t|"
    return max(marks, key=bare.count)


def _read_parquet(path: Path, column: str, noun: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_names(path, "The schema", file.schema_arrow.names)
            rows = batch_rows(file.iter_batches(batch_size=1024), file.schema_arrow)
            for number, values in enumerate(rows, start=1):
                yield Row(f"row {number} of {path.name}", values)
    except (pa.ArrowException, ValueError) as error:
        reason = first_line(error).rstrip(".")
        raise InputError(f"{path.name} is not a readable parquet file: {reason}.",
                         where=str(path)) from error


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".csv": _read_csv, ".tsv": _read_csv,
            ".parquet": _read_parquet, ".txt": _read_txt}
SUFFIXES = tuple(_READERS)
_NO_ROWS = frozenset({"config.json", "dataset_info.json", "dataset_infos.json",
                      "dataset_dict.json", "state.json"})
SUFFIX_WORDS = ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
