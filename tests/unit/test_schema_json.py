"""The JSON Schema says of every value what ppocli itself says of it."""

import json
import re
from typing import Any

import pytest
from helpers import with_node_values
from omegaconf import MISSING, OmegaConf

from ppocli.builtin.names import shipped
from ppocli.cli.output import code_of
from ppocli.cli.settings import json_schema, print_schema
from ppocli.config.keys import schema_keys, schema_sections
from ppocli.config.problems import range_problems

TYPES = {"integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
         "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
         "boolean": lambda v: isinstance(v, bool), "string": lambda v: isinstance(v, str),
         "null": lambda v: v is None, "array": lambda v: isinstance(v, list),
         "object": lambda v: isinstance(v, dict)}
LIMITS = {"minimum": lambda v, limit: v >= limit, "exclusiveMinimum": lambda v, limit: v > limit,
          "maximum": lambda v, limit: v <= limit, "exclusiveMaximum": lambda v, limit: v < limit}
ANNOTATIONS = {"description", "default", "title", "$schema", "$defs"}
VALUES = [-1, 0, 1, 0.5, 1.5, True, None, "", "adamw", "bf16", "free text", [], [1], [0.5, 2.5],
          [None], {"a": 1}]


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    """A validator of the words of JSON Schema that ours uses; others are an error."""
    return all(_follows(word, value, schema, whole) for word in schema if word not in ANNOTATIONS)


def _follows(word: str, value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    says = schema[word]
    if word in LIMITS:
        return not TYPES["number"](value) or LIMITS[word](value, says)
    others = (set(value) - set(schema.get("properties", {})) if isinstance(value, dict) else set())
    return {
        "$ref": lambda: fits(value, whole["$defs"][says.removeprefix("#/$defs/")], whole),
        "anyOf": lambda: any(fits(value, option, whole) for option in says),
        "type": lambda: any(TYPES[name](value)
                            for name in ([says] if isinstance(says, str) else says)),
        "enum": lambda: value in says,
        "pattern": lambda: not isinstance(value, str) or re.search(says, value) is not None,
        "minLength": lambda: not isinstance(value, str) or len(value) >= says,
        "minItems": lambda: not isinstance(value, list) or len(value) >= says,
        "uniqueItems": lambda: not isinstance(value, list) or len(value) == len(set(value)),
        "items": lambda: not isinstance(value, list) or all(fits(v, says, whole) for v in value),
        "required": lambda: not isinstance(value, dict) or set(says) <= set(value),
        "properties": lambda: not isinstance(value, dict) or all(
            fits(value[name], inner, whole) for name, inner in says.items() if name in value),
        "additionalProperties": lambda: not others if says is False else all(
            fits(value[name], says, whole) for name in others),
    }[word]()


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_judged_as_ppocli_judges_them(value):
    # inline prompts and several rewards are judged by more than their type
    names = [name for name in schema_keys()
             if name not in ("prompts.items", "prompts.eval.items", "reward.fns")]
    whole, (config, problems) = json_schema(), with_node_values(dict.fromkeys(names, value))
    refused = {problem.key for problem in [*problems, *range_problems(config, {})]}
    accepted = set(names) - refused  # each by itself
    for name in names:
        key, schema = schema_keys()[name], whole
        for part in name.split("."):
            schema = schema["properties"][part]
        fitting = fits(value, schema, whole)
        if key.item in (str, bool) and name in accepted and not fitting:
            # OmegaConf makes texts of numbers, and truth values of numbers and words
            assert not isinstance(value, key.item), name
        elif isinstance(value, list) and None in value:
            assert not fitting, name  # a list's elements are never null
        else:
            assert fitting == (name in accepted), name
        choices = [[item] if key.kind == "list" else item for item in key.metadata["choices"] or ()]
        good = [*choices, *([key.default] * (key.default != MISSING))]
        assert all(fits(choice, schema, whole) for choice in good), name


def test_recipes_fit_and_mistakes_in_them_do_not():
    whole = json_schema()
    files = sorted(shipped("recipes").glob("*.yaml"))
    assert files
    for file in files:
        recipe = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        assert fits(recipe, whole, whole), file.name
        for wrong in ({"ppo": {**recipe.get("ppo", {}), "lrr": 1}}, {"generaton": {}},
                      {"generation": {"top_p": 1.5}}, {"hardware": {"device": "tpu"}}):
            assert not fits({**recipe, **wrong}, whole, whole), (file.name, wrong)


def test_interpolations_and_several_rewards_fit():
    whole = json_schema()
    assert fits({"ppo": {"chunk_size": "${ppo.num_rollouts}"}}, whole, whole)
    assert not fits({"ppo": {"chunk_size": "num_rollouts"}}, whole, whole)
    several = {"short": {"fn": "length", "kwargs": {"target": 4}, "weight": 0.5}}
    assert fits({"reward": {"fns": several}}, whole, whole)
    assert not fits({"reward": {"fns": {"short": {"weight": 1}}}}, whole, whole)
    assert not fits({"reward": {"fns": {"short": {"fn": "length", "wheight": 1}}}}, whole, whole)


def test_every_key_and_section_is_described():
    whole = json_schema()
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for name in (*schema_keys(), *schema_sections()):
        node = whole
        for part in name.split("."):
            node = node["properties"][part]
        assert node["description"], name
        if name in schema_keys() and schema_keys()[name].default != MISSING:
            assert node["default"] == schema_keys()[name].default, name
    assert "default" not in whole["properties"]["model"]["properties"]["path"]


def test_a_section_alone(capsys):
    assert code_of(lambda: print_schema("ppo.optimizer", True)) == 0
    section = json.loads(capsys.readouterr().out)
    assert set(section["properties"]) == {
        "name", "lr", "betas", "eps", "momentum", "weight_decay", "value_lr"}
    assert section["additionalProperties"] is False


def test_text_tells_type_default_range_and_meaning(capsys):
    assert code_of(lambda: print_schema("generation.top_p", False)) == 0
    assert capsys.readouterr().out == (
        "generation.top_p  (a number, > 0 and <= 1; default 1.0)\n    nucleus sampling (1: all)\n")
    assert code_of(lambda: print_schema("model.dtype", False)) == 0
    assert "(one of fp32, bf16 or null; default null)" in capsys.readouterr().out
    assert code_of(lambda: print_schema("model.path", False)) == 0
    assert "(text; must be given)" in capsys.readouterr().out
    assert code_of(lambda: print_schema(None, False)) == 0
    out = capsys.readouterr().out
    assert all(f"{name}  (" in out for name in schema_keys())


@pytest.mark.parametrize(("name", "hint"), [("ppo.lr", "ppo.optimizer.lr"), ("generaton", ""),
                                            ("pp", "")])
def test_unknown_names_are_2_with_the_nearest(name, hint, capsys):
    assert code_of(lambda: print_schema(name, True)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{name}: there is no such key or section" in err
    assert f"did you mean {hint}" in err
