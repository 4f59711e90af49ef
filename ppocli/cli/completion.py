"""What the shell offers after TAB for the words of ``ppocli train``: no Hydra, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ppocli.config.paths import config_groups, recipe_files


def complete_word(words: list[str], incomplete: str) -> list[str]:
    """Completions of the last word.

    Bash breaks words at ``=``: there the words end in ``["+recipe", "="]``, or in ``["+recipe"]``
    with nothing after it yet, and only the part after ``=`` is to be offered.
    """
    if incomplete == "" and words and "=" not in words[-1] and not words[-1].startswith(("-", "~")):
        return _values(words[-1], "")
    if len(words) >= 2 and words[-1] == "=":
        return _values(words[-2], incomplete)
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={option}" for option in _values(key, value)]
    return sorted(name for name in _names() if name.startswith(incomplete))


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes that begin so."""
    return [name for name in recipe_files() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Run folders below ``runs`` that begin so, the newest first."""
    from ppocli.runs.target import list_runs, written

    found = sorted(list_runs(Path("runs")), key=written, reverse=True)
    return [str(folder) for folder in found if str(folder).startswith(incomplete)]


def _names() -> Iterator[str]:
    from ppocli.config.keys import schema_keys

    yield "+recipe="
    yield "recipe="
    for group in config_groups():
        yield f"{group}="
    for name in schema_keys():
        yield f"{name}="
    yield from ("-m", "--multirun", "--cfg", "--resolve", "--info", "--config-dir", "--package",
                "--hydra-help", "--help")


def _values(key: str, value: str) -> list[str]:
    from ppocli.config.keys import schema_keys

    done, comma, last = value.rpartition(",")  # a sweep: a,b,...
    name = key.lstrip("+")
    if name == "recipe":
        options = list(recipe_files())
    elif name in config_groups():
        options = config_groups()[name]
    else:
        schema_key = schema_keys().get(name)
        choices = schema_key.metadata["choices"] if schema_key else None
        options = list(choices or (("true", "false") if schema_key and schema_key.item is bool
                                   else ()))
        if name == "model.path":
            options = ["builtin:reviews", "builtin:randomwalks"]
    return [f"{done}{comma}{option}" for option in options if option.startswith(last)]
