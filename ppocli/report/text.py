"""Texts that a model or a user wrote, made harmless for a page, and numbers for people."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ppocli.display.figures import figure

# what moves the cursor, reorders neighbouring text or ends a line unseen; \n and \t stay
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e"
                     "\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&$@]|:(?=//)|(?<=\bwww)\.)")
_BLOCKS = "▁▂▃▄▅▆▇█"
LONGEST = 1500
"""characters of a response that a report shows"""


def visible(text: str) -> str:
    """``text`` with control and direction characters spelled out: ``\\x1b``, ``\\u202e``."""
    return _HIDDEN.sub(_spelled, text.replace("\r\n", "\n"))


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shown(text: str, longest: int = LONGEST) -> str:
    """``text`` made visible, and its end replaced by a note where it is very long."""
    if len(text) > longest:
        return f"{visible(text[:longest])} … ({len(text) - longest:,} more characters)"
    return visible(text)


def inline(value: Any) -> str:
    """Any text as literal Markdown, on one line and after other words, or in a table's cell."""
    text = " ".join(visible(str(value)).split())
    return _MARKDOWN.sub(r"\\\1", text)


def code(value: Any) -> str:
    """Any text as inline code in a Markdown table's cell, on one line."""
    text = " ".join(visible(str(value)).split()).replace("|", "\\|")
    ticks = "`" * (_longest_run(text) + 1)
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}" if text else ""


def fenced(text: str, language: str = "text") -> str:
    """A Markdown code block that ``text`` can't end: its fence is longer than any in it."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{visible(text)}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def labelled(rows: Sequence[tuple[str, str]]) -> str:
    """(label, text) as lines in columns; further lines of a text are indented."""
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, text in rows:
        first, *more = visible(text).split("\n")
        lines.append(f"{label.ljust(width)} | {first}".rstrip())
        lines += [f"{' ' * width} | {line}".rstrip() for line in more]
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Finite values as a line of at most ``width`` blocks, each a mean; the lowest is ``▁``.

    Means are halved, so that no sum or difference of them overflows.
    """
    if not values:
        return ""
    count = min(width, len(values))
    means = []
    for number in range(count):
        part = values[number * len(values) // count:(number + 1) * len(values) // count]
        means.append(math.fsum(value / len(part) / 2 for value in part))
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def bars(shares: Sequence[float], top: float) -> str:
    """Shares as blocks whose height is a part of ``top``; ``·`` for none."""
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(share / top * last)] if share else "·" for share in shares)


def number(value: float | None) -> str:
    """A figure in few characters: ``0.466``, ``1,234``, ``9.7e-04``; ``-`` for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else figure(value, 3)


def rounded(value: float | None) -> str:
    """A figure of size 1 or so with three decimals: of a KL, what rounds to nothing is nothing."""
    return number(value) if value is None or abs(value) >= 1000 else figure(value, 3)


def duration(seconds: float) -> str:
    """``34 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
