"""Every kind of prompt source, with real files."""

import csv
import json

import datasets
import pytest
from data_tokenizers import ids, words

from ppocli.config.schema import PromptsConfig
from ppocli.data.prompt_set import load_prompts
from ppocli.errors import ConfigError, InputError

ROWS = [{"prompt": "the film was", "label": 1, "tag": "x"},
        {"prompt": "it is not", "label": 0, "tag": "y"},
        {"prompt": "so very good", "label": 1, "tag": "z"}]
TEXTS = [row["prompt"] for row in ROWS]
TABLE = datasets.Dataset.from_list(ROWS)


def load(path=None, items=None, **keys):
    cfg = PromptsConfig(path=None if path is None else str(path), **keys)
    return load_prompts(cfg, words(), seed=0, max_prompt_tokens=64, items=items)


def write_jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_folder(path):
    write_jsonl(path / "one.jsonl", ROWS[:2])
    write_jsonl(path / "two" / "more.jsonl", ROWS[2:])
    (path / "README.md").write_text("# not prompts")
    write_jsonl(path / ".cache" / "old.jsonl")


@pytest.mark.parametrize(("name", "write"), [
    ("p.json", lambda path: path.write_text(json.dumps(ROWS, indent=2))), ("P.JSONL", write_jsonl),
    ("lines.json", write_jsonl), ("p.csv", TABLE.to_csv),
    ("p.parquet", TABLE.to_parquet), ("saved", TABLE.save_to_disk), ("folder", write_folder)])
def test_each_format_gives_prompts_and_metadata(tmp_path, name, write):
    write(tmp_path / name)
    prompts = load(tmp_path / name)
    labels = [row["label"] for row in ROWS]
    assert prompts.texts == TEXTS
    assert prompts.token_ids == [ids(text) for text in TEXTS]
    assert prompts.columns == {"label": labels, "tag": ["x", "y", "z"]}
    assert prompts.notes == ()
    assert len(prompts) == 3


def test_txt_holds_one_prompt_a_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffthe film\r\n\n  \nit is\u2028so\nvery good".encode())
    prompts = load(path, column="text")
    assert prompts.texts == ["the film", "it is\u2028so", "very good"]
    assert prompts.columns == {}
    assert prompts.notes == ("2 prompts were blank: dropped",)


def test_csv_quotes_line_breaks_nameless_columns_and_long_cells(tmp_path):
    path = tmp_path / "p.csv"
    long = "very " * 40_000  # beyond the csv module's own limit
    path.write_text(f',prompt,n\n0,"the\nfilm, ""good""",1\n\n1,{long},2\n', encoding="utf-8")
    limit = csv.field_size_limit()
    prompts = load(path)
    assert prompts.texts[0] == 'the\nfilm, "good"'
    assert prompts.columns == {"n": [1, 2]}
    assert csv.field_size_limit() == limit


def test_columns_choose_the_metadata(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl")
    assert load(path, columns=["tag"]).columns == {"tag": ["x", "y", "z"]}
    assert load(path, columns=[]).columns == {}
    assert load(path, column="tag", columns=["prompt", "tag"]).columns == {
        "prompt": TEXTS, "tag": ["x", "y", "z"]}
    with pytest.raises(InputError) as caught:
        load(path, columns=["tag", "labels"])
    assert caught.value.what == ("There is no metadata column 'labels' in the prompts; their "
                                 "columns are prompt, label, tag. Did you mean 'label'?")


def test_limit_counts_usable_prompts_and_stops_reading(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "it is"}\n{"prompt": " "}\n{"prompt": "so good"}\nnot json\n')
    prompts = load(path, limit=2)
    assert prompts.texts == ["it is", "so good"]
    assert prompts.notes == ("1 prompt was blank: dropped",)


@pytest.mark.parametrize(("split", "expected"), [
    ("train", ["it is", "so good"]), ("test+train", ["bad film", "it is", "so good"])])
@pytest.mark.parametrize("kind", ["saved", "files", "hub-layout"])
def test_splits(tmp_path, kind, split, expected):
    parts = {"train": ["it is", "so good"], "test": ["bad film"]}
    folder = tmp_path / "set"
    tables = {name: datasets.Dataset.from_dict({"prompt": texts}) for name, texts in parts.items()}
    if kind == "saved":
        datasets.DatasetDict(tables).save_to_disk(folder)
    elif kind == "files":
        for name, table in tables.items():
            write_jsonl(folder / f"{name}.jsonl", table.to_list())
    else:
        (folder / "data").mkdir(parents=True)
        for name, table in tables.items():
            table.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    prompts = load(folder, split=split)
    assert prompts.texts == expected
    assert prompts.notes == ()
    with pytest.raises(InputError, match=r"Bad split: tset.*train") as caught:
        load(folder, split="tset")
    assert "prompts.split=tset" in caught.value.where


def test_inline_items_from_config_and_from_python(tmp_path):
    items = ["it is", {"prompt": "so good", "label": 1}, {"text": "bad film", "extra": None}]
    prompts = load(items=items, column="text")
    assert prompts.texts == ["it is", "so good", "bad film"]
    assert prompts.columns == {"label": [None, 1, None], "extra": [None, None, None]}
    cfg = PromptsConfig(items=["the film"])
    assert load_prompts(cfg, words(), seed=0, max_prompt_tokens=9).texts == ["the film"]
    # prompts given from Python replace the configured ones
    assert load(write_jsonl(tmp_path / "p.jsonl"), items=["it is"]).texts == ["it is"]
    with pytest.raises(ConfigError, match="must be a list"):
        load(items="it is")


def test_bos_alone():
    prompts = load()
    assert (prompts.token_ids, prompts.texts, prompts.columns) == ([[0]], [""], {})
    assert prompts.notes == ("no prompts were given: every response starts from BOS alone",)
    without_bos = load_prompts(PromptsConfig(), words(bos=False), seed=0, max_prompt_tokens=9)
    assert without_bos.token_ids == [[1]]
    with pytest.raises(InputError, match="neither a BOS nor an EOS") as caught:
        load_prompts(PromptsConfig(), words(bos=False, eos=False), seed=0, max_prompt_tokens=9)
    assert "prompts.path=FILE" in caught.value.fix


# Bad input ----------------------------------------------------------------------------------------

BAD_FILES = [
    ("p.txt", b"\n  \n\t\n", "All prompts are blank (3 of 3)."),
    ("p.txt", b"it is\nna\xefve film\n", "Line 2 of p.txt is not UTF-8: "
     "invalid continuation byte at byte 3."),
    ("p.jsonl", b'{"prompt": "it is"}\n{"prompt": "so\n',
     "Line 2 of p.jsonl is not valid JSON: Unterminated string starting at (character 12)."),
    ("p.jsonl", b'[["it is"]]', "Row 1 of p.jsonl is a JSON list, not an object or a text."),
    ("p.jsonl", b'{"promt": "it is"}\n', "There is no column 'prompt' in row 1 of p.jsonl: its "
                                        "columns are promt. Did you mean 'promt'?"),
    ("p.jsonl", b'{"prompt": "it is"}\n{"prompt": 12}\n',
     "Column 'prompt' in line 2 of p.jsonl holds 12 (int), not a text."),
    ("p.csv", b"prompt,n\nit is,1\nso, good,2\n",
     "Line 3 of p.csv has 3 fields where the header has 2."),
    ("p.parquet", b"PAR1 not really", "p.parquet is not a readable parquet file: "),
    ("p.xlsx", b"x", "p.xlsx has the suffix '.xlsx'; files that are read end in .json, "),
]


@pytest.mark.parametrize(("name", "content", "what"), BAD_FILES)
def test_bad_files_are_refused_with_the_place(tmp_path, name, content, what):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(path)
    assert caught.value.what.startswith(what)
    assert caught.value.where
    assert caught.value.exit_code == 3


def test_a_missing_file_names_its_neighbours(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "prompts.jsonl")
    with pytest.raises(InputError) as caught:
        load(tmp_path / "promts.jsonl")
    assert "does not exist" in caught.value.what
    assert caught.value.where == f"prompts.path={tmp_path / 'promts.jsonl'}"
    assert caught.value.fix == f"did you mean {tmp_path / 'prompts.jsonl'}?"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/prompts.jsonl").texts == load("./prompts.jsonl").texts == TEXTS
    for path in ("./nope", "a/b/c"):
        with pytest.raises(InputError, match="does not exist"):
            load(path)
