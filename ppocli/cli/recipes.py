"""``ppocli recipes``: what ships, what it says, and a copy to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ppocli.builtin.names import BUILTIN_PREFIX, recipe_files
from ppocli.cli.completion import complete_recipe
from ppocli.cli.options import WORDS, AsJson, Command, Overrides
from ppocli.cli.output import print_json, print_table, say
from ppocli.errors import ConfigError, DiskError
from ppocli.text import did_you_mean

recipes_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                          help="List, show and copy recipes.")

Name = Annotated[str, typer.Argument(autocompletion=complete_recipe)]


@recipes_app.command("list", cls=Command)
def print_recipes(as_json: AsJson = False) -> None:
    """List the recipes: those in ./recipes of the current folder, then the included ones."""
    found = [_facts(name, file) for name, file in recipe_files().items()]
    if as_json:
        print_json(found)
        return
    print_table([("name", "model", "reward", "prompts", "network", "purpose"), *(
        (each["name"], each["model"], each["reward"], each["prompts"],
         "yes" if each["needs_network"] else "no", each["purpose"]) for each in found)])


def _facts(name: str, file: Path) -> dict[str, Any]:
    """What the list says of a recipe; of one that doesn't compose, why."""
    from ppocli.config.compose import compose
    from ppocli.config.words import read_words

    facts = {"name": name, "model": "?", "reward": "?", "prompts": "?", "needs_network": False,
             "purpose": _purpose(file), "file": str(file)}
    try:
        config = compose(read_words([f"+recipe={name}"])).values()
    except ConfigError as error:
        return {**facts, "purpose": f"broken: {error.what.splitlines()[0]}"}
    rewards = {entry["fn"]: entry.get("kwargs") or {} for entry in config.reward.fns.values()} or {
        config.reward.fn or "?": config.reward.kwargs}
    model = "?" if config.model.path == "???" else config.model.path
    prompts = config.prompts.path or ("inline" if config.prompts.items else "BOS")
    used = [model, prompts, *(str(kwargs.get("model", "")) for kwargs in rewards.values())]
    return {**facts, "model": model, "prompts": prompts,
            "reward": " + ".join(f"{fn} {kwargs['model']}" if "model" in kwargs else fn
                                 for fn, kwargs in rewards.items()),
            "needs_network": any(_on_hub(value) for value in used)}


def _on_hub(value: str) -> bool:
    return (value not in ("", "?", "inline", "BOS") and not value.startswith(BUILTIN_PREFIX)
            and not value.startswith((".", "/", "~")) and not Path(value).exists())


def _purpose(file: Path) -> str:
    """The first sentence of the header comment."""
    lines = [line.lstrip("# ").strip() for line in file.read_text(encoding="utf-8").splitlines()
             if line.startswith("#") and not line.startswith("# @")]
    return lines[0] if lines else ""


@recipes_app.command("show", cls=Command, context_settings=WORDS)
def print_recipe(name: Name, overrides: Overrides = None,
                 resolved: Annotated[bool, typer.Option(
                     "--resolved", help="Print the resulting settings in full.")] = False) -> None:
    """Print a recipe as YAML; with settings or --resolved, the resulting settings."""
    file = recipe_file(name)
    if not resolved and not overrides:
        print(file.read_text(encoding="utf-8"), end="")
        return
    from ppocli.config.compose import print_composition
    from ppocli.config.words import read_words

    print_composition(read_words([f"+recipe={name}", *(overrides or ()), "--cfg", "job",
                                  *(["--resolve"] if resolved else [])]))


@recipes_app.command("copy", cls=Command)
def copy_recipe(name: Name,
                destination: Annotated[Path | None, typer.Argument(
                    metavar="[DEST]", help="File or folder (default: ./recipes).")] = None,
                force: Annotated[bool, typer.Option(
                    "--force", help="Overwrite an existing file.")] = False) -> None:
    """Copy a recipe in order to change it."""
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
