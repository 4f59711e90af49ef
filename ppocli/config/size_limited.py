"""Readers of JSON and YAML from others, such as the files of a downloaded run. They refuse files
that are too large, nested too deeply, no plain files, or grow by aliases, before these cost memory
or time."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from ppocli.config.text import format_bytes
from ppocli.errors import CheckpointError

MOST_BYTES = 64 << 20
"""maximum bytes of a file that is read as a whole"""
MOST_ROWS = 1 << 30
"""maximum bytes of a file of rows: those of 300,000 steps"""
MOST_LINE = 16 << 20
"""maximum bytes of a row"""
MOST_DEPTH = 64
MOST_NODES = 100_000
"""maximum values in YAML; OmegaConf takes 0.2 ms for each"""


def open_plain(path: Path, most: int = MOST_BYTES) -> BinaryIO:
    """Open a file for reading, from its beginning.

    Raises:
        CheckpointError: it is a pipe, a device or the like, or has more bytes than ``most``.
        OSError: it isn't there, or can't be read.
    """
    # opening a pipe would wait for somebody who writes to it
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    about = os.fstat(file.fileno())
    plain = stat.S_ISREG(about.st_mode)
    if plain and about.st_size <= most:
        return file
    file.close()
    what = f"larger than {format_bytes(most)}" if plain else "not a plain file"
    raise CheckpointError(f"{path} is {what}, and is not read.", where=str(path),
                          fix="if that isn't damage, move it out of the folder")


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        CheckpointError, OSError: as :func:`open_plain`.
    """
    with open_plain(path) as file:
        return file.read(MOST_BYTES)


def read_tail(path: Path) -> str:
    """The end of a text file that may be long; bytes that are no UTF-8 are marked.

    Raises:
        CheckpointError, OSError: as :func:`open_plain`.
    """
    with open_plain(path, 1 << 62) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
        return file.read(MOST_BYTES).decode("utf-8", errors="replace")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or nested too deeply for recursive functions.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, brackets)) > MOST_DEPTH:  # type: ignore[arg-type]
        level = [value]
        for _ in range(MOST_DEPTH):
            level = [item for each in level if isinstance(each, (dict, list))
                     for item in (each.values() if isinstance(each, dict) else each)]
        if level:
            raise ValueError("nested too deeply")
    return value


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        CheckpointError, OSError: as :func:`open_plain`.
        ValueError: as :func:`parse_json`.
    """
    return parse_json(read_bytes(path))


def check_yaml(text: str) -> str:
    """``text``, if it can be parsed in a short time.

    Raises:
        YAMLError: it is no YAML, or has aliases, which can stand for any number of copies, or too
            many or too deeply nested values.
    """
    depth = 0
    # the parser in C takes a fiftieth of the time
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for number, event in enumerate(events):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*), which no run's configuration has")
        if depth > MOST_DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
        if number > MOST_NODES:
            raise yaml.YAMLError(f"it holds more than {MOST_NODES:,} values")
    return text
