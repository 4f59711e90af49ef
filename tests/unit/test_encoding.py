"""Training data as tokens: what is trained on, cut, left out and held back."""

import json
import math

import numpy as np
import pytest
from data_tokenizers import CHATML, ids, utf8_bytes, words
from test_examples import data_config, turns
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppocli.config.schema import PromptsConfig
from ppocli.data import prompt_set
from ppocli.data.encoding import encode_examples, facts, load_data, rendered
from ppocli.data.examples import read_examples
from ppocli.errors import ConfigError, InputError

FORGETS = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else 'so' }}")
BARE = ("{% for m in messages %} {{ m.role }} : {{ m.content }} !{% endfor %}"
        "{% if add_generation_prompt %} assistant :{% endif %}")
TALK = turns("the film ?", "good", "and you ?", "very bad")


def load(rows, tokenizer, wants="completions", *, max_tokens=32, encoder=False, seed=0, **over):
    return load_data(data_config(**over), tokenizer, wants=wants, seed=seed, items=rows,
                     max_tokens=max_tokens, encoder=encoder)[0]


def shown(data, tokenizer, place=0):
    """The text with what is trained on between brackets; each token has a space in front."""
    return rendered(data.tokens[place], data.trained[place], tokenizer)


@pytest.mark.parametrize(("row", "train_on", "says"), [
    ("the film", "auto", "<s>[the film </s>]"),
    ("the film </s>", "all", "<s>[the film </s>]"),
    ({"prompt": "the film", "completion": "was good"}, "auto", "<s> the film[was good </s>]"),
    ({"prompt": "the film", "completion": "was good </s>"}, "completion",
     "<s> the film[was good </s>]"),
    ({"prompt": "the film", "completion": "was good"}, "all", "<s>[the film was good </s>]")])
def test_plain_text_is_trained_on_through_its_eos(row, train_on, says):
    tokenizer = words(front=True)
    data = load([row], tokenizer, train_on=train_on)
    assert shown(data, tokenizer) == says
    assert data.tokens[0].tolist() == ids(says.replace("[", " ").replace("]", ""))
    prompt = row["prompt"] if isinstance(row, dict) else ""
    assert data.prompts == [prompt]
    assert data.prompt_tokens(0) == (ids(f"<s> {prompt}") if prompt else [])


TOLD = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
TOOL = {"type": "function", "function": {"name": "film", "description": None}}


@pytest.mark.parametrize("tools", [json.dumps([TOOL]), np.array([TOOL])])
def test_the_chat_template_is_told_of_tools(tools):
    tokenizer = words(chat=TOLD + CHATML)
    one = {"messages": turns("is it ?", "good"), "tools": tools}
    assert shown(load([one], tokenizer), tokenizer).startswith("film <s> user : is it ?")
    assert "[good </s>]" in shown(load([one], tokenizer), tokenizer)
    asked = {"prompt": turns("is it ?"), "completion": turns("good", first="assistant"),
             "tools": tools}
    data = load([asked], tokenizer, train_on="all")
    assert tokenizer.decode(data.tokens[0]).startswith("film <s>")
    pair = {"chosen": turns("is it ?", "good"), "rejected": turns("is it ?", "bad"), "tools": tools}
    data = load([pair], tokenizer, "pairs")
    assert all(tokenizer.decode(answer[0]).startswith("film <s> user")
               for answer in (data.chosen, data.rejected))
    for without in ({**one, "tools": absent} for absent in (None, [], "", "null", math.nan)):
        assert shown(load([without], tokenizer), tokenizer).startswith("<s> user")
    assert load([one], words(chat=CHATML)).notes == (
        "the chat template leaves out what the column tools describes",)
    with pytest.raises(InputError, match="Column 'tools' in item 1"):
        load([{**one, "tools": ["film"]}], tokenizer)
    calls = load([{"calls": tools, **one, "tools": None}], tokenizer, columns={"tools": "calls"})
    assert shown(calls, tokenizer).startswith("film <s> user")


FIRST = "<s> user : the film ? </s> assistant :"
SECOND = "user : and you ? </s> assistant :"


@pytest.mark.parametrize(("template", "train_on", "says"), [
    (CHATML, "auto", f"{FIRST}[good </s>]{SECOND}[very bad </s>]"),
    (CHATML, "completion", f"{FIRST} good </s> {SECOND}[very bad </s>]"),
    (CHATML, "all", f"<s>[{FIRST[4:]} good </s> {SECOND} very bad </s>]"),
    # what follows the end of a turn is no part of it
    (CHATML.replace("</s>", "</s> \n"), "assistant",
     f"{FIRST}[good </s>]{SECOND}[very bad </s>]"),
    # no token ends a turn: all of it counts
    (BARE, "assistant", "user : the film ? ! assistant :[good !]user : and you ? ! assistant :"
                        "[very bad !]")])
def test_the_turns_of_the_assistant_are_trained_on(template, train_on, says):
    tokenizer = words(chat=template)
    data = load([{"messages": TALK}], tokenizer, train_on=train_on)
    assert shown(data, tokenizer) == says


def test_a_conversation_after_a_prompt_is_trained_on_and_its_prompt_is_the_one_ppo_sees():
    tokenizer = words(front=True, chat=CHATML)
    rows = [{"prompt": TALK[:1], "completion": TALK[1:]}, {"prompt": TALK[:3],
                                                           "completion": TALK[3:]}]
    data = load(rows, tokenizer)
    assert shown(data, tokenizer) == f"{FIRST}[good </s>]{SECOND}[very bad </s>]"
    assert shown(data, tokenizer, 1) == f"{FIRST} good </s> {SECOND}[very bad </s>]"
    prompts = prompt_set.load_prompts(PromptsConfig(chat=True), tokenizer, seed=0,
                                      max_prompt_tokens=32, items=[{"prompt": TALK[:3]}])
    assert data.prompt_tokens(0) == data.prompt_tokens(1) == prompts.token_ids[0]
    assert data.prompts[1] == prompts.texts[0]


@pytest.mark.parametrize(("template", "says"), [
    (FORGETS, "can't be told apart"), (None, "has no chat template"),
    ("{{ raise_exception('no') }}", "refuses item 1 of data.items: no")])
def test_a_template_that_turns_cannot_be_followed_in(template, says):
    with pytest.raises(InputError, match=says) as caught:
        load([{"messages": TALK}], words(chat=template))
    assert "item 1 of data.items" in str(caught.value)


@pytest.mark.parametrize(("space", "split", "normal"), [
    ("▁", pre_tokenizers.Metaspace(prepend_scheme="first"), None),
    ("Ġ", pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    ("▁", None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))])
def test_an_answer_that_goes_on_in_a_word_has_no_space_in_front(space, split, normal):
    pieces = [space, *"unhapy:.", "un", "ha", "unha", f"{space}un", f"{space}unha"]
    merges = [("u", "n"), ("h", "a"), ("un", "ha"), (space, "un"), (f"{space}un", "ha")]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    if split:
        backend.pre_tokenizer = split
    if normal:
        backend.normalizer = normal
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    row = {"prompt": "un", "completion": "happy", "chosen": "happy", "rejected": " happy"}
    pair = load([row], tokenizer, "pairs")
    first, goes_on, spaced = map(tokenizer.convert_ids_to_tokens, (
        load([row], tokenizer).tokens[0], pair.chosen[0], pair.rejected[0]))
    assert first == goes_on == [f"{space}un", "ha", "p", "p", "y", "<e>"]
    assert spaced == [f"{space}un", space, "ha", "p", "p", "y", "<e>"]


def test_an_encoder_reads_the_prompt_and_the_decoder_says_the_rest():
    tokenizer = words(behind=True, chat=CHATML)
    rows = [{"prompt": "the film", "completion": "was good"}]
    data = load(rows, tokenizer, encoder=True)
    assert data.prompt_tokens(0) == data.encoder_tokens[0].tolist() == ids("the film </s>")
    assert shown(data, tokenizer) == "[was good </s>]"
    data = load([{"messages": TALK}], tokenizer, encoder=True)
    assert shown(data, tokenizer) == "[very bad </s>]"
    assert data.prompts[0].split() == f"{FIRST} good </s> {SECOND}".split()
    for row, train_on in (("the film", "auto"), (rows[0], "all")):
        with pytest.raises(ConfigError):
            load([row], tokenizer, encoder=True, train_on=train_on)


def test_long_examples_are_cut_and_long_pairs_left_out():
    tokenizer = words(front=True)
    rows = [{"prompt": "the film", "completion": "was very good"},
            {"prompt": "the film was very", "completion": "good"},
            {"prompt": "the", "completion": "film"}]
    data = load(rows, tokenizer, max_length=4)
    assert [shown(data, tokenizer, i) for i in (0, 1)] == ["<s> the film[was]",
                                                           "<s> the[film </s>]"]
    assert data.places == ["item 1 of data.items", "item 3 of data.items"]
    assert data.notes == ("2 examples were longer than 4 tokens: cut at the end",
                          "1 example had nothing to train on within that: left out")
    with pytest.raises(InputError, match="None of the 3 examples"):
        load(rows[1:2] * 3, tokenizer, max_tokens=3)
    pairs = [{"prompt": "the film was", "chosen": c, "rejected": r} for c, r in (
        ("good", "bad"), ("very very good", "bad"), ("good", "good"), ("good", " good"))]
    data = load(pairs, tokenizer, "pairs", max_length=6)
    assert data.places == ["item 1 of data.items"]
    assert data.notes == ("2 pairs were identical: left out",
                          "1 pair was longer than 6 tokens: left out")
    with pytest.raises(InputError, match="None of the 1 pairs"):
        load(pairs[:1], tokenizer, "pairs", max_length=4)


def test_pairs_share_their_prompt_and_end_where_the_answer_does():
    tokenizer = words(front=True, chat=CHATML.replace("</s>", "</s> \n"))
    plain = {"chosen": "the film was good", "rejected": "the film was very bad", "margin": 2}
    talk = {"chosen": TALK, "rejected": [*TALK[:3], turns("so", "good")[1]]}
    data = load([plain], tokenizer, "pairs")
    assert data.chosen[0].tolist() == ids("<s> the film was good </s>")
    assert data.rejected[0].tolist() == ids("<s> the film was very bad </s>")
    assert (data.prompt_lengths, data.margins) == ([4], [2.0])
    assert list(facts(data, tokenizer)) == [
        "item 1 of data.items:", "  chosen:   <s> the film was[good </s>]",
        "  rejected: <s> the film was[very bad </s>]", "  margin:   2", "1 pair"]
    data = load([talk], tokenizer, "pairs")
    assert data.chosen[0].tolist() == ids(f"{FIRST} good </s> {SECOND} very bad </s>")
    assert data.rejected[0].tolist() == ids(f"{FIRST} good </s> {SECOND} good </s>")


def test_a_share_is_held_back_by_seed():
    rows = [" ".join(["good"] * n) for n in range(1, 11)]
    config = data_config(val="0.25")

    def split(seed):
        return load_data(config, words(), wants="completions", seed=seed, max_tokens=32, items=rows)

    train, held = split(3)
    assert (len(train), len(held)) == (8, 2)
    assert sorted(train.places + held.places) == sorted(f"item {i} of data.items"
                                                        for i in range(1, 11))
    assert split(3)[1].places == held.places
    assert len({tuple(split(seed)[1].places) for seed in range(6)}) > 1
    lengths = {place: len(tokens) for place, tokens in zip(held.places, held.tokens, strict=True)}
    assert lengths == {place: int(place.split()[1]) + 1 for place in held.places}
    for val in ("0.01", "0.99"):
        config.val = val
        with pytest.raises(InputError) as caught:
            split(3)
        assert caught.value.where == f"data.val={val}"


def test_examples_are_shown_with_marks_and_without_terminal_escapes():
    tokenizer = utf8_bytes()
    row = {"prompt": "a\x1b[1m", "completion": "é"}
    data = load([row], tokenizer)
    assert list(facts(data, tokenizer)) == [
        "item 1 of data.items:", "  a\\x1b[1m[é<|endoftext|>]",
        "1 example, 8 tokens, 3 of them trained on"]
    read = read_examples(data_config(), wants="completions", items=["a", ""])
    data = encode_examples(read, data_config(), tokenizer, max_tokens=9, encoder=False)
    assert data.notes == ("1 row was empty: left out",)
    assert data.tokens[0].dtype == np.int32
