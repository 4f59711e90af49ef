"""Several files as one source: folders, configurations, patterns, lists and addresses."""

import functools
import http.server
import importlib.util
import re

import datasets
import pytest
from helpers import running, write_jsonl
from test_data_formats import ROWS, load, rows_of
from test_data_hub import closed_port, run_python
from test_examples import data_config

from ppocli.data.examples import read_examples
from ppocli.errors import InputError


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    """Serves a folder."""

    def log_message(self, *args):
        pass


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


URLS = """
import sys
from ppocli.config.schema import PromptsConfig
from ppocli.data.sources import open_rows, training_spec
from ppocli.errors import InputError
for path in sys.argv[1:]:
    try:
        print([(row.place, row.values) for row in
               open_rows(training_spec(PromptsConfig(path=path), None), [])])
    except InputError as error:
        print(error)
"""


@pytest.mark.slow
def test_addresses_are_downloaded_as_datasets_does(tmp_path):
    (tmp_path / "www").mkdir()
    write_jsonl(tmp_path / "www" / "my rows.jsonl", ROWS)
    (tmp_path / "www" / "bad.jsonl").write_text('{"prompt": "it"}\n{"prompt"\n')
    handler = functools.partial(QuietFiles, directory=str(tmp_path / "www"))
    read = str([(f"line {number} of my rows.jsonl", row)
                for number, row in enumerate(ROWS, start=1)])
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        done = run_python(
            URLS, tmp_path, f"{(tmp_path / 'www').as_uri()}/my%20rows.jsonl".replace("%20", " "),
            f"{(tmp_path / 'www').as_uri()}/bad.jsonl", f"{url}/my%20rows.jsonl?download=true",
            f"{url}/none.jsonl", "https://huggingface.co/datasets/openai/gsm8k",
            HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
    assert done.returncode == 0, done.stderr
    rows, bad, over_http, none, page = re.split(r"\n(?=\S)", done.stdout.rstrip())
    assert rows == read
    assert bad.startswith("Line 2 of bad.jsonl is not valid JSON")
    assert f"where: prompts.path={(tmp_path / 'www').as_uri()}/bad.jsonl" in bad
    assert over_http == read or not importlib.util.find_spec("aiohttp")
    assert none.startswith(f"{url}/none.jsonl cannot be downloaded: ")
    assert none.endswith("download it, then prompts.path=none.jsonl")
    assert page.startswith("Data set 'openai/gsm8k' is not on this machine")
