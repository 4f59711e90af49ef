"""Several paths of rows in one text: ``{a.jsonl,b.jsonl}``, as in shells. A list in a configuration
becomes such a text, so that each key of rows holds one text."""

from collections.abc import Sequence


def row_paths(path: str) -> list[str]:
    """The paths in a text: those in braces, else the text itself."""
    several = path.startswith("{") and path.endswith("}")
    return [part.strip() for part in path[1:-1].split(",")] if several else [path]


def joined_paths(paths: Sequence[str]) -> str:
    """The text of several paths.

    Raises:
        ValueError: one is empty, or has a comma or a brace in it.
    """
    if len(paths) == 1:
        return paths[0]
    if not paths or any(not path.strip() or set(path) & set("{},") for path in paths):
        raise ValueError("a list of paths needs at least one, without commas and braces in them")
    return "{" + ",".join(paths) + "}"
