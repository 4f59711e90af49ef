"""``ppocli recipes``, ``validate`` and ``schema``: settings of whole runs, and what can be set."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ppocli.builtin.names import BUILTIN_PREFIX, recipe_files
from ppocli.cli.options import AsJson, Command, Overrides, flag, group
from ppocli.cli.output import print_json, print_table, reward_labels, say
from ppocli.config.text import did_you_mean, pasted
from ppocli.distributed.standard_output import put
from ppocli.errors import ConfigError, DiskError, PpocliError

if TYPE_CHECKING:
    from ppocli.config.keys import Key

recipes_app = group("List, show and copy recipes.")
Name = Annotated[str, typer.Argument(autocompletion=lambda: list(recipe_files()))]


@recipes_app.command("list", cls=Command)
def print_recipes(as_json: AsJson = False) -> None:
    """List the recipes: those in ./recipes of the current folder, then the included ones."""
    recipes = [_facts(name, file) for name, file in recipe_files().items()]
    if as_json:
        print_json(recipes)
        return
    columns = ("purpose", "model", "reward", "prompts")
    print_table([("name", "network", *columns), *(
        (each["name"], "yes" if each["needs_network"] else "no",
         *(each[column] or "-" for column in columns))
        for each in recipes)])


def _facts(name: str, file: Path) -> dict[str, Any]:
    """What the list says of a recipe; of one that doesn't compose, why."""
    from ppocli.config import compose, problems, tasks
    from ppocli.config.command_words import read_words

    facts = {"name": name, "model": "?", "reward": "?", "prompts": "?", "needs_network": False,
             "purpose": "", "file": str(file)}
    try:
        lines = _text(file).splitlines()
        config = compose.compose(read_words([f"+recipe={name}"])).values()
        problems.raise_problems([problem for problem in problems.find_problems(config)
                                 if problem.key.startswith("reward.fns.")])
    except PpocliError as error:
        return {**facts, "purpose": f"broken: {error.what.splitlines()[0]}"}
    purpose = next((line.lstrip("# ") for line in lines
                    if line.startswith("#") and not line.startswith("# @")), "")
    model, reward_section = config.model, config.reward
    start = "?" if model.path == "???" else model.path
    if tasks.task_name(config) in tasks.DATA_TASKS:
        rows, reward = config.data.path or "?", None
    else:
        rows = config.prompts.path or ("inline" if config.prompts.items else "BOS")
        has_reward = reward_section.fn or reward_section.fns or config.env.fn
        reward = " + ".join(reward_labels(reward_section)) if has_reward else "?"
    used = [start, model.tokenizer_path, model.reference.path, model.value.path, rows,
            config.prompts.eval.path, config.ppo.ptx.data.path, tasks.val_source(config.data),
            *((kwargs or {}).get("model") for kwargs in (reward_section.kwargs, *(
                entry.get("kwargs") for entry in reward_section.fns.values())))]
    here = (BUILTIN_PREFIX, ".", "/", "~", config.output_dir.rstrip("/") + "/")
    on_hub = [value for value in used if isinstance(value, str) and not value.startswith(here)
              and value not in ("", "?", "inline", "BOS") and not os.path.exists(value)]
    return {**facts, "model": start, "prompts": rows, "reward": reward, "purpose": purpose.strip(),
            "needs_network": bool(on_hub)}


def _text(file: Path) -> str:
    """What a recipe's file holds.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}",
                          fix="save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}",
                          fix="correct or remove it") from error


@recipes_app.command("show", cls=Command)
def print_recipe(name: Name) -> None:
    """Print a recipe as YAML."""
    put(_text(recipe_file(name)), end="")


@recipes_app.command("copy", cls=Command)
def copy_recipe(name: Name,
                destination: Annotated[Path | None, typer.Argument(
                    metavar="[DEST]", help="File or folder (default: ./recipes).")] = None,
                overwrite: bool = flag("Replace an existing file.", "--overwrite")) -> None:
    """Copy a recipe in order to change it."""
    source = recipe_file(name)
    target = destination if destination is not None else Path("recipes")
    if target.is_dir() or target.suffix not in (".yaml", ".yml"):
        target = target / f"{name}.yaml"
    if target.suffix == ".yml":
        raise ConfigError(f"{target}: recipes end in .yaml", fix=f"{target.with_suffix('.yaml')}")
    same = target.exists() and target.samefile(source)
    if same or (target.exists() and not overwrite):
        raise ConfigError(f"{target} exists already" + (" and is that recipe" if same else ""),
                          fix="give another name, e.g. " + str(target.with_name("mine.yaml"))
                          + ("" if same else ", or replace it with --overwrite"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise DiskError(f"{target} can't be written: {error.strerror}", where=str(target),
                        fix="choose another folder") from error
    put(target)
    folder = target.parent.resolve()
    option = "" if folder == Path.cwd() / "recipes" else f"--config-dir {pasted(target.parent)} "
    say(f"Change it, then run: ppocli train {option}{pasted('+recipe=' + target.stem)}")


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


def validate(overrides: Overrides = None,
             deep: bool = flag("", "--deep", hidden=True), as_json: AsJson = False) -> None:
    """Report everything that is wrong with a run, or with all jobs of a sweep, before it starts.

    Checks settings, models, prompts, rewards and the output folder, and reports every problem with
    its origin and its fix. Nothing is written. Exit code 0: valid; 2 settings, 3 model or data,
    7 reward, 6 disk, 5 run folder (for several kinds, the first in this order).

    \b
    Examples:
      ppocli validate +recipe=quickstart
      ppocli validate model.path=./lm prompts.path=prompts.jsonl reward.fn=my_rewards:score \\
          ppo.total_episodes=2000
      ppocli validate -m +recipe=quickstart seed=1,2
    """
    from ppocli.cli.validate import validate_words

    if deep:
        raise ConfigError("validate loads no weights.", where="--deep",
                          fix="ppocli train ... --dry-run loads everything and tries a step")
    validate_words(overrides or [], as_json=as_json)


# The schema ---------------------------------------------------------------------------------------

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_INTERPOLATION = {"$ref": "#/$defs/interpolation"}


def complete_key(incomplete: str) -> list[str]:
    """Keys and sections of the configuration."""
    from ppocli.config.keys import schema_keys, schema_sections

    return [*schema_sections(), *schema_keys()]


def print_schema(
        name: Annotated[str | None, typer.Argument(
            metavar="[KEY]", autocompletion=complete_key,
            help="A key or a section: ppo.vf_coef, ppo (default: all).")] = None,
        as_json: bool = flag("Print a JSON Schema, for editors and other programs.", "--json")
        ) -> None:
    """Print every setting with its type, default, allowed values and meaning.

    \b
    Examples:
      ppocli schema ppo
      ppocli schema generation.top_p
      ppocli schema --json > ppocli.schema.json
    """
    if as_json:
        print_json(json_schema(name))
    else:
        put("\n".join(map(_shown, chosen_keys(name))))


def chosen_keys(name: str | None) -> list[Key]:
    """The keys that ``name`` is or holds; all for None.

    Raises:
        ConfigError: there is no such key or section.
    """
    from ppocli.config.keys import schema_keys, schema_sections

    keys = schema_keys()
    if name is None:
        return list(keys.values())
    matches = [key for key in keys.values() if key.name == name or key.name.startswith(name + ".")]
    if not matches:
        raise ConfigError(f"{name}: there is no such key or section"
                          + did_you_mean(name, [*keys, *schema_sections()]),
                          where="command line", fix="ppocli schema lists all keys")
    return matches


def _shown(key: Key) -> str:
    from omegaconf import MISSING

    default = "must be given" if key.default == MISSING else (
        f"default {json.dumps(key.default, ensure_ascii=False)}")
    values = key.allowed if key.metadata["choices"] else ", ".join(
        text for text in (key.expected, key.allowed) if text)
    if key.metadata["choices"] and key.optional:
        values += " or null"
    doc = textwrap.fill(key.doc, 96, initial_indent="    ", subsequent_indent="    ",
                        break_long_words=False, break_on_hyphens=False)
    return f"{key.name}  ({values}; {default})\n{doc}"


def json_schema(name: str | None = None) -> dict[str, Any]:
    """A JSON Schema, draft 2020-12, of the configuration, or of one of its keys or sections.

    The whole one fits recipe files too: no key is required, and Hydra's ``defaults`` are allowed.
    An interpolation such as ``${ppo.num_rollouts}`` may stand for any value.

    Raises:
        ConfigError: there is no such key or section.
    """
    from ppocli.config.schema import TrainConfig

    chosen_keys(name)
    body = _section(TrainConfig)
    for part in name.split(".") if name else ():
        body = body["properties"][part]
    if name is None:
        body["properties"] = {
            "defaults": {"type": "array", "description": "Hydra's defaults list: which config "
                         "groups a recipe starts from"},
            "hydra": {"type": "object", "description": "settings of Hydra itself"},
            **body["properties"]}
    return {"$schema": DIALECT, "title": "ppocli configuration" + (f": {name}" if name else ""),
            **body, "$defs": {"interpolation": {
                "type": "string", "pattern": r"\$\{.+\}",
                "description": "the value of another key: ${key}"}}}


def _section(section: type, prefix: str = "") -> dict[str, Any]:
    """The object of a dataclass of the schema, whose keys begin with ``prefix``."""
    from ppocli.config.keys import doc_of, schema_keys

    properties: dict[str, Any] = {}
    for field in fields(section):
        name = prefix + field.name
        properties[field.name] = _value(schema_keys()[name]) if name in schema_keys() else {
            "description": doc_of(section, field.name),
            **_section(get_type_hints(section)[field.name], name + ".")}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(key: Key) -> dict[str, Any]:
    from omegaconf import MISSING

    about: dict[str, Any] = {"description": key.doc}
    if key.default != MISSING:
        about["default"] = key.default
    if key.kind == "list":
        body: dict[str, Any] = {"type": "array", "items": {"anyOf": [_item(key), _INTERPOLATION]}
                                if key.item is not Any else {}}
    elif key.name == "reward.fns":
        body = {"type": "object", "additionalProperties": _fns_entry()}
    elif key.kind == "mapping":
        body = {"type": "object"}
    elif key.kind == "sweep":
        body = {"anyOf": [_item(key), {"type": "array", "minItems": 1,
                                       "items": {"anyOf": [_item(key), _INTERPOLATION]}}]}
    else:
        body = _item(key)
    options = [body, _INTERPOLATION, *([{"type": "null"}] if key.optional else [])]
    return {**about, "anyOf": options}


def _item(key: Key) -> dict[str, Any]:
    if key.metadata["choices"]:
        choices = {"enum": list(key.metadata["choices"])}
        import_path = {"type": "string", "pattern": "[:.]"}  # an import path
        return {"anyOf": [choices, import_path]} if key.metadata["import_path"] else choices
    bounds = {word: key.metadata[name] for name, word in _BOUNDS.items()
              if key.metadata[name] is not None}
    return {"type": _TYPES[key.item], **bounds}


def _fns_entry() -> dict[str, Any]:
    from ppocli.config.schema import FNS_KEYS, REWARD_STYLES

    shapes = {"fn": {"type": "string", "minLength": 1}, "kwargs": {"type": ["object", "null"]},
              "weight": {"type": "number"}, "style": {"enum": ["auto", *REWARD_STYLES]}}
    return {"type": "object", "properties": {name: shapes[name] for name in FNS_KEYS},
            "required": ["fn"], "additionalProperties": False}
