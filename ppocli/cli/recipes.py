"""``ppocli recipes``: what ships, what it says, and a copy to change."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppocli.cli.output import say
from ppocli.config.keys import did_you_mean
from ppocli.config.paths import recipe_files
from ppocli.errors import ConfigError, DiskError


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """One row of ``ppocli recipes list``."""

    name: str
    model: str
    reward: str
    prompts: str
    needs_network: bool
    purpose: str
    file: str


def recipe_file(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ConfigError: there is none of that name.
    """
    files = recipe_files()
    if name not in files:
        raise ConfigError(f"unknown recipe {name}{did_you_mean(name, list(files))}",
                          fix="choose one of: " + ", ".join(files))
    return files[name]


def print_list(as_json: bool) -> None:
    """Print all recipes, as a table or as JSON; one that doesn't compose says why."""
    infos = [_info(name, file) for name, file in recipe_files().items()]
    if as_json:
        print(json.dumps([asdict(info) for info in infos], indent=2, ensure_ascii=False))
        return
    rows = [("name", "model", "reward", "prompts", "network", "purpose")]
    rows += [(i.name, i.model, i.reward, i.prompts, "yes" if i.needs_network else "no", i.purpose)
             for i in infos]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]))


def _info(name: str, file: Path) -> RecipeInfo:
    from ppocli.config.compose import compose
    from ppocli.config.words import read_words

    try:
        config = compose(read_words([f"+recipe={name}"])).values()
    except ConfigError as error:
        return RecipeInfo(name, "?", "?", "?", False,
                          f"broken: {error.what.splitlines()[0]}", str(file))
    rewards = {entry["fn"]: entry.get("kwargs") or {} for entry in config.reward.fns.values()} or {
        config.reward.fn or "?": config.reward.kwargs}
    model = "?" if config.model.path == "???" else config.model.path
    prompts = config.prompts.path or ("inline" if config.prompts.items else "BOS")
    used = [model, prompts, *(str(kwargs.get("model", "")) for kwargs in rewards.values())]
    return RecipeInfo(name, model, " + ".join(_reward(*item) for item in rewards.items()), prompts,
                      any(_on_hub(value) for value in used), _purpose(file), str(file))


def _reward(fn: str, kwargs: dict[str, Any]) -> str:
    return f"{fn} {kwargs['model']}" if "model" in kwargs else fn


def _on_hub(value: str) -> bool:
    return (value not in ("", "?", "inline", "BOS") and not value.startswith("builtin:")
            and not value.startswith((".", "/", "~")) and not Path(value).exists())


def _purpose(file: Path) -> str:
    """The first sentence of the header comment."""
    lines = [line.lstrip("# ").strip() for line in file.read_text(encoding="utf-8").splitlines()
             if line.startswith("#") and not line.startswith("# @")]
    return lines[0] if lines else ""


def print_recipe(name: str, words: list[str], resolved: bool) -> None:
    """Print a recipe's YAML, or what it composes to with ``words``.

    Raises:
        ConfigError: unknown recipe, or wrong words.
    """
    file = recipe_file(name)
    if not resolved and not words:
        print(file.read_text(encoding="utf-8"), end="")
        return
    from ppocli.config.compose import print_composition
    from ppocli.config.words import read_words

    print_composition(read_words([f"+recipe={name}", *words, "--cfg", "job",
                                  *(["--resolve"] if resolved else [])]))


def copy_recipe(name: str, destination: Path | None, force: bool) -> None:
    """Copy a recipe to ``destination`` (default: ``./recipes``) and say how it is used.

    Raises:
        ConfigError: unknown recipe, or the file is there already and ``force`` isn't given.
        DiskError: it can't be written.
    """
    source = recipe_file(name)
    target = destination if destination is not None else Path("recipes")
    if target.is_dir() or target.suffix not in (".yaml", ".yml"):
        target = target / f"{name}.yaml"
    if target.suffix == ".yml":
        raise ConfigError(f"{target}: recipes end in .yaml", fix=f"{target.with_suffix('.yaml')}")
    same = target.exists() and target.samefile(source)
    if same or (target.exists() and not force):
        raise ConfigError(f"{target} exists already" + (" and is that recipe" if same else ""),
                          fix="give another name, e.g. " + str(target.with_name("mine.yaml"))
                          + ("" if same else ", or overwrite it with --force"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise DiskError(f"{target} can't be written: {error.strerror}", where=str(target),
                        fix="choose another folder") from error
    print(target)
    folder = target.parent.resolve()
    option = "" if folder == Path.cwd() / "recipes" else f"--config-dir {target.parent} "
    say(f"Change it, then run: ppocli train {option}+recipe={target.stem}")
