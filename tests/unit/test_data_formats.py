"""Files as people have them: each gives the rows that the same as JSON lines would."""

import json

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from data_tokenizers import words
from helpers import write_jsonl
from test_examples import data_config

from ppocli.config.schema import PromptsConfig
from ppocli.data.examples import read_examples
from ppocli.data.prompt_set import load_prompts
from ppocli.data.sources import as_list, open_rows, training_spec
from ppocli.errors import InputError


def rows_of(path, items=None, **keys):
    """Raw rows of a source."""
    cfg = PromptsConfig(path=None if path is None else str(path), **keys)
    return [row.values for row in open_rows(training_spec(cfg, items), [])]


def load(path, **keys):
    return load_prompts(PromptsConfig(path=str(path), **keys), words(), seed=0,
                        max_prompt_tokens=64)


# Arrow --------------------------------------------------------------------------------------------

def call(name, **arguments):
    return {"role": "assistant", "content": None,
            "tool_calls": [{"type": "function", "function": {"name": name,
                                                             "arguments": arguments}}]}


def turn(role, content):
    return {"role": role, "content": content}


DEEP = {"a": [{"b": {"c": [{"d": 1}, {"e": [1, None]}]}}, {"f": "x"}]}
NESTED = {  # no two rows have the same keys anywhere
    "messages": [
        {"messages": [turn("user", "it is"), call("find", place="Oslo"),
                      turn("tool", "so") | {"name": "find"}, turn("assistant", "good")]},
        {"messages": [turn("user", "so"), call("sum", a=1, b=[{"x": 1}, {"y": {"z": 2}}]),
                      turn("assistant", "bad")], "tools": [{"name": "sum"}]},
        {"messages": [turn("user", "so"), call("none"), turn("assistant", "bad")]}],
    "pairs": [
        {"prompt": [turn("user", "it is")], "chosen": [call("find", place="Oslo")],
         "rejected": [turn("assistant", "bad")]},
        {"prompt": [turn("user", "so") | {"name": "Ann"}], "chosen": [turn("assistant", "good")],
         "rejected": [call("sum", a=1)]}],
    "prompts": [
        {"prompt": [turn("user", "it is"), call("find", place="Oslo"), turn("tool", "so")],
         "meta": DEEP, "label": 1},
        {"prompt": [turn("user", "so")], "meta": {"a": [{"g": 2}], "h": "y"},
         "label": None},
        {"prompt": [turn("user", "so")], "meta": {}, "label": 3}]}


def store(kind, rows, path):
    """Write ``rows`` as Arrow in one of its forms; returns what is read."""
    typed = datasets.Features({name: datasets.Json() if name == "meta" else (
        datasets.List(datasets.Json())) for name in {key for row in rows for key in row}
        - {"label"}} | ({"label": datasets.Value("int64")} if "label" in rows[0] else {}))
    full = [{name: row.get(name) for name in typed} for row in rows]
    table = datasets.Dataset.from_list(full)
    if kind == "saved":
        table.save_to_disk(path)
    elif kind == "json-type":
        datasets.Dataset.from_list(full, features=typed).to_parquet(path)
    else:
        table.to_parquet(path)
    return {"python-pyarrow": lambda: pyarrow.Table.from_pylist(rows),
            "python-pandas": lambda: pandas.read_parquet(path)}.get(kind, lambda: path)()


KINDS = ["parquet", "saved", "json-type", "python-pyarrow", "python-pandas"]


@pytest.mark.parametrize(("name", "kind"), [
    (name, kind) for name in NESTED for kind in KINDS
    if (name, kind) != ("prompts", "python-pandas")])  # there numbers in structs become floats
def test_arrow_gives_the_rows_of_json_lines(tmp_path, name, kind):
    """What it fills in with null, at any depth, is left out again: in training data, pairs, prompts
    and their metadata."""
    rows = NESTED[name]
    lines = write_jsonl(tmp_path / "rows.jsonl", rows)
    stored = store(kind, rows, tmp_path / f"rows{'' if 'saved' in kind else '.parquet'}")
    source = {"path": str(stored)} if not kind.startswith("python") else {}
    items = None if source else as_list(stored)
    if name == "prompts":
        expected = rows_of(lines)
        assert rows_of(stored if source else None, items) == expected == rows
        return
    wants = "pairs" if name == "pairs" else "completions"
    expected = read_examples(data_config(path=str(lines)), wants=wants)
    found = read_examples(data_config(**source), wants=wants, items=items)
    strip = [[(one.prompt, one.completion) if wants == "completions" else
              (one.prompt, one.chosen, one.rejected) for one in getattr(
                  read, "examples" if wants == "completions" else "pairs")]
             for read in (found, expected)]
    assert len(strip[0]) == len(rows)
    assert strip[0] == strip[1]


# CSV ----------------------------------------------------------------------------------------------

CELLS = [["prompt", "int", "zeros", "gaps", "float", "bool", "mixed", "null", "date", "big", "inf"],
         ["12", "1", "007", "1", "1.50", "True", "1", "NA", "2020-01-01", "12345678901234567890",
          "inf"],
         ["13", "-2", "008", "", "1e3", "false", "x", "null", "2021-01-01", "1", "-inf"],
         ["14", "3", "9", "3", ".5", "TRUE", "", "", "", "2", "1"]]


@pytest.mark.parametrize(("form", "name"), [
    (",", "p.csv"), (";", "p.csv"), ("\t", "p.tsv"), ('"sep=;"', "p.csv")])
def test_csv_cells_reach_rewards_with_the_types_that_datasets_infers(tmp_path, form, name):
    """Prompts and templates have the texts as they are written."""
    mark = form.strip('"')[-1]
    lines = [mark.join(cells) for cells in CELLS]
    path = tmp_path / name
    path.write_text("\r\n".join([*[form] * ("sep" in form), *lines]) + "\r\n")
    commas = tmp_path / "commas.csv"
    commas.write_text("\n".join(map(",".join, CELLS)))
    expected = datasets.load_dataset("csv", data_files=str(commas), split="train",
                                     cache_dir=str(tmp_path / "cache")).to_dict()
    prompts = load(path, template="{prompt} {zeros} {float}")
    assert prompts.texts == ["12 007 1.50", "13 008 1e3", "14 9 .5"]
    del expected["prompt"]
    assert prompts.columns == expected
    assert [(type(cell), cell) for cell in prompts.columns["gaps"]] == [
        (float, 1.0), (type(None), None), (float, 3.0)]
    assert prompts.columns["int"] == [1, -2, 3]
    assert prompts.columns["bool"] == [True, False, True]
    assert [row.typed["zeros"] for row in prompts.eval_rows] == [7, 8, 9]
    path.write_text(path.read_text() + "x\n")
    with pytest.raises(InputError, match=f"Line {5 + ('sep' in form)} of .* has 1 fields"):
        load(path)


# JSON ---------------------------------------------------------------------------------------------

ROWS = [{"prompt": "it is", "label": 1}, {"prompt": "so good", "label": 0}]
CHATS = [{"messages": [turn("user", "a"), turn("assistant", "b")]},
         {"messages": [turn("user", "c"), turn("assistant", "d")]}]


@pytest.mark.parametrize(("rows", "form"), [
    *((CHATS, form) for form in ("columns", "list", "records", "data", "beside")),
    (ROWS, "columns"), (ROWS[:1], "object"), (CHATS[:1], "object")])
def test_json_objects_that_hold_rows(tmp_path, rows, form):
    """Columns, as lists or as pandas' ``to_json`` writes them, a list under a key, and one row."""
    frame, path = pandas.DataFrame(rows), tmp_path / "p.json"
    if form in ("columns", "list", "records"):
        text = json.dumps(frame.to_dict("list")) if form == "list" else frame.to_json(orient=form)
    else:
        text = json.dumps({"object": lambda: rows[0], "beside": lambda: {
            "version": "1.0", "info": {"a": 1}, "instances": rows}}.get(
                form, lambda: {form: rows})())
    path.write_text(text)
    assert [{name: row[name] for name in rows[0]} for row in rows_of(path)] == rows


# Folders, configurations, patterns, lists and addresses -------------------------------------------

# A downloaded data set ----------------------------------------------------------------------------

def card(folder, *lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(["---", "license: mit", *lines, "---", "# Rows"]))


CONFIGS = ["configs:", "- config_name: main", "  data_files:", "  - split: train",
           "    path: main/train-*", "  - split: test", "    path: main/odd name.jsonl",
           "- config_name: socratic", "  data_files: socratic/*.jsonl"]


def gsm(folder, *more):
    card(folder, *CONFIGS, *more)
    for name in ("main/train-0", "main/train-1", "main/odd name", "socratic/s", "stray"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(2)])
    return folder


@pytest.mark.parametrize(("name", "split"), [
    ("main", "test+train"), ("socratic", "train"), (None, "train")])
def test_a_readme_lists_configurations_and_splits(tmp_path, name, split):
    """They are read as `datasets` reads them; without a name, the default one."""
    folder = gsm(tmp_path / "gsm", *["  default: true"] * (name is None))
    rows = rows_of(folder, name=name, split=split)
    assert rows == datasets.load_dataset(str(folder), name, split=split,
                                         cache_dir=str(tmp_path / "cache")).to_list()
    assert len(rows) == {("main", "test+train"): 6}.get((name, split), 2)


@pytest.mark.parametrize(("keys", "reason"), [
    ({}, r"Config name is missing.*\['main', 'socratic'\]"),
    ({"name": "socratc"}, r"'socratc' not found. Available: \['main', 'socratic'\]"),
    ({"name": "main", "split": "tset"}, r"Bad split: tset. Available splits: \['train', 'test'\]")])
def test_configurations_are_never_mixed(tmp_path, keys, reason):
    folder = gsm(tmp_path / "gsm")
    with pytest.raises(InputError, match=reason) as caught:
        load(folder, **keys)
    assert f"prompts.name={keys.get('name', 'null')}" in caught.value.where
    with pytest.raises(InputError, match=reason) as caught:
        read_examples(data_config(path=str(folder), **keys), wants="completions")
    assert f"data.split={keys.get('split', 'train')}" in caught.value.where


# Patterns and addresses ---------------------------------------------------------------------------

def test_patterns_read_all_that_matches(tmp_path, monkeypatch):
    for name in ("b/2.jsonl", "b/1.jsonl", "a.csv", "b/c/3.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'{{"prompt": "{name}"}}\n' if "json" in name
                                     else f"prompt\n{name}\n")
    (tmp_path / "b" / "README.md").write_text("# none")
    monkeypatch.chdir(tmp_path)
    for pattern, expected in (("b/*", ["b/1.jsonl", "b/2.jsonl"]), ("[a].csv", ["a.csv"]),
                              (f"{tmp_path}/b/?.jsonl", ["b/1.jsonl", "b/2.jsonl"]),
                              ("**/*.jsonl", ["b/1.jsonl", "b/2.jsonl", "b/c/3.jsonl"])):
        assert [row["prompt"] for row in rows_of(pattern)] == expected, pattern
    with pytest.raises(InputError, match=r"b/x\* does not exist"):
        rows_of("b/x*")


@pytest.mark.parametrize("address", ["https://host/rows.jsonl", "hf://datasets/a/b/c.jsonl"])
def test_addresses_are_refused(address):
    with pytest.raises(InputError, match="is an address") as refused:
        rows_of(address)
    assert "prompts.path=OWNER/NAME" in refused.value.fix
