"""``ppocli schema``: every setting with its type, range and meaning, as text and as JSON."""

import json

import pytest
from omegaconf import MISSING

from ppocli.cli.about import print_schema
from ppocli.cli.output import code_of
from ppocli.config.keys import schema_keys


def test_json_lists_every_key(capsys):
    assert code_of(lambda: print_schema(None, True)) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(schema_keys())
    for name, key in schema_keys().items():
        assert rows[name]["meaning"], name
        assert rows[name]["required"] == (key.default == MISSING)
    assert rows["generation.top_p"] == {
        "key": "generation.top_p", "type": "a number", "required": False, "default": 1.0,
        "choices": None, "gt": 0, "le": 1, "meaning": "nucleus sampling (1: all)"}
    assert code_of(lambda: print_schema("ppo.optimizer", True)) == 0
    assert {row["key"].rpartition(".")[2] for row in json.loads(capsys.readouterr().out)} == {
        "name", "lr", "betas", "eps", "momentum", "weight_decay", "value_lr"}


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
