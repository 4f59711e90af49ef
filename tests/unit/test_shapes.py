"""Rows in the shapes of other tools: what becomes of their turns, calls, marks and systems."""

import json

import pytest
from data_tokenizers import CHATML, utf8_bytes, words
from helpers import refused
from test_encoding import TALK, load, shown
from test_examples import read, turns

from ppocli.config.schema import PromptsConfig
from ppocli.data import prompt_set
from ppocli.environments.env_calls import ChatWords
from ppocli.errors import InputError

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
CALL = "{% for c in m.tool_calls or [] %}{% if c.function %}{% set c = c.function %}{% endif %}"
END = "{% endfor %}<|im_end|>\n"
FORM = ("{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}"
        "<|im_start|>assistant\n{%% endif %%}")
QWEN = FORM % (TURN + CALL + '\n<tool_call>\n{"name": "{{ c.name }}", "arguments": '
               "{{ c.arguments | tojson }}}\n</tool_call>" + END)
LLAMA = FORM % (
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% set c = m.tool_calls[0].function %}<|im_start|>assistant\n"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{ c.arguments | tojson }}}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endif %}")
ENCODED = "{{ c.arguments | tojson }}"
# what takes texts alone: it fails on a mapping
JOINS = QWEN.replace(ENCODED, "{{ c.arguments + '' }}")

ARGUMENTS = {"place": "Ås", "days": [1, 2.5], "unit": {"of": None, "on": True}}
TEXT = '{"place":"Ås", "days": [1, 2.5], "unit": {"of": null, "on": true}}'
QUESTION = {"role": "user", "content": "how is it?"}
RESULT = {"role": "tool", "content": "{'a': 1} warm"}


def talker(template):
    tokenizer = utf8_bytes()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def calling(arguments):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "look", "arguments": arguments}}]}


def rendered(tokenizer, messages, *, prompt=False):
    """transformers' own."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def loaded_prompts(items, tokenizer, **keys):
    return prompt_set.load_prompts(PromptsConfig(**{"chat": True} | keys), tokenizer, seed=0,
                                   max_prompt_tokens=2000, items=items)


CALLS = {
    "a text": calling(TEXT), "a mapping": calling(ARGUMENTS),
    "no content": {key: cell for key, cell in calling(TEXT).items() if key != "content"},
    "calls in JSON": calling(TEXT) | {"tool_calls": json.dumps(calling(TEXT)["tool_calls"])},
    "function_call": {"role": "assistant", "content": None, "function_call": {
        "name": "look", "arguments": TEXT}},
    "LLaMA-Factory": {"from": "function_call", "value": json.dumps(
        {"name": "look", "arguments": ARGUMENTS})}}


@pytest.mark.parametrize("template", [QWEN, LLAMA, JOINS], ids=["qwen", "llama", "joins"])
@pytest.mark.parametrize("form", CALLS)
def test_calls_of_tools_are_what_transformers_makes_of_mappings(template, form):
    tokenizer = talker(template)
    if template == JOINS:
        plain = form in ("a mapping", "LLaMA-Factory")
        taken = calling(json.dumps(ARGUMENTS, ensure_ascii=False) if plain else TEXT)
    else:
        taken = calling(ARGUMENTS)
    answer = {"role": "function" if form == "function_call" else "tool"} | {
        "content": RESULT["content"]}
    rows = [QUESTION, CALLS[form], answer, {"role": "assistant", "content": "warm"}]
    whole = [QUESTION, taken, RESULT, rows[-1]]
    expected = rendered(tokenizer, whole)
    # the turn of the call and the last one are learned
    before, through = (rendered(tokenizer, whole[:count], prompt=count == 1) for count in (1, 2))
    last = rendered(tokenizer, whole[:3], prompt=True)
    masked = (f"{before}[{through[len(before):-1]}]\n{last[len(through):]}"
              f"[{expected[len(last):-1]}]")
    for row in ({"messages": rows}, {"prompt": rows[:1], "completion": rows[1:]}):
        data = load([row], tokenizer, max_tokens=2000, train_on="assistant")
        assert tokenizer.decode(data.tokens[0]) == expected.rstrip("\n")
        assert shown(data, tokenizer) == masked
    pair = load([{"chosen": rows[:2], "rejected": [rows[0], rows[3]]}], tokenizer, "pairs",
                max_tokens=2000)
    assert tokenizer.decode(pair.chosen[0]) == through.rstrip("\n")
    for row in ({"prompt": rows[:3]}, {"messages": rows},
                {"chosen": rows, "rejected": [*rows[:3], {"role": "assistant", "content": "no"}]}):
        assert loaded_prompts([row], tokenizer).texts == [last]
    words_of = ChatWords(tokenizer, tools=[{"type": "function", "function": {"name": "look"}}])
    asked = loaded_prompts([{"prompt": rows[:3]}], tokenizer)
    opened, _ = words_of.opening(asked.token_ids[0], asked.messages[0], None)
    assert tokenizer.decode(opened) == last


@pytest.mark.parametrize(("message", "says"), [
    (calling('{"place": '), "has a malformed tool call"),
    ({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
     "has a part that is no text: ")])
def test_messages_that_cannot_be_read_are_named(message, says):
    with refused(InputError, "Message 2 of column 'messages' in item 1 of data.items", says):
        read([{"messages": [QUESTION, message]}])


PARTS = [{"type": "text", "text": "how is"}, {"type": "text", "text": " it?", "image_url": None}]
SHARED = [{"from": "human", "value": "how is it?"}, {"from": "gpt", "value": "warm"}]
ASKED = [QUESTION, {"role": "assistant", "content": "warm"}]
SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(("row", "messages", "note"), [
    ({"conversations": SHARED}, ASKED, "read as conversations: the column conversations"),
    ({"conversation": ASKED}, ASKED, "read as conversations: the column conversation"),
    ({"messages": SHARED}, ASKED, "read as ShareGPT's turns: from is the role, value the content"),
    ({"conversations": [{"role": one["from"], "value": one["value"]} for one in SHARED]}, ASKED,
     "read as ShareGPT's turns: from is"),
    ({"conversations": [{"from": "system", "value": "be kind"}, *SHARED]}, [SYSTEM, *ASKED], ""),
    ({"messages": [QUESTION | {"content": PARTS}, ASKED[1]]}, ASKED, ""),
    ({"conversations": SHARED, "system": "be kind"}, [SYSTEM, *ASKED],
     "the column system is the first turn of conversations"),
    ({"messages": ASKED, "system": " "}, ASKED, ""),
    ({"messages": [SYSTEM, *ASKED], "system": "be rude"}, [SYSTEM, *ASKED], ""),
    ({"messages": ASKED, "by": "web", "id": 3}, ASKED, "columns that are not read: by, id")])
def test_conversations_of_other_shapes_are_read_in_data_and_prompts(row, messages, note):
    found = read([row])
    assert found.examples[0].completion == messages
    assert any(text.startswith(note) for text in ["", *found.notes])
    tokenizer = talker(QWEN)
    asked = loaded_prompts([row], tokenizer)
    assert asked.messages == [messages[:-1]]
    assert asked.texts == [rendered(tokenizer, messages[:-1], prompt=True)]
    if "columns" not in note:
        assert any(text.startswith(note) for text in ["", *asked.notes])


@pytest.mark.parametrize("row", [
    {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": {"from": "gpt", "value": "no"}},
    {"chosen": SHARED, "rejected": [SHARED[0], {"from": "gpt", "value": "no"}]},
    {"prompt": [QUESTION | {"content": PARTS}], "chosen": ASKED[1:],
     "rejected": turns("no", first="assistant")},
    {"prompt": [], "chosen": ASKED, "rejected": [QUESTION, *turns("no", first="assistant")]}])
def test_pairs_of_other_shapes(row):
    (pair,) = read([row | {"system": "be kind"}], "pairs").pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == (
        [SYSTEM, QUESTION], ASKED[1:], turns("no", first="assistant"))


@pytest.mark.parametrize(("one", "other", "prompt"), [
    ("\n\nHuman: hi\n\nAssistant: I do", "\n\nHuman: hi\n\nAssistant: I do not",
     "\n\nHuman: hi\n\nAssistant:"),
    ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I am Bo: d",
     "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I am Bo: e",
     "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"),
    ("### Instruction:\nhi\n\n### Response:\nI do", "### Instruction:\nhi\n\n### Response:\nI am",
     "### Instruction:\nhi\n\n### Response:"),
    ("A post.\n\nTL;DR: I do", "A post.\n\nTL;DR: I am", "A post.\n\nTL;DR:"),
    ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI do",
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI am",
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    # no mark that both share, or nothing behind it
    ("A film: I do", "A film: I am", "A film: I"),
    ("Pick one.\nA: a film\nB: a cast", "Pick one.\nA: a film\nB: a plot",
     "Pick one.\nA: a film\nB: a")])
def test_the_prompt_of_two_texts_ends_at_the_mark_of_who_answers(one, other, prompt):
    row = {"chosen": one, "rejected": other}
    for cell in ({}, {"prompt": ""}):
        (pair,) = read([row | cell], "pairs").pairs
        assert (pair.prompt, pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (
            prompt, one, other)
        assert loaded_prompts([row | cell], talker(QWEN), chat=False).texts == [prompt]


MASK = [{"weight": 0.0}, {"train_on_turn": False}, {"weight": 1, "train": "false"}]
FIRST, SECOND = "<s> user : the film ? </s> assistant :", "user : and you ? </s> assistant :"
GOOD, BAD = "good </s>", "very bad </s>"


def marked(first, last=None):
    return [TALK[0], TALK[1] | first, TALK[2], TALK[3] | (last or {})]


@pytest.mark.parametrize("mask", MASK, ids=str)
def test_turns_that_are_marked_are_not_trained_on(mask):
    tokenizer = words(chat=CHATML)
    for row in ({"messages": marked(mask)}, {"messages": marked(mask, {"weight": 1})},
                {"prompt": TALK[:1], "completion": marked(mask)[1:]}):
        data = load([row], tokenizer)
        assert shown(data, tokenizer) == f"{FIRST} {GOOD} {SECOND}[{BAD}]"
        assert data.notes == ("1 turn was marked as not trained on: masked",)
    data = load([{"messages": marked({}, mask)}], tokenizer)
    assert shown(data, tokenizer) == f"{FIRST}[{GOOD}]"
    data = load([{"messages": marked(mask)}], tokenizer, train_on="all")
    assert shown(data, tokenizer) == f"<s>[{FIRST[4:]}]{GOOD}[{SECOND} {BAD}]"
    data = load([{"messages": marked(mask, mask)}, {"messages": TALK}], tokenizer)
    assert data.places == ["item 2 of data.items"]
    assert "1 example had no turn to train on: left out" in data.notes
    for train_on, row in (("auto", marked(mask, mask)), ("completion", marked({}, mask))):
        with refused(InputError, "None of the 1 examples has a token to train on"):
            load([{"messages": row}], tokenizer, train_on=train_on)
