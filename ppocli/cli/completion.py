"""What the shell offers after TAB: no Hydra, no torch.

zsh, fish and our script for bash hand over the line as it was typed. Typer's own protocol for bash
hands over words that bash has broken at ``=`` and ``:``, and takes the last piece alone.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ppocli.config.paths import config_groups, recipe_files
from ppocli.errors import PpocliError

HYDRA_FLAGS = {
    "-m": "run every combination of KEY=A,B", "--multirun": "run every combination of KEY=A,B",
    "--cfg": "print the composed configuration", "--resolve": "with --cfg: resolve references",
    "--package": "with --cfg: a part of it", "--info": "where configuration comes from",
    "--config-dir": "a folder with recipes or config groups of your own",
    "--config-name": "another primary config", "--hydra-help": "Hydra's own help"}
_CFG = ("job", "hydra", "all", "deepspeed")
_FLAG_VALUES = {"--cfg": _CFG, "-c": _CFG,
                "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")}
_BREAKS = frozenset("=:")


def typed_words() -> list[str]:
    """The whole words before the one to be completed, the command's name first, as the shell has
    handed them over."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS")
    if line is not None:
        words = _split(line)
        return words if line.endswith(" ") or not words else words[:-1]
    words = _split(os.environ.get("COMP_WORDS", ""))
    count = os.environ.get("COMP_CWORD", "")
    return words[:int(count)] if count.isdigit() else words


def complete_word(words: Sequence[str], incomplete: str) -> list[str]:
    """Completions of the last word of ``ppocli train``.

    Args:
        words: those before it; bash may have broken them at ``=`` and ``:``.
        incomplete: its beginning; where bash has broken it, only what follows the break.
    """
    whole, kept = _joined(words)
    previous = whole[-1] if whole else ""
    if not kept and previous in _FLAG_VALUES:
        return [value for value in _FLAG_VALUES[previous] if value.startswith(incomplete)]
    # bash may stand right behind KEY=, and Typer has dropped the =
    if not kept and not incomplete and "=" not in previous and (offers := _values(previous, "")):
        return offers
    word = kept + incomplete
    key, equals, value = word.partition("=")
    offers = [f"{key}={option}" for option in _values(key, value)] if equals else \
        sorted(name for name in _names() if name.startswith(word)
               and (word or not name.startswith("-")))
    return [offer[len(kept):] for offer in offers if offer.startswith(kept)]


def described(offers: Iterable[str]) -> list[tuple[str, str]]:
    """Offers with a line of help for shells that show it: what a key means."""
    from ppocli.config.keys import schema_keys

    keys = schema_keys()
    found = []
    for offer in offers:
        key = keys.get(offer.removesuffix("=")) if offer.endswith("=") else None
        found.append((offer, HYDRA_FLAGS.get(offer, "") if key is None else key.metadata["doc"]))
    return found


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes that begin so."""
    return [name for name in recipe_files() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Run folders below ``runs`` that begin so, or their names, the newest first."""
    from ppocli.runs.target import list_runs, written

    found = sorted(list_runs(Path("runs")), key=written, reverse=True)
    paths = [str(folder) for folder in found if str(folder).startswith(incomplete)]
    return paths or [folder.name for folder in found if folder.name.startswith(incomplete)]


def complete_form(incomplete: str) -> list[str]:
    """What ``report --format`` can be."""
    return [form for form in ("html", "md", "both") if form.startswith(incomplete)]


def complete_metrics(incomplete: str) -> list[str]:
    """Names of figures with commas between them: short ones, and those of the newest run."""
    from ppocli.report.plot import SHORT
    from ppocli.runs.record import read_run

    done, comma, last = incomplete.rpartition(",")
    names = list(SHORT)
    with suppress(PpocliError, OSError):  # no run yet, or a damaged one
        names += [name for run in complete_run("")[:1] for name in read_run(Path(run)).names]
    return [f"{done}{comma}{name}" for name in dict.fromkeys(names) if name.startswith(last)]


def complete_key(incomplete: str) -> list[str]:
    """Keys and sections of the configuration that begin so."""
    from ppocli.config.keys import schema_keys, schema_sections

    return [name for name in (*schema_sections(), *schema_keys()) if name.startswith(incomplete)]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that is still open
        return line.split()


def _joined(words: Sequence[str]) -> tuple[list[str], str]:
    """Words as they were typed, and the beginning of the last one that bash has broken off."""
    whole: list[str] = []
    open_end = False
    for word in words:
        is_break = word != "" and set(word) <= _BREAKS
        if whole and (is_break or open_end):
            whole[-1] += word
        else:
            whole.append(word)
        open_end = is_break
    return (whole[:-1], whole[-1]) if open_end and whole else (whole, "")


def _names() -> Iterator[str]:
    from ppocli.config.keys import schema_keys

    yield "+recipe="
    yield "recipe="
    for group in config_groups():
        yield f"{group}="
    for name in schema_keys():
        yield f"{name}="
    yield from HYDRA_FLAGS
    yield "--help"


def _values(key: str, value: str) -> list[str]:
    from ppocli.config.keys import schema_keys

    done, comma, last = value.rpartition(",")  # a sweep: a,b,...
    name = key.lstrip("+")
    schema_key = schema_keys().get(name)
    if name == "recipe":
        options = list(recipe_files())
    elif name in config_groups():
        options = config_groups()[name]
    elif name == "resume":
        options = ["never", "auto", *complete_run("")]
    elif name in ("model.path", "prompts.path", "prompts.eval.path"):
        options = _builtin(name)
    elif name == "reward.fn":
        from ppocli.rewards.builtin import BUILTIN_REWARDS

        options = list(BUILTIN_REWARDS)
    else:
        choices = schema_key.metadata["choices"] if schema_key else None
        options = list(choices or (("true", "false") if schema_key and schema_key.item is bool
                                   else ()))
        if schema_key and schema_key.kind == "list":
            options = [f"[{option}]" for option in options]
    return [f"{done}{comma}{option}" for option in options if option.startswith(last)]


def _builtin(key: str) -> list[str]:
    from ppocli.builtin.names import BUILTIN_PREFIX, list_builtins

    names = [name for name, about in list_builtins().items() if not about.startswith("classifier")]
    return [BUILTIN_PREFIX + name for name in names
            if name.endswith("prompts") == key.startswith("prompts.")]
