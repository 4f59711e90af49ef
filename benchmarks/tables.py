"""Tables, and the places in a Markdown file that programs write."""

from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def cells_of(text: str) -> list[list[str]]:
    """The rows of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")]
            for line in text.splitlines() if line.startswith("|")][2:]


def marks(name: str) -> tuple[str, str]:
    """The lines between which a program writes."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def between(path: Path, name: str) -> str:
    """What stands between the marker lines ``name`` of a Markdown file.

    Raises:
        SystemExit: the file has not exactly one pair of them, in this order.
    """
    begin, end = marks(name)
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    text, closed, after = rest.partition(end)
    if not (found and closed) or begin in rest or end in before + after:
        raise SystemExit(f"{path} needs the lines {begin} and {end}, once each")
    return text


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between the marker lines ``name`` of a Markdown file.

    Raises:
        SystemExit: as of :func:`between`.
    """
    begin, end = marks(name)
    before, _, after = path.read_text(encoding="utf-8").partition(
        f"{begin}{between(path, name)}{end}")
    path.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
