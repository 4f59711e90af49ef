"""Readers of JSON and YAML from others, such as the files of a downloaded run. They refuse files
that are too large, nested too deeply, or grow by aliases, before these cost memory or time."""

import json
import os
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
"""maximum depth of YAML"""


def open_plain(path: Path, most: int = MOST_BYTES) -> BinaryIO:
    """Open a file for reading, from its beginning.

    Raises:
        CheckpointError: it has more bytes than ``most``.
        OSError: it isn't there, or can't be read.
    """
    file = path.open("rb")
    if os.fstat(file.fileno()).st_size <= most:
        return file
    file.close()
    raise CheckpointError(f"{path} is larger than {format_bytes(most)}, and is not read.",
                          where=str(path), fix="if that isn't damage, move it out of the folder")


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
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


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
        YAMLError: it is no YAML, or has aliases, which can stand for any number of copies, or is
            nested too deeply.
    """
    depth = 0
    # the parser in C takes a fiftieth of the time
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > MOST_DEPTH:
            raise yaml.YAMLError("it is nested too deeply" if depth > MOST_DEPTH else
                                 "it has an alias (*), which no run's configuration has")
    return text
