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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ppocli.config.text import first_line
from ppocli.data.arrow_rows import batch_rows
from ppocli.data.json_shapes import object_rows
from ppocli.errors import InputError

MAX_LINE_BYTES = 16 * 2**20
MAX_JSON_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One raw row, from the readers to :mod:`ppocli.data.chat_text`."""

    place: str
    """where it came from, as in ``line 3 of prompts.jsonl``"""
    values: dict[str, Any]
    """cells by column name"""
    typed: dict[str, Any] | None = None
    """the cells for rewards, if they differ: of a csv file, whose ``values`` are the texts in the
    file"""


def holds_rows(path: Path) -> bool:
    """Whether a file's name says that it holds rows; ``config.json`` and the like don't."""
    return path.suffix.lower() in SUFFIXES and path.name not in _NO_ROWS and path.is_file()


def read_file(path: Path, column: str, noun: str = "prompt") -> Iterator[Row]:
    """The rows of one file.

    Args:
        path: an existing file; the suffix chooses the reader. A ``.json`` file may hold a list of
            objects or texts, one object of rows or columns, or JSON lines. A ``.txt`` file holds
            one prompt per line.
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
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        byte = f"byte 0x{raw[error.start]:02x} at byte {column} of the line"
        _malformed(path, f"Line {line}", f"is not UTF-8: {byte}", _recode(path))
    if (at := text.find("\0")) >= 0:
        utf16 = "UTF-16" in (fix := _recode(path))
        _malformed(path, f"Line {first_line + text.count(chr(10), 0, at)}", "holds a NUL byte: "
                   f"this is {'UTF-16' if utf16 else 'not a text file'}", fix if utf16 else None)
    return text


def _recode(path: Path) -> str:
    """The command that converts a text file to UTF-8; its first bytes tell the encoding."""
    with path.open("rb") as file:
        head = file.read(2**20)
    marks = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16",
             b"\xfe\xff": "UTF-16"}
    # without a byte order mark: in UTF-16, every second byte of Latin letters is zero
    encoding = next((name for mark, name in marks.items() if head.startswith(mark)), None) or (
        "UTF-16LE" if 2 * head[1::2].count(0) > len(head[1::2])
        else "UTF-16BE" if 2 * head[::2].count(0) > len(head[::2])
        # CP1252 is ISO-8859-1 with characters at 0x80 to 0x9f, except at these five
        else "ISO-8859-1" if any(byte in head for byte in b"\x81\x8d\x8f\x90\x9d") else "CP1252")
    likely = f" if it is {encoding}, as files from Windows are" if encoding == "CP1252" else ""
    return (f"save the file as UTF-8{likely}: iconv -f {encoding} -t UTF-8 "
            f"{shlex.quote(str(path))} > utf8{path.suffix}")


def _lines(path: Path, noun: str) -> Iterator[tuple[int, str]]:
    """Line numbers, and lines with their ends. Only a line feed ends a line, unlike
    ``splitlines``."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                _malformed(path, f"Line {number}", f"is longer than {MAX_LINE_BYTES >> 20} MiB",
                           f"one {noun} is one line; is this a text file?")
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            yield number, _decode(path, raw, number)


def _read_txt(path: Path, column: str, noun: str) -> Iterator[Row]:
    for number, line in _lines(path, noun):
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
    first = next((line for _, line in _lines(path, noun) if line.strip()), "")
    if first.lstrip().startswith("["):
        yield from _read_json(path, column, noun)  # a list under the wrong suffix
    else:
        yield from _json_lines(path, column, noun)


def _json_lines(path: Path, column: str, noun: str) -> Iterator[Row]:
    lines = ((number, line) for number, line in _lines(path, noun) if line.strip())
    head = list(itertools.islice(lines, 2))
    for number, line in itertools.chain(head, lines):
        value = _parsed(path, line.rstrip(), number,
                        f'each line is one object, like {{"{column}": "..."}}')
        whole = _object_rows(path, value, column) if len(head) == 1 else None
        yield from whole or [_json_row(path, f"line {number}", value, column)]


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
        yield from _json_lines(path, column, noun)  # under the wrong suffix, which is common
        return
    if isinstance(content, dict):
        yield from (_object_rows(path, content, column)
                    or [_json_row(path, "row 1", content, column)])
        return
    if not isinstance(content, list):
        raise InputError(f"{path.name} holds a JSON {type(content).__name__}, not a list of rows.",
                         where=str(path), fix=f'it should look like [{{"{column}": "..."}}, ...]')
    for number, value in enumerate(content, start=1):
        yield _json_row(path, f"row {number}", value, column)


def _object_rows(path: Path, value: Any, column: str) -> list[Row] | None:
    """The rows in a JSON object; None if it is one row itself."""
    try:
        rows = object_rows(value, column) if isinstance(value, dict) else None
    except ValueError as error:
        key = str(error).partition(", ")[0]
        raise InputError(f"{path.name} is an object with several lists of rows: {error}.",
                         where=str(path), fix="write the one to read to a file of its own: "
                         f"jq {shlex.quote(f'.[{json.dumps(key)}]')} {shlex.quote(str(path))} "
                         f"> {shlex.quote(key)}.json") from error
    return None if rows is None else [
        _json_row(path, f"row {number}", row, column) for number, row in enumerate(rows, start=1)]


def _check_names(path: Path, place: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if name and count > 1:
            _malformed(path, place, f"names the column {name!r} twice")


def _read_csv(path: Path, column: str, noun: str) -> Iterator[Row]:
    """Columns without a name (such as the index that pandas writes) are left out. Cells are texts;
    for prompts, ``Row.typed`` has the types that `datasets` infers from whole columns."""
    rows = _csv_rows(path, noun)
    if noun != "prompt":
        yield from rows
        return
    texts = list(rows)
    for row, cells in zip(texts, _typed([row.values for row in texts]), strict=True):
        yield replace(row, typed=cells)


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


def _csv_rows(path: Path, noun: str) -> Iterator[Row]:
    lines = (line for _, line in _lines(path, noun))
    head = next(lines, "")
    named = _SEPARATOR.fullmatch(head.rstrip("\r\n"))
    if named:  # Excel's own first line
        head = next(lines, "")
    delimiter = named["mark"] if named else _delimiter(path, head)
    previous_limit = csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(itertools.chain([head], lines), delimiter=delimiter, strict=True)
    skipped = 1 if named else 0
    try:
        if (header := next(reader, None)) is None:
            return
        names = [name.strip() for name in header]
        _check_names(path, "The header", names)
        line = reader.line_num
        for cells in reader:
            first_line, line = line + 1 + skipped, reader.line_num
            if not cells:
                continue
            if len(cells) != len(names):
                _malformed(path, f"Line {first_line}", f"has {len(cells)} fields where the header "
                           f"has {len(names)}",
                           f"quote fields that hold {delimiter!r} or line breaks")
            values = {name: cell for name, cell in zip(names, cells, strict=True) if name}
            yield Row(f"line {first_line} of {path.name}", values)
    except csv.Error as error:
        _malformed(path, f"Line {reader.line_num + skipped}", f"is not valid CSV: {error}")
    finally:
        csv.field_size_limit(previous_limit)


_SEPARATOR = re.compile(r'"?sep=(?P<mark>[^"])"?', re.IGNORECASE)


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
