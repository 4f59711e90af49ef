"""Rows of files of prompts or training data: json, jsonl, csv, tsv, parquet and txt; and rows of
tables of Arrow.

Readers are generators, so that a limit stops them early; csv files of prompts are read whole, since
the types of cells for rewards depend on whole columns. Errors name the file and the line (text
formats) or the row (parquet, json lists), counted from 1.
"""

import csv
import io
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ppocli.config.text import first_line
from ppocli.errors import InputError

_ROW_COLUMNS = frozenset({"prompt", "completion", "text", "messages", "conversations", "chosen",
                          "rejected", "instruction", "question"})
"""names of columns by which a JSON object counts as one row, besides the column that is read"""
_SEPARATOR = re.compile(r'"?sep=(?P<mark>[^"])"?', re.IGNORECASE)


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


def read_file(path: Path, column: str, *, typed: bool = False) -> Iterator[Row]:
    """The rows of one file.

    Args:
        path: an existing file; the suffix chooses the reader. A ``.json`` or ``.jsonl`` file may
            hold one object or text a line, a list of them, or one object of rows or columns. A
            ``.txt`` file holds one prompt per line.
        column: the column of a bare text (a line of a txt file, a text in a JSON list).
        typed: give rows of csv files cells for rewards.

    Raises:
        InputError: unknown suffix, unreadable, not UTF-8, or malformed.
    """
    if (reader := _READERS.get(path.suffix.lower())) is None:
        raise InputError(f"{path.name} has the suffix {path.suffix!r}; files that are read end in "
                         f"{SUFFIX_WORDS}.", where=str(path),
                         fix="convert it, or give it the suffix of what it holds")
    try:
        rows = reader(path, column)
        yield from _typed(list(rows)) if typed and reader is _read_csv else rows
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror or error}.",
                         where=str(path)) from error


def _malformed(path: Path, place: str, problem: str, fix: str | None = None) -> NoReturn:
    raise InputError(f"{place} of {path.name} {problem}.", where=str(path), fix=fix)


def _lines(path: Path) -> Iterator[str]:
    """The lines with their ends. Only a line feed ends a line, unlike ``splitlines``."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                _malformed(path, f"Line {number}", f"is not UTF-8: {error.reason} at byte "
                           f"{error.start + 1}", "save it as UTF-8: iconv -f ENCODING -t UTF-8 "
                           f"{shlex.quote(str(path))} > utf8{path.suffix}, where ENCODING is "
                           "CP1252 for most files from Windows, UTF-16 for its \"Unicode\"")


def _read_txt(path: Path, column: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        yield Row(f"line {number} of {path.name}", {column: line.rstrip("\r\n")})


# JSON ---------------------------------------------------------------------------------------------

def _read_json(path: Path, column: str) -> Iterator[Row]:
    """JSON lines; or one document, where the first line isn't one value of several."""
    lines = ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    head = list(itertools.islice(lines, 2))
    if not head:
        return
    try:
        json.loads(head[0][1])
        is_document = len(head) == 1
    except (ValueError, RecursionError):
        is_document = True
    if is_document:
        rows = _document_rows(_parsed(path, "".join(_lines(path)), 1), column)
        for number, value in enumerate(rows, start=1):
            yield _json_row(path, f"row {number}", value, column)
        return
    for number, line in itertools.chain(head, lines):
        yield _json_row(path, f"line {number}", _parsed(path, line.rstrip(), number), column)


def _parsed(path: Path, text: str, line: int) -> Any:
    """The value of a JSON text that begins in ``line``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            line, problem = line + error.lineno - 1, f"{error.msg} (character {error.colno})"
        else:
            problem = str(error)
        _malformed(path, f"Line {line}", f"is not valid JSON: {problem}")


def _json_row(path: Path, place: str, value: Any, column: str) -> Row:
    if not isinstance(value, dict | str):
        _malformed(path, place.capitalize(), f"is a JSON {type(value).__name__}, not an object or "
                   "a text", f'each row looks like {{"{column}": "..."}}')
    return Row(f"{place} of {path.name}", {column: value} if isinstance(value, str) else value)


def _document_rows(content: Any, column: str) -> list[Any]:
    """The rows of a JSON document: a list; a list of objects under a key of an object, as in
    ``{"data": [...]}``; columns, as lists or as pandas' ``to_json`` writes them; or one row."""
    if not isinstance(content, dict):
        return content if isinstance(content, list) else [content]
    values = list(content.values())
    lists = [value for value in values if _is_list_of_objects(value) and not is_conversation(value)]
    if len(lists) == 1 and (len(content) == 1 or (_ROW_COLUMNS | {column}).isdisjoint(content)):
        return list(lists[0])
    if values and all(isinstance(value, dict) and value.keys() == values[0].keys()
                      for value in values):
        return [{name: cells[label] for name, cells in content.items()} for label in values[0]]
    if values and all(isinstance(value, list) and len(value) == len(values[0])
                      and not is_conversation(value) for value in values):
        return [dict(zip(content, cells, strict=True)) for cells in zip(*values, strict=True)]
    return [content]


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def is_conversation(value: Any) -> bool:
    """Whether a cell is a list of messages with a role each (``from`` in ShareGPT's form)."""
    return _is_list_of_objects(value) and all(
        isinstance(one.get("role", one.get("from")), str) for one in value)


# CSV ----------------------------------------------------------------------------------------------

def _read_csv(path: Path, column: str) -> Iterator[Row]:
    """Cells are texts. Columns without a name (such as the index that pandas writes) are left
    out."""
    lines = _lines(path)
    head = next(lines, "")
    named = _SEPARATOR.fullmatch(head.rstrip("\r\n"))
    if named:  # Excel's own first line
        head = next(lines, "")
    # else the most common outside quotes; spreadsheets of many countries write semicolons
    delimiter = named["mark"] if named else max(
        "\t,;|" if path.suffix.lower() == ".tsv" else ",;\t|", key=re.sub(r'"[^"]*"', "", head
                                                                          ).count)
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(itertools.chain([head], lines), delimiter=delimiter, strict=True)
    skipped = 1 + bool(named)
    try:
        names = [name.strip() for name in next(reader, [])]
        number = reader.line_num + skipped
        for cells in reader:
            if cells and len(cells) != len(names):
                _malformed(path, f"Line {number}", f"has {len(cells)} fields where the header has "
                           f"{len(names)}", f"quote fields that hold {delimiter!r} or line breaks")
            if cells:
                yield Row(f"line {number} of {path.name}",
                          {name: cell for name, cell in zip(names, cells, strict=True) if name})
            number = reader.line_num + skipped
    except csv.Error as error:
        _malformed(path, f"Line {reader.line_num + skipped - 1}", f"is not valid CSV: {error}")


def _typed(rows: list[Row]) -> Iterator[Row]:
    """Rows whose cells for rewards are numbers, booleans, texts or None, as inferred from whole
    columns by pandas, with which `datasets` reads csv files."""
    if not rows or not rows[0].values:
        return
    import pandas as pd

    with io.StringIO(newline="") as text:
        writer = csv.writer(text, quoting=csv.QUOTE_ALL)
        writer.writerows([rows[0].values, *(row.values.values() for row in rows)])
        text.seek(0)
        frame = pd.read_csv(text, low_memory=False, skip_blank_lines=False)
    cells = frame.astype(object).where(frame.notna(), None)
    for row, values in zip(rows, cells.to_dict("records"), strict=True):
        yield replace(row, typed={str(name): cell for name, cell in values.items()})


# Arrow --------------------------------------------------------------------------------------------

def _read_parquet(path: Path, column: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batches = (pa.Table.from_batches([batch]) for batch in file.iter_batches(1024))
            rows = itertools.chain.from_iterable(map(table_rows, batches))
            for number, values in enumerate(rows, start=1):
                yield Row(f"row {number} of {path.name}", values)
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"{path.name} is not a readable parquet file: "
                         f"{first_line(error).rstrip('.')}.", where=str(path)) from error


def table_rows(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of a table of pyarrow, or of a ``Dataset`` or ``IterableDataset`` of `datasets`,
    by column name.

    Arrow gives each struct of a column every key that any row has, with null where a row had none.
    Such keys are removed again (:func:`without_nulls`), so that rows equal those of JSON lines.

    Raises:
        ValueError: a type that the installed `datasets` doesn't support.
    """
    if hasattr(table, "schema") and b"huggingface" in (table.schema.metadata or {}):
        import datasets  # it wrote the table, and decodes its own types

        table = datasets.Dataset(table, fingerprint="rows")
    rows = table.with_format(None) if hasattr(table, "with_format") else table.to_pylist()
    return ({name: without_nulls(cell) for name, cell in row.items()} for row in rows)


def without_nulls(value: Any) -> Any:
    """Plain data without keys of mappings that are null, at any depth, except the content of a
    message, which is null if the message only calls tools."""
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's arrays, from pandas
    if isinstance(value, Mapping):
        return {str(key): without_nulls(item) for key, item in value.items()
                if item is not None or (key == "content" and value.get("role") is not None)}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


_READERS = {".json": _read_json, ".jsonl": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
            ".parquet": _read_parquet, ".txt": _read_txt}
SUFFIXES = tuple(_READERS)
SUFFIX_WORDS = ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
