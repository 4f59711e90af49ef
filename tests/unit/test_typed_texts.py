"""Texts typed on a command line: line breaks and tabs by one rule, once only; files keep YAML's."""

from operator import attrgetter
from pathlib import Path

import pytest

from ppocli.config.command_words import read_words
from ppocli.config.compose import compose
from ppocli.config.config_yaml import mapping_words, words_for


@pytest.mark.parametrize(("word", "expected"), [
    (r"prompts.template={prompt}\n\tA:", "{prompt}\n\tA:"),
    (r"prompts.template='{prompt}\\nabla'", r"{prompt}\nabla"),
    (r"prompts.eval.template=\\t{prompt}\n", "\\t{prompt}\n"),
    (r"data.template=\\\n{prompt}\frac{1}{2}", "\\\n{prompt}\\frac{1}{2}"),
    ("prompts.template={prompt}\nA:", "{prompt}\nA:"),  # a line break that a shell can type
    (r"reward.step_separator=\n\n", "\n\n"), (r"reward.step_separator=\\n", r"\n"),
    (r"generation.stop_sequences=[\n,'\\nabla','\n\n',\beta]",
     ["\n", r"\nabla", "\n\n", r"\beta"]),
    (r"prompts.items=['a\nb',{prompt:'\\theta',id:\t}]",
     ["a\nb", {"prompt": r"\theta", "id": "\t"}]),
    (r"reward.kwargs={sep:\n,deep:{list:['\\n','a b\tc']},n:2}",
     {"sep": "\n", "deep": {"list": [r"\n", "a b\tc"]}, "n": 2}),
    (r"env.kwargs.pattern='\d+\\nu'", {"pattern": r"\d+\nu"}),
    (r"reward.fns.one={fn:length,kwargs:{sep:'\\t'}}", {"one": {"fn": "length",
                                                            "kwargs": {"sep": r"\t"}}}),
    (r"data.val=a\new", r"a\new"), (r"model.path=\tiny", r"\tiny"),  # paths are no texts
    (r"reward.fn=C\new.py:f", r"C\new.py:f")])
def test_typed_texts_have_line_breaks_and_tabs(word, expected):
    key = word.partition("=")[0]
    key = key.removesuffix(".pattern").removesuffix(".one")
    read = read_words(["model.path=lm", word])
    composed = compose(read)
    assert attrgetter(key)(composed.config) == expected
    # once only, also where words are read again by a job or a resume, and as words of Python's
    assert read_words(read.overrides).settings == read.settings
    assert attrgetter(key)(compose(read_words(words_for(composed.config))).config) == expected
    value: object = expected
    for part in reversed(key.split(".")):
        value = {part: value}
    mapping = compose(read_words(mapping_words(value)))
    assert attrgetter(key)(mapping.config) == expected


def test_a_file_keeps_the_rules_of_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/own.yaml").write_text(
        "# @package _global_\nreward:\n  step_separator: \\n\ngeneration:\n"
        "  stop_sequences: [\"\\n\", '\\n']\n")
    config = compose(read_words(["+recipe=own"])).config
    assert config.reward.step_separator == r"\n"
    assert config.generation.stop_sequences == ["\n", r"\n"]
