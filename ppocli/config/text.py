"""Short texts for people: similar names, first lines of errors, counts, sizes, figures, and foreign
text without control characters. Pure functions of the standard library."""

import difflib
import math
import os
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

Say = Callable[[str], None]
"""shows one line to a person"""
LONGEST_LINE = 300
"""maximum characters of an exception's line in a message"""
LONGEST_MESSAGE = 4000
"""maximum characters of an exception's message"""

# characters that move a cursor, end a line, reorder text or are half of a character
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
                     "\ud800-\udfff\ufeff\ufffe\uffff]")


def printable(text: str) -> str:
    """``text`` with control characters escaped, as ``\\x1b``; line breaks and tabs stay."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))


def printable_json(text: str) -> str:
    """JSON text with control characters as JSON escapes; only its strings can contain any."""
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def clean(text: str) -> str:
    """Model text on one line, without control characters, which may be terminal escapes."""
    return CONTROL.sub("?", text.replace("\n", " ⏎ "))


def error_text(error: object) -> str:
    """The message of an exception, cut if it is very long."""
    return cut(str(error), LONGEST_MESSAGE)


def first_line(error: BaseException | str) -> str:
    """The first line of a library's exception; the name of its type if its message is empty."""
    text = error_text(error).strip()
    return text.splitlines()[0][:LONGEST_LINE] if text else type(error).__name__


def error_line(error: BaseException) -> str:
    """``ValueError: message``: type and first line of an exception of the user's code."""
    lines = error_text(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def short_path(path: str) -> str:
    """``path``, relative to the current folder if it lies inside."""
    try:
        here = os.getcwd() + os.sep
    except FileNotFoundError:  # the current folder was deleted
        return path
    return path[len(here):] if path.startswith(here) else path


def cut(text: str, longest: int) -> str:
    """``text``; of a longer one the first characters and dots, ``longest`` in all."""
    return text if len(text) <= longest else text[:longest - 3] + "..."


def shown(value: Any) -> str:
    """A value as the user would write it, cut to a readable length."""
    if isinstance(value, float):  # 1.0000001 is not 1
        text = short if float(short := f"{value:g}") == value else repr(value)
    else:
        text = ("null" if value is None else str(value).lower() if isinstance(value, bool)
                else str(value) or repr(value))
    return cut(text, 80)


_ESCAPES = re.compile(r"(\\+)([nt])")
_BREAKS = {"n": "\n", "t": "\t"}


def unescaped(text: str) -> str:
    """The text that is meant on a command line, where a line break is hard to type: ``\\n`` is a
    line break, ``\\t`` a tab, ``\\\\n`` a backslash and an n. Other backslashes stay."""
    def meant(match: re.Match[str]) -> str:
        backslashes, letter = match[1], match[2]
        kept = backslashes[:len(backslashes) // 2]
        return kept + (_BREAKS[letter] if len(backslashes) % 2 else letter)

    return _ESCAPES.sub(meant, text)


def escaped(text: str) -> str:
    """The inverse of :func:`unescaped`."""
    return _ESCAPES.sub(r"\1\1\2", text)


def pasted(word: object) -> str:
    """A word of a command for bash or zsh, in quotes if it needs them."""
    return shlex.quote(str(word))


def counted(count: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def finite_number(value: object) -> float | None:
    """A figure from a file that may be damaged; None if it is no finite number."""
    with suppress(OverflowError):  # a whole number that is too large for a float
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    return None


def figure(value: object, digits: int, kind: Literal["f", "e"] = "f") -> str:
    """A figure with ``digits`` decimals; ``-`` if it is missing or no finite number."""
    if (number := finite_number(value)) is None:
        return "-"
    text = f"{number:.{digits}{kind}}"
    return text.removeprefix("-") if float(text) == 0 else text  # no minus before a rounded zero


def share_error(error: float, count: int) -> float:
    """The standard error to report for a share over ``count`` independent outcomes. It is at least
    half of Wilson's interval (1927) at one standard error for equal outcomes,
    ``1 / (2 (count + 1))``: ten of ten is no certainty.

    Args:
        error: the standard error of the outcomes, 0 if all are equal.
    """
    return max(error, 0.5 / (count + 1))


def each_text(value: Any, change: Callable[[str], str],
              change_key: Callable[[Any], Any] = lambda key: key) -> Any:
    """Plain data with ``change`` applied to each text, and ``change_key`` to each key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_key(key): each_text(item, change, change_key) for key, item in value.items()}
    return [each_text(item, change, change_key) for item in value] \
        if isinstance(value, list | tuple) else value


def parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of plain data and of all parts of it; items of a list have the list's
    name."""
    yield name, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from parts_of(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from parts_of(name, item)


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], cells: int = 32) -> str:
    """A curve in at most ``cells`` block characters. Each is the mean of its share of the values,
    scaled to their range; a share without values is a blank."""
    total, count = len(values), min(cells, len(values))
    shares = (values[cell * total // count:(cell + 1) * total // count] for cell in range(count))
    parts = [[value for value in share if value is not None] for share in shares]
    # halved, so that sums and differences don't overflow
    means = [math.fsum(value / len(part) / 2 for value in part) if part else None for part in parts]
    present = [mean for mean in means if mean is not None]
    low, spread = min(present, default=0.0), max(present, default=0.0) - min(present, default=0.0)

    def block(mean: float) -> str:
        share = (mean - low) / spread if spread > 0 else 0.5
        return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]

    return "".join(" " if mean is None else block(mean) for mean in means)


def format_bytes(count: int) -> str:
    """``214000000`` as ``214 MB`` (decimal units, as disks are sold)."""
    unit, size = next((each for each in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
                       if count >= each[1]), ("bytes", 1))
    digits = 1 if unit == "GB" and count < 10 * size else 0
    return f"{count / size:.{digits}f} {unit}"


def format_memory(count: float) -> str:
    """``23.4 GiB``: bytes with about three digits (binary units, as memory is sold)."""
    unit, size = next((each for each in (("GiB", 2**30), ("MiB", 2**20)) if count >= each[1]),
                      ("KiB", 2**10))
    return f"{three_digits(count / size)} {unit}"


def three_digits(number: float) -> str:
    """A number with three significant digits, or all digits before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Up to ``count`` candidates similar to ``name``, the most similar first.

    Dotted names are compared whole and by their last part; the same last part (``lr`` for
    ``ppo.optimizer.lr``), section or beginning counts extra. Candidates much worse than the best
    are left out.
    """
    scores = {candidate: _likeness(name, candidate) for candidate in candidates}
    best = sorted((c for c, score in scores.items() if score >= 0.75), key=lambda c: -scores[c])
    return [c for c in best if scores[c] >= scores[best[0]] - 0.2][:count]


def _likeness(name: str, candidate: str) -> float:
    section, _, leaf = name.rpartition(".")
    other = candidate.rpartition(".")[2]
    score = (difflib.SequenceMatcher(None, name, candidate).ratio() / 2
             + difflib.SequenceMatcher(None, leaf, other).ratio() / 2)
    if leaf == other:
        score += 0.25
    elif len(leaf) >= 3 and other.startswith(leaf):
        score += 0.35
    return score + (0.2 if section and candidate.startswith(section + ".") else 0.0)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``; did you mean a or b?``, or "" if nothing is similar."""
    near = nearest(name, candidates)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """``Did you mean 'a'?``, or "" if nothing is similar."""
    near = nearest(name, candidates, count=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def raised_at(error: BaseException, file: str | None = None) -> str | None:
    """``FILE:LINE`` where ``error`` was raised: the innermost frame inside ``file``, if the
    traceback has one (the user's line, not a library's), else the innermost outside Python's import
    system."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith("<frozen importlib")]
    in_file = [frame for frame in frames if file is not None and frame.filename == file]
    if not frames:
        return None
    frame = (in_file or frames)[-1]
    return f"{short_path(frame.filename)}:{frame.lineno}"


def user_line(error: BaseException) -> str | None:
    """``FILE:LINE`` of the innermost frame of the user's code; None if the traceback has none."""
    ours, python = (os.path.dirname(os.path.realpath(file)) for file in (__file__, os.__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith("<") and "site-packages" not in frame.filename
              and not os.path.realpath(frame.filename).startswith((ours + os.sep, python + os.sep))]
    return f"{short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else None
