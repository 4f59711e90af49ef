"""Rows of training data: which format they are in, and what is wrong with them."""

import json
from types import SimpleNamespace

import pytest
from datasets import Dataset

from ppocli.config.schema import PromptsConfig
from ppocli.data.chat_text import take_rows
from ppocli.data.examples import Pair, read_examples
from ppocli.data.sources import open_rows, training_spec
from ppocli.errors import ConfigError, InputError


def data_config(**over):
    """``data`` with its defaults."""
    return SimpleNamespace(**{"path": None, "kwargs": {}, "name": None, "split": "train",
                              "val": None, "columns": {}, "limit": None, "max_length": None,
                              "train_on": "auto", "chat": False, "template": None,
                              "packing": True} | over)


def turns(*contents, first="user"):
    """Contents as messages of user and assistant in turn."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def write(folder, rows, suffix=".jsonl"):
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        getattr(Dataset.from_list(rows), f"to_{suffix[1:]}")(path)
    return str(path)


def read(rows, wants="completions", **over):
    return read_examples(data_config(**over), wants=wants, items=rows)


ANSWER = turns("good", first="assistant")
PLAIN = {"text": {"text": "a film"}, "completion": {"prompt": "a", "completion": " film"},
         "pair": {"prompt": "a", "chosen": " good", "rejected": " bad"},
         "implicit": {"chosen": "a film is good", "rejected": "a film is goodish"}}
CHAT = {"messages": {"messages": turns("a", "b")},
        "completion": {"prompt": turns("a"), "completion": ANSWER},
        "pair": {"prompt": turns("a"), "chosen": ANSWER,
                 "rejected": turns("bad", first="assistant")},
        "implicit": {"chosen": turns("a", "good"), "rejected": turns("a", "bad")}}


# of a prompt that nothing but the texts say, no word is cut in two
READ = {"text": (None, "a film"), "completion": ("a", " film"), "pair": ("a", " good", " bad"),
        "implicit": ("a film is", " good", " goodish")}
READ_CHAT = {"messages": (None, turns("a", "b")), "completion": (turns("a"), ANSWER)} | {
    name: (turns("a"), ANSWER, turns("bad", first="assistant")) for name in ("pair", "implicit")}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_the_columns_of_a_file_say_what_it_holds(tmp_path, suffix):
    for rows, wanted in ((PLAIN, READ), (CHAT, READ_CHAT)):
        for name, row in rows.items() if suffix != ".csv" or rows is PLAIN else ():
            found = read_examples(data_config(path=write(tmp_path, [row], suffix)),
                                  wants="pairs" if "chosen" in row else "completions")
            (got,) = found.examples or found.pairs
            assert got.place.endswith(f" of rows{suffix}")
            said = (got.chosen, got.rejected) if found.pairs else (got.completion,)
            assert (got.prompt, *said) == wanted[name]


def test_columns_templates_chat_margins_and_limit():
    rows = [{"post": "a", "sub": "x", "summary": "b", "prompt": "no"}] * 3
    (got, _) = read(rows, columns={"prompt": "post", "completion": "summary"}, limit=2,
                    template="{sub}: {prompt}").examples
    assert (got.prompt, got.completion) == ("x: a", "b")
    (got,) = read([PLAIN["completion"]], chat=True).examples
    assert got.prompt + got.completion == turns("a", " film")
    row = PLAIN["pair"] | {"margin": "0.5"}
    assert read([row], "pairs").pairs == [Pair("item 1 of data.items", "a", " good", " bad", 0.5)]
    ultra = {"prompt": "a", **CHAT["implicit"]}  # the prompt is a turn of the conversations too
    (pair,) = read([ultra], "pairs").pairs
    assert pair.prompt == turns("a")
    assert read(["a film", "b"]).examples[1].completion == "b"
    (got,) = read([PLAIN["completion"] | {"story": "b"}], columns={"text": "story"}).examples
    assert (got.prompt, got.completion) == (None, "b")  # a column that was named comes first


def test_empty_rows_and_equal_pairs_are_counted():
    blank = [PLAIN["completion"] | {"completion": cell} for cell in (" ", None, "")]
    found = read([PLAIN["completion"], *blank, PLAIN["completion"] | {"prompt": None}])
    assert (found.rows, len(found.examples), found.empty) == (5, 1, 4)
    silent = {"messages": turns("a", " ")}
    assert read([CHAT["messages"], silent, {"messages": []}]).empty == 2
    same = PLAIN["pair"] | {"chosen": " bad"}
    found = read([PLAIN["pair"], same, PLAIN["pair"] | {"rejected": ""}], "pairs")
    assert (len(found.pairs), found.identical, found.empty) == (1, 1, 1)
    with pytest.raises(InputError, match="Nothing is left of the 1 row"):
        read([same], "pairs")


def changed(kind, name, **cells):
    return (CHAT if kind == "chat" else PLAIN)[name] | cells


FAULTS = [
    # a good row, the second row, what the message says
    (PLAIN["text"], {"note": "b"}, "has no column 'text'"),
    (PLAIN["completion"], {"prompt": "a"}, "has no column 'completion'"),
    (PLAIN["completion"], changed("plain", "completion", completion=ANSWER), "holds messages"),
    (CHAT["messages"], {"messages": "a"}, "(str), not a list of"),
    (CHAT["messages"], {"messages": turns("a")}, "has no turn of the assistant"),
    (CHAT["messages"], {"messages": [{"speaker": "human", "said": "a"}]}, "no role and content"),
    (CHAT["messages"], {"messages": [{"role": "bot", "content": "a"}]}, "the role 'bot'"),
    (CHAT["completion"], changed("chat", "completion", completion=turns("a")), "turn of 'user'"),
    (PLAIN["pair"] | {"margin": 1}, changed("plain", "pair", margin="wide"), "not a finite number"),
    (PLAIN["pair"], {"chosen": "a", "rejected": "b"}, "has no column 'prompt'"),
    (PLAIN["implicit"], changed("plain", "implicit", chosen=1.5), "1.5 (float), not a text"),
    (PLAIN["implicit"], {"chosen": "a"}, "has no column 'rejected'"),
    (CHAT["implicit"], changed("chat", "implicit", chosen=turns("c", "good")), "no prompt"),
    (CHAT["implicit"], {"chosen": ANSWER, "rejected": turns("b", first="assistant")}, "no prompt")]


@pytest.mark.parametrize(("good", "bad", "says"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_bad_row_is_one_error_that_names_file_and_row(tmp_path, good, bad, says):
    path = write(tmp_path, [good, bad])
    with pytest.raises(InputError) as caught:
        read_examples(data_config(path=path), wants="pairs" if "chosen" in good else "completions")
    assert says in caught.value.what
    assert "line 2 of rows.jsonl" in caught.value.what.lower()
    assert f"data.path={path}" in caught.value.where
    assert "prompts" not in str(caught.value)


@pytest.mark.parametrize(("row", "wants", "over", "says", "fix"), [
    (PLAIN["pair"], "completions", {}, "prompt, chosen, rejected", "`ppocli reward-model`"),
    (PLAIN["completion"], "pairs", {}, "prompt, completion", "`ppocli sft`"),
    ({"a": "b"}, "completions", {}, "item 1 of data.items", "data.columns.STANDARD=YOURS"),
    (PLAIN["text"], "completions", {"columns": {"txt": "a"}}, "'txt' is no column", None),
    (PLAIN["text"], "completions", {"columns": {"text": "tex"}}, "no column 'tex'", None),
    (PLAIN["text"], "completions", {"chat": True}, "data.chat works on prompts", None),
    (PLAIN["completion"], "completions", {"template": "{promp}"}, "{promp} is no column", None),
    *((row, "pairs" if "chosen" in row else "completions", {"template": "{prompt}!"},
       "holds messages, but data.template works on texts", "data.template=null")
      for row in (CHAT["completion"], CHAT["messages"], {"prompt": "a", **CHAT["implicit"]}))])
def test_settings_that_the_rows_do_not_fit(row, wants, over, says, fix):
    with pytest.raises((InputError, ConfigError)) as caught:
        read([row], wants, **over)
    assert says in str(caught.value)
    assert fix is None or fix in caught.value.fix


@pytest.mark.parametrize(("row", "chat", "prompt"), [
    (PLAIN["implicit"], False, "a film is"), (PLAIN["pair"], False, "a"),
    (PLAIN["completion"], False, "a"), (CHAT["messages"], True, turns("a")),
    (CHAT["implicit"], True, turns("a")), (CHAT["pair"], True, turns("a")),
    ({"messages": turns("a", "b", "c")}, True, turns("a"))])
def test_prompts_are_read_out_of_training_data(row, chat, prompt):
    spec = training_spec(PromptsConfig(chat=chat), [row])
    (got,) = take_rows(open_rows(spec, []), spec, [])
    assert got.values["prompt"] == prompt


@pytest.mark.parametrize(("row", "over", "says"), [
    (PLAIN["text"], {}, "There is no column 'prompt'"),
    (CHAT["messages"], {}, "holds chat messages"),
    (CHAT["messages"], {"column": "question"}, "There is no column 'question'"),
    ({"messages": ANSWER}, {"chat": True},
     "'messages' in item 1 of prompts.items has no turn before an answer"),
    ({"chosen": turns("a", "b"), "rejected": turns("c", "b")}, {"chat": True},
     "item 1 of prompts.items have no prompt in common")])
def test_prompts_that_training_data_does_not_have(row, over, says):
    spec = training_spec(PromptsConfig(**over), [row])
    with pytest.raises(InputError, match=says):
        take_rows(open_rows(spec, []), spec, [])
