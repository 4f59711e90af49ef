"""Texts that a model or a user wrote, made harmless for a page, and numbers for people."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ppocli.text import BLOCKS, figure, printable

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&$@]|:(?=//)|(?<=\bwww)\.)")
LONGEST = 1500
"""characters of a response that a report shows"""


def shown(text: str, longest: int = LONGEST) -> str:
    """``text`` made harmless, and its end replaced by a note where it is very long."""
    if len(text) > longest:
        return f"{printable(text[:longest])} … ({len(text) - longest:,} more characters)"
    return printable(text)


def inline(value: Any) -> str:
    """Any text as literal Markdown, on one line and after other words, or in a table's cell."""
    text = " ".join(printable(str(value)).split())
    return _MARKDOWN.sub(r"\\\1", text)


def code(value: Any) -> str:
    """Any text as inline code in a Markdown table's cell, on one line."""
    text = " ".join(printable(str(value)).split()).replace("|", "\\|")
    ticks = "`" * (_longest_run(text) + 1)
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}" if text else ""


def fenced(text: str, language: str = "text") -> str:
    """A Markdown code block that ``text`` can't end: its fence is longer than any in it."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def labelled(rows: Sequence[tuple[str, str]]) -> str:
    """(label, text) as lines in columns; further lines of a text are indented."""
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, text in rows:
        first, *more = printable(text).split("\n")
        lines.append(f"{label.ljust(width)} | {first}".rstrip())
        lines += [f"{' ' * width} | {line}".rstrip() for line in more]
    return "\n".join(lines)


def bars(shares: Sequence[float], top: float) -> str:
    """Shares as blocks whose height is a part of ``top``; ``·`` for none."""
    last = len(BLOCKS) - 1
    return "".join(BLOCKS[round(share / top * last)] if share else "·" for share in shares)


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
