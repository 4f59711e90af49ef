"""``ppocli schema``: every setting with its type, range and meaning, as text and as JSON."""

import json

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
    assert code_of(lambda: print_schema(None, False)) == 0
    out = capsys.readouterr().out
    assert all(f"{name}  (" in out for name in schema_keys())


def test_unknown_names_are_2_with_the_nearest(capsys):
    assert code_of(lambda: print_schema("ppo.lr", True)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean ppo.optimizer.lr" in err
