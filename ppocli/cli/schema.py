"""``ppocli schema``: every setting, for people and as a JSON Schema for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli.completion import complete_key
from ppocli.cli.output import print_json
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.config.keys import Key

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_INTERPOLATION = {"$ref": "#/$defs/interpolation"}


def print_schema(
        name: Annotated[str | None, typer.Argument(
            metavar="[KEY]", autocompletion=complete_key, show_default=False,
            help="A key or a section: ppo.vf_coef, ppo (default: all).")] = None,
        as_json: Annotated[bool, typer.Option(
            "--json", help="Print a JSON Schema, for editors and other programs.")] = False
        ) -> None:
    """Print every setting with its type, default, allowed values and meaning.

    \b
    Examples:
      ppocli schema ppo
      ppocli schema generation.top_p
      ppocli schema --json > ppocli.schema.json
    """
    keys = chosen_keys(name)
    if as_json:
        print_json(json_schema(name))
        return
    print("\n".join(_shown(key) for key in keys))


def chosen_keys(name: str | None) -> list[Key]:
    """The keys that ``name`` is or holds; all for None.

    Raises:
        ConfigError: there is no such key or section.
    """
    from ppocli.config.keys import schema_keys, schema_sections
    from ppocli.text import did_you_mean

    keys = schema_keys()
    if name is None:
        return list(keys.values())
    found = [key for key in keys.values() if key.name == name or key.name.startswith(name + ".")]
    if not found:
        raise ConfigError(f"{name}: there is no such key or section"
                          + did_you_mean(name, [*keys, *schema_sections()]),
                          where="command line", fix="ppocli schema lists all keys")
    return found


def _shown(key: Key) -> str:
    import json
    import textwrap

    from omegaconf import MISSING

    default = "must be given" if key.default == MISSING else (
        f"default {json.dumps(key.default, ensure_ascii=False)}")
    values = key.allowed if key.metadata["choices"] else ", ".join(
        text for text in (key.expected, key.allowed) if text)
    if key.metadata["choices"] and key.optional:
        values += " or null"
    doc = textwrap.fill(key.metadata["doc"], 96, initial_indent="    ", subsequent_indent="    ",
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
    head: dict[str, Any] = {"$schema": DIALECT,
                            "title": "ppocli configuration" + (f": {name}" if name else "")}
    if name is None:
        body["properties"] = {
            "defaults": {"type": "array", "description": "Hydra's defaults list: which config "
                         "groups a recipe starts from"},
            "hydra": {"type": "object", "description": "settings of Hydra itself"},
            **body["properties"]}
    definitions = {"interpolation": {"type": "string", "pattern": r"\$\{.+\}",
                                     "description": "the value of another key: ${key}"}}
    return {**head, **body, "$defs": definitions}


def _section(section: type, prefix: str = "") -> dict[str, Any]:
    """The object of a dataclass of the schema, whose keys begin with ``prefix``."""
    import dataclasses
    import typing

    from ppocli.config.keys import schema_keys

    properties: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        name = prefix + field.name
        properties[field.name] = _value(schema_keys()[name]) if name in schema_keys() else {
            "description": field.metadata["doc"],
            **_section(typing.get_type_hints(section)[field.name], name + ".")}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(key: Key) -> dict[str, Any]:
    from omegaconf import MISSING

    about: dict[str, Any] = {"description": key.metadata["doc"]}
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
        body = {"anyOf": [_item(key), {"type": "array", "minItems": 1, "uniqueItems": True,
                                       "items": {"anyOf": [_item(key), _INTERPOLATION]}}]}
    else:
        body = _item(key)
    options = [body, _INTERPOLATION, *([{"type": "null"}] if key.optional else [])]
    return {**about, "anyOf": options}


def _item(key: Key) -> dict[str, Any]:
    if key.metadata["choices"]:
        choices = {"enum": list(key.metadata["choices"])}
        own = {"type": "string", "pattern": "[:.]"}  # an import path
        return {"anyOf": [choices, own]} if key.metadata["import_path"] else choices
    bounds = {word: key.metadata[name] for name, word in _BOUNDS.items()
              if key.metadata[name] is not None}
    return {"type": _TYPES[key.item], **bounds}


def _fns_entry() -> dict[str, Any]:
    from ppocli.config.problems import FNS_KEYS

    shapes = {"fn": {"type": "string", "minLength": 1}, "kwargs": {"type": ["object", "null"]},
              "weight": {"type": "number"}}
    return {"type": "object", "properties": {name: shapes[name] for name in FNS_KEYS},
            "required": ["fn"], "additionalProperties": False}
