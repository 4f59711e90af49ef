"""From rows to tokens: rendering, lengths, batches, order, evaluation prompts, digest."""

import json

import numpy as np
import pytest
import torch
from data_tokenizers import CHATML, ids, words
from helpers import refused, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from ppocli.config.schema import EvalPromptsConfig, PromptsConfig
from ppocli.data.data_set import PromptSet, prompt_indices, source_counts
from ppocli.data.prompt_set import load_eval_prompts, load_prompts
from ppocli.errors import ConfigError, InputError

LONG = "the film was very very good and i was not so"  # 11 words


def load(items, tokenizer=None, seed=0, most=64, **keys):
    return load_prompts(PromptsConfig(**keys), tokenizer or words(), seed=seed,
                        max_prompt_tokens=most, items=items)


def load_both(cfg, items=None, eval_items=None):
    given = {"tokenizer": words(), "seed": 0, "max_prompt_tokens": 64}
    training = load_prompts(cfg, **given, items=items)
    return training, load_eval_prompts(cfg, **given, training=training, items=eval_items)


# Rendering ----------------------------------------------------------------------------------------


def test_template_with_metadata():
    items = [{"text": "the film", "mood": "good", "n": 3}]
    prompts = load(items, column="text", first_words=1,
                   template="{{i}} : {prompt} {text} is {mood} {n}")
    assert prompts.texts == ["{i} : the the is good 3"]
    assert prompts.columns == {"mood": ["good"], "n": [3]}


@pytest.mark.parametrize(("template", "what"), [
    ("{promt} .", "The template's placeholder {promt} is no column; there are prompt, mood. "
                  "Did you mean {prompt}?"),
    ("{prompt} {}", "The template is malformed"), ("{prompt", "The template is malformed"),
    ("good .", "The template has no placeholder")])
def test_bad_templates(template, what):
    with pytest.raises(ConfigError) as caught:
        load([{"prompt": "it is", "mood": "good"}], template=template)
    assert caught.value.what.startswith(what)
    assert caught.value.where == f"prompts.template={template!r}"


def test_chat():
    tokenizer = words(front=True, chat=CHATML)
    messages = [{"role": "user", "content": "it is"}, {"role": "assistant", "content": "so ?"},
                {"role": "user", "content": "good"}]
    prompts = load(["the film", {"prompt": messages, "label": 1}], tokenizer, chat=True)
    assert prompts.texts == ["<s> user : the film </s> assistant :",
                             "<s> user : it is </s> assistant : so ? </s> user : good </s>"
                             " assistant :"]
    # one BOS, the template's own; EOS inside the prompt is kept
    assert prompts.token_ids == [ids(text) for text in prompts.texts]
    assert prompts.columns == {"label": [None, 1]}
    batch = prompts.batch([0, 1], [0, 1], pad_id=1)
    assert batch.mask.sum(1).tolist() == [len(row) for row in prompts.token_ids]


TOLD = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + CHATML
TOOL = {"type": "function", "function": {"name": "film"}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_the_chat_template_is_told_of_tools(tools):
    items, told = ["so", {"prompt": "is it ?", "tools": tools, "calls": None}], words(chat=TOLD)
    prompts = load(items, told, chat=True, tools="tools")
    assert [text.split("<s>")[0] for text in prompts.texts] == ["", "film "]
    assert prompts.columns["tools"] == [None, tools]  # for rewards
    assert prompts.notes == ()
    assert load(items, told, chat=True).texts[1].startswith("<s>")
    with refused(InputError, "no column 'tool'", "prompts.tools=tool"):
        load(items, told, chat=True, tools="tool")


def test_chat_that_cannot_work():
    with pytest.raises(InputError, match="The tokenizer has no chat template") as caught:
        load(["it is"], chat=True)
    assert "prompts.chat=false" in caught.value.fix
    refusing = words(chat="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"refuses item 1 of prompts\.items: roles must alternate"):
        load(["it is"], refusing, chat=True)
    with pytest.raises(InputError, match=r"prompts\.first_words works on texts, but item 1"):
        load([[{"role": "user", "content": "it is"}]], words(chat=CHATML), chat=True, first_words=2)


# Tokens and lengths -------------------------------------------------------------------------------

@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("front", [False, True])
def test_the_tokenizers_bos_is_kept_and_its_eos_left_out(front, behind):
    prompts = load(["it is </s> so", "good"], words(front=front, behind=behind))
    first = ids("<s>") if front else []
    assert prompts.token_ids == [first + ids("it is </s> so"), first + ids("good")]
    assert prompts.texts == ["it is </s> so", "good"]


@pytest.mark.parametrize(("front", "side", "expected", "text"), [
    (False, "left", "i was not so", "i was not so"),
    (False, "right", "the film was very", "the film was very"),
    (True, "left", "<s> was not so", "was not so"),
    (True, "right", "<s> the film was", "the film was")])
def test_truncation(front, side, expected, text):
    prompts = load([LONG, "it is", LONG], words(front=front), max_length=4, truncation_side=side)
    assert prompts.token_ids == [ids(expected), ([0] if front else []) + ids("it is"),
                                 ids(expected)]
    assert prompts.texts == [text, "it is", text]
    assert prompts.notes == (f"2 prompts were longer than 4 tokens: cut on the {side}",
                             "1 prompt was the same as an earlier one: kept")


def test_overlong_prompts_are_dropped_where_that_is_asked_for():
    items = [{"prompt": LONG, "n": 0}, {"prompt": "it is", "n": 1}, {"prompt": LONG, "n": 2},
             {"prompt": "good film", "n": 3}]
    cfg = PromptsConfig(max_length=4, overlong="drop", eval=EvalPromptsConfig(limit=1))
    prompts, own = load_both(cfg, items=items)
    assert prompts.token_ids == [ids("it is"), ids("good film")]
    assert prompts.columns == {"n": [1, 3]}
    assert prompts.notes == ("2 prompts were longer than 4 tokens: dropped",)
    assert own.texts == ["it is"]  # of those that are left
    evaluation = load_both(cfg, items=items, eval_items=[LONG, "bad"])[1]
    assert evaluation.texts == ["bad"]
    assert evaluation.notes == ("1 prompt was longer than 4 tokens: dropped",)
    with pytest.raises(InputError, match=r"All prompts are longer than 4 tokens \(2 of 2\)"):
        load([LONG, LONG], max_length=4, overlong="drop")


def test_length_sampler_keeps_the_first_tokens():
    prompts = load([LONG] * 200, length_sampler=[2, 5])
    lengths = [len(row) for row in prompts.token_ids]
    assert set(lengths) == {2, 3, 4, 5}
    for row, text in zip(prompts.token_ids, prompts.texts, strict=True):
        assert row == ids(LONG)[:len(row)]
        assert text == " ".join(LONG.split()[:len(row)])
    assert load(["it is"], length_sampler=[4, 5]).texts == ["it is"]
    some = load([LONG] * 200, length_sampler=[2, 5], max_length=4, overlong="drop")
    assert [len(row) for row in some.token_ids] == [length for length in lengths if length < 5]


def test_blank_and_equal_prompts_are_counted():
    prompts = load(["it is", "", " \n", None, "it is", "so", "it is"])
    assert prompts.texts == ["it is", "it is", "so", "it is"]
    assert prompts.notes == ("3 prompts were blank: dropped",
                             "2 prompts were the same as an earlier one: kept")


# Batches ------------------------------------------------------------------------------------------

def test_batches_are_left_padded():
    prompts = load([{"prompt": "it is", "n": 1}, {"prompt": "so", "n": 2},
                    {"prompt": "the film was", "n": 3}])
    batch = prompts.batch([1, 2, 1], [7, 8, 9], pad_id=1)
    assert batch.tokens.tolist() == [[1, 1, *ids("so")], ids("the film was"), [1, 1, *ids("so")]]
    assert batch.tokens.dtype == torch.int64
    assert batch.mask.tolist() == [[False, False, True], [True] * 3, [False, False, True]]
    assert batch.mask.dtype == torch.bool
    assert batch.texts == ["so", "the film was", "so"]
    assert batch.columns == {"n": [2, 3, 2]}
    assert batch.episodes == [7, 8, 9]
    assert prompts.batch([1], [0], pad_id=1).tokens.tolist() == [ids("so")]


# Order --------------------------------------------------------------------------------------------

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)
positions = st.integers(0, 500)


@given(n=sizes, seed=seeds, epoch=st.integers(0, 50))
def test_each_epoch_is_a_permutation(n, seed, epoch):
    order = prompt_indices(epoch * n, n, n=n, seed=seed, shuffle=True)
    assert sorted(order) == list(range(n))


@given(n=sizes, seed=seeds, start=positions, first=st.integers(0, 90), second=st.integers(0, 90),
       shuffle=st.booleans())
def test_a_cursor_resumes_the_order(*, n, seed, start, first, second, shuffle):
    whole = prompt_indices(start, first + second, n=n, seed=seed, shuffle=shuffle)
    head = prompt_indices(start, first, n=n, seed=seed, shuffle=shuffle)
    tail = prompt_indices(start + first, second, n=n, seed=seed, shuffle=shuffle)
    assert head + tail == whole
    assert all(type(index) is int for index in whole)


def test_seeds_and_epochs_differ():
    def epoch(number: int, seed: int) -> list[int]:
        return prompt_indices(number * 50, 50, n=50, seed=seed, shuffle=True)

    orders = [epoch(number, seed) for number in range(3) for seed in range(3)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert all(order != list(range(50)) for order in orders)


# Mixes --------------------------------------------------------------------------------------------

weights = st.lists(st.sampled_from([0.1, 0.7, 1, 2, 3, 40]) | st.floats(1e-3, 1e3), min_size=1,
                   max_size=5)


@given(weights=weights, count=st.integers(0, 300), cut=st.integers(0, 300))
def test_the_shares_of_a_mix_are_exact_up_to_rounding(*, weights, count, cut):
    counts = np.array(source_counts(0, count, weights))
    positions = np.arange(count + 1)
    assert (counts.sum(0) == positions).all()
    assert set(np.diff(counts).ravel().tolist()) <= {0, 1}
    off = np.abs(counts - np.outer(np.array(weights) / sum(weights), positions)).max()
    assert off <= {1: 0.0, 2: 0.5, 3: 1.0}.get(len(weights), 1.5) + 1e-9
    later = np.array(source_counts(cut, count, weights))
    assert (np.array(source_counts(0, cut + count, weights))[:, cut:] == later).all()


def mixed_set(*mix):
    total = sum(size for size, _ in mix)
    return PromptSet([[0]] * total, [""] * total, {}, (), mix=mix)


@given(sizes=st.lists(st.integers(1, 20), min_size=3, max_size=3), seed=seeds, cut=positions,
       shuffle=st.booleans())
def test_a_mix_is_resumed_and_goes_through_each_source(*, sizes, seed, cut, shuffle):
    prompts = mixed_set(*zip(sizes, (2, 1, 1), strict=True))
    order = prompts.indices(0, cut + 40, seed=seed, shuffle=shuffle)
    assert order[cut:] == prompts.indices(cut, 40, seed=seed, shuffle=shuffle)
    offset = 0
    for size in sizes:
        places = [index - offset for index in order if offset <= index < offset + size]
        assert places == prompt_indices(0, len(places), n=size, seed=seed, shuffle=shuffle)
        offset += size


def test_a_mix_of_files(tmp_path):
    sums = write_jsonl(tmp_path / "sums.jsonl", [{"q": f"{i}", "answer": i} for i in range(9)])
    films = write_jsonl(tmp_path / "films.jsonl", [{"prompt": "the film"}, {"prompt": "it was"}])
    entries = {"math": {"path": [str(sums)], "column": "q", "template": "so {prompt}",
                        "weight": 3, "limit": 8},
               "chat": {"path": str(films)}}
    training, evaluation = load_both(PromptsConfig(mix=entries, first_words=9, eval=(
        EvalPromptsConfig(limit=4))))
    assert training.mix == ((8, 3.0), (2, 1.0))
    assert training.texts == [*(f"so {i}" for i in range(8)), "the film", "it was"]
    assert training.columns == {"answer": [*range(8), None, None],
                                "source": ["math"] * 8 + ["chat"] * 2}
    order = training.indices(0, 8, seed=3, shuffle=True)
    assert sum(index >= 8 for index in order) == 2
    assert evaluation.texts == ["so 0", "so 2", "so 5", "the film"]
    assert evaluation.columns["source"] == ["math"] * 3 + ["chat"]

    own = EvalPromptsConfig(path=str(films))
    assert load_both(PromptsConfig(mix=entries, eval=own))[1].columns == {}
    write_jsonl(sums, [{"q": "1", "source": "x"}])
    with refused(InputError, "The rows have a column 'source'") as caught:
        load_both(PromptsConfig(mix=entries))
    assert caught.value.where == f"prompts.mix.math.path={sums}"
    kept = {**entries, "math": {**entries["math"], "columns": []}}
    assert load_both(PromptsConfig(mix=kept))[0].columns["source"] == ["math", "chat", "chat"]


# Evaluation prompts -------------------------------------------------------------------------------

NUMBERED = [{"prompt": f"the film {'very ' * i}good", "n": i} for i in range(10)]


def test_without_own_source_they_are_spread_over_the_training_prompts():
    cfg = PromptsConfig(eval=EvalPromptsConfig(limit=4))
    training, evaluation = load_both(cfg, items=NUMBERED)
    assert evaluation.columns == {"n": [0, 2, 5, 7]}
    assert evaluation.texts == [training.texts[i] for i in (0, 2, 5, 7)]
    assert load_both(cfg, items=NUMBERED[:3])[1].columns == {"n": [0, 1, 2]}


def test_training_rows_are_processed_with_the_evaluation_keys():
    cfg = PromptsConfig(first_words=2, column="text",
                        eval=EvalPromptsConfig(limit=2, template="so {prompt} !", first_words=1))
    items = [{"text": "the film was", "rare": 1}, {"text": "it is good"}, {"text": "i was not"}]
    training, evaluation = load_both(cfg, items=items)
    assert training.texts == ["the film", "it is", "i was"]
    assert evaluation.texts == ["so the !", "so it !"]
    assert evaluation.columns == {"rare": [1, None]}


def test_own_sources(tmp_path):
    train, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in NUMBERED))
    other.write_text('{"prompt": "bad film", "n": 1}\n{"prompt": " "}\n')
    own = EvalPromptsConfig(path=str(other))
    _, evaluation = load_both(PromptsConfig(path=str(train), eval=own))
    assert evaluation.texts == ["bad film"]
    assert evaluation.notes == ("1 prompt was blank: dropped",)
    _, evaluation = load_both(PromptsConfig(path=str(train), eval=own), eval_items=["it is"])
    assert evaluation.texts == ["it is"]
    own = EvalPromptsConfig(items=["it is", "so good"], limit=1)
    _, evaluation = load_both(PromptsConfig(path=str(train), limit=3, eval=own))
    assert evaluation.texts == ["it is"]


# Digest -------------------------------------------------------------------------------------------

def test_the_digest_notices_changes():
    base = [{"prompt": "it is", "n": 1, "m": {"a": 1, "b": [2]}}, {"prompt": "so", "n": None}]
    same = [{"prompt": "it is", "m": {"b": [2], "a": 1}, "n": 1}, {"prompt": "so"}]
    assert load(base).digest() == load(same).digest()
    changed = [
        [*base, "good"], base[:1], base[::-1],
        [{**base[0], "n": 2}, base[1]], [{**base[0], "n": "1"}, base[1]],
        [{**base[0], "prompt": "it was"}, base[1]], [{**base[0], "more": None}, base[1]]]
    digests = {load(rows).digest() for rows in changed} | {load(base).digest()}
    assert len(digests) == len(changed) + 1
    assert load(base, max_length=1).digest() != load(base).digest()


def test_the_digest_is_the_same_in_every_process_and_version():
    prompts = PromptSet([[1, 2]], ["x"], {"m": [{"b": 1, "a": "é"}]}, ())
    assert prompts.digest() == "e1c7d767847bc534338e21b12790214e663d145e14d388cd576139761076091c"
