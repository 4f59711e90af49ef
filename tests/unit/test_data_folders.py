"""Several files as one source: folders, configurations, patterns, lists and addresses."""


import datasets
import pytest
from helpers import write_jsonl
from test_data_formats import load, rows_of
from test_examples import data_config

from ppocli.data.examples import read_examples
from ppocli.errors import InputError

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
