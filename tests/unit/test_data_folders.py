"""Several files as one source: folders, configurations, patterns, lists and addresses."""

import functools
import http.server
import importlib.util
import operator
import re

import datasets
import pytest
from helpers import checked, ppocli, refused, running, write_jsonl
from test_data_formats import NESTED, load, rows_of, store
from test_data_hub import closed_port, run_python
from test_examples import data_config

from ppocli.config.config_yaml import with_absolute_paths
from ppocli.data.examples import read_examples
from ppocli.data.sources import names_hub_dataset
from ppocli.errors import ConfigError, InputError

ROWS = [{"prompt": "it is", "label": 1}, {"prompt": "so good", "label": 0}]


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
    ("main", "train"), ("main", "test"), ("main", "test+train"), ("socratic", "train"),
    (None, "train")])
def test_a_readme_lists_configurations_and_splits(tmp_path, name, split):
    """They are read as `datasets` reads them; without a name, the default one."""
    folder = gsm(tmp_path / "gsm", *["  default: true"] * (name is None))
    rows = rows_of(folder, name=name, split=split)
    assert rows == datasets.load_dataset(str(folder), name, split=split,
                                         cache_dir=str(tmp_path / "cache")).to_list()
    assert len(rows) == {("main", "train"): 4, ("main", "test+train"): 6}.get((name, split), 2)
    (folder / "main" / "train-0.jsonl").write_text('{"prompt": "it"}\n{"prompt": \n')
    if (name, split) == ("main", "train"):
        with pytest.raises(InputError, match=r"gsm' cannot be loaded: .*JSON"):
            rows_of(folder, name=name)


@pytest.mark.parametrize(("key", "wants"), [("prompts", None), ("data", "completions")])
def test_configurations_are_never_mixed(tmp_path, key, wants):
    folder = gsm(tmp_path / "gsm")

    def read(**keys):
        return load(folder, **keys) if wants is None else read_examples(
            data_config(path=str(folder), **keys), wants=wants)
    for wrong, right in (("socratc", "socratic"), (None, "main")):
        with pytest.raises(InputError, match=r"configuration.* main, socratic") as caught:
            read(name=wrong)
        assert caught.value.fix == f"name one: {key}.name={right}"
    with pytest.raises(InputError, match="tset"):
        read(name="main", split="tset")


@pytest.mark.parametrize("lines", [
    ["configs:", "- config_name: default", "  data_files: a.csv", "  sep: '&'"],
    ["dataset_info:", "  features:", "  - {name: prompt, dtype: string}",
     "  - {name: n, dtype: string}", "configs:", "- {config_name: default, data_files: b.csv}"]])
def test_options_and_types_of_a_readme_count(tmp_path, lines):
    card(tmp_path / "set", *lines)
    (tmp_path / "set" / "a.csv").write_text("prompt&n\nit&007\n")
    (tmp_path / "set" / "b.csv").write_text("prompt,n\nit,007\n")
    expected = datasets.load_dataset(str(tmp_path / "set"), split="train",
                                     cache_dir=str(tmp_path / "cache")).to_list()
    assert list(map(type, expected[0].values())) == [str, str if "dataset" in lines[0] else int]
    assert rows_of(tmp_path / "set") == expected


def test_a_configuration_may_be_a_saved_data_set(tmp_path):
    for name in ("main", "socratic"):
        datasets.DatasetDict({"train": datasets.Dataset.from_dict({"prompt": [name]})}
                             ).save_to_disk(tmp_path / "set" / name)
    assert rows_of(tmp_path / "set", name="socratic") == [{"prompt": "socratic"}]


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
    with pytest.raises(InputError, match=r"No \.json, .* file matches b/x\*"):
        rows_of("b/x*")


@pytest.mark.parametrize("key", ["prompts.path", "prompts.eval.path", "ppo.ptx.data.path"])
def test_lists_of_paths(tmp_path, monkeypatch, key):
    """Typed or in a file a list is one text, ``{a,b}``, and reads one after the other."""
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    base = ["model=reviews", "reward.fn=length", "reward.kwargs.target=3", "ppo.num_steps=1",
             "ppo.ptx.coef=1"] + ["ppo.ptx.data.path=a.jsonl"] * ("ptx" not in key)
    config = checked(*base, f"{key}=[b.jsonl,'[a]*.jsonl',who/rows]").config
    path = operator.attrgetter(key)(config)
    assert path == "{b.jsonl,[a]*.jsonl,who/rows}"
    assert operator.attrgetter(key)(with_absolute_paths(config)) == (
        f"{{{tmp_path}/b.jsonl,{tmp_path}/[a]*.jsonl,who/rows}}")
    assert [row["prompt"] for row in rows_of("{b.jsonl,[a]*.jsonl}")] == ["b", "a"]
    assert names_hub_dataset(path)
    assert not names_hub_dataset("{b.jsonl,[a]*.jsonl}")
    for wrong in ("[]", "[a.jsonl,'b,c.jsonl']"):
        with refused(ConfigError, f"{key}: ", "a list of paths needs at least one"):
            checked(*base, f"{key}={wrong}")


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


@pytest.mark.long
def test_addresses_are_downloaded_as_datasets_does(tmp_path):
    """Each kind of address that can't be read is one error with its fix."""
    (tmp_path / "www").mkdir()
    write_jsonl(tmp_path / "www" / "my rows.jsonl", ROWS)
    (tmp_path / "www" / "bad.jsonl").write_text('{"prompt": "it"}\n{"prompt"\n')
    handler = functools.partial(QuietFiles, directory=str(tmp_path / "www"))
    read = str([(f"line {number} of my rows.jsonl", row)
                for number, row in enumerate(ROWS, start=1)])
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        done = run_python(
            URLS, tmp_path, f"{(tmp_path / 'www').as_uri()}/my rows.jsonl",
            f"{(tmp_path / 'www').as_uri()}/bad.jsonl", f"{url}/my%20rows.jsonl?download=true",
            f"{url}/none.jsonl", f"{url}/rows", "hf://datasets/openai/gsm8k/rows.jsonl",
            HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
    assert done.returncode == 0, done.stderr
    rows, bad, over_http, none, rest, remote = re.split(r"\n(?=\S)", done.stdout.rstrip())
    assert rows == read
    assert bad.startswith("Line 2 of bad.jsonl is not valid JSON")
    assert f"where: prompts.path={(tmp_path / 'www').as_uri()}/bad.jsonl" in bad
    if importlib.util.find_spec("aiohttp"):
        assert over_http == read
    else:
        assert "fix:   pip install aiohttp requests; or download" in over_http
        assert over_http.endswith("then 'prompts.path=my rows.jsonl'")
    assert none.startswith(f"{url}/none.jsonl cannot be downloaded: ")
    assert "doesn't end in .json, .jsonl" in rest
    assert "cannot be downloaded: the Hub cannot be reached." in remote


# Through the command ------------------------------------------------------------------------------

REWARD = """
def score(responses, label, id):
    assert (sorted(label), sorted(id)) == ([0, 1], [7, 8]), (label, id)
    return [float(each) for each in label]
"""


@pytest.mark.long
def test_commands_read_what_the_library_reads(tmp_path):
    rows = NESTED["messages"]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    store("parquet", rows, tmp_path / "rows.parquet")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")
    shown = [ppocli("validate", "task=sft", "model=reviews", f"data.path={name}",
                    "model.chat_template=chat.jinja", cwd=tmp_path, code=0).stdout
             for name in ("rows.jsonl", "rows.parquet")]
    texts = [[line for line in text.splitlines() if line.startswith("  user: ")] for text in shown]
    assert texts[0] == texts[1]
    assert '"arguments": {"place": "Oslo"}' in texts[0][0]
    gsm(tmp_path / "gsm")
    for key, more in (("data", ["task=sft"]), ("prompts", [
            "reward.fn=length", "reward.kwargs.target=3", "ppo.num_steps=1"])):
        done = ppocli("validate", "model=reviews", f"{key}.path=gsm", *more, cwd=tmp_path, code=3)
        assert "has several configurations: main, socratic" in done.stderr
        assert f"name one: {key}.name=main" in done.stderr
    (tmp_path / "p.csv").write_text("prompt;label;id\nthe film;1;007\na film;0;008\n")
    (tmp_path / "r.py").write_text(REWARD)
    ppocli("train", "model=reviews", "prompts.path=p.csv", "reward.fn=r.py:score",
           "ppo.num_steps=1", "ppo.num_rollouts=2", "ppo.mini_batch_size=2", cwd=tmp_path, code=0)
