"""Small texts for people, each against lines written by hand."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ppocli.config import text
from ppocli.config.command_words import read_words
from ppocli.config.compose import compose
from ppocli.config.config_yaml import mapping_words, words_for


@pytest.mark.parametrize(("given", "spelled", "one_line"), [
    ("a\x1b[2Jb\r\n\tc", "a\\x1b[2Jb\n\tc", "a?[2Jb? ⏎ \tc"),
    ("a\u202eb\x9bc\u2028d\ud800", "a\\u202eb\\x9bc\\u2028d\\ud800", "a?b?c?d?"),
    ("\u200fא\ufeff", "\\u200fא\\ufeff", "?א?"),
])
def test_control_characters_reach_no_terminal(given, spelled, one_line):
    assert text.printable(given) == spelled
    assert text.clean(given) == one_line


def test_a_number_is_shown_as_it_was_given():
    assert [text.shown(value) for value in (1.0, 1.0000001, 1e-5, 0.1)] == [
        "1", "1.0000001", "1e-05", "0.1"]


def test_figures_of_damaged_files():
    """JSON has whole numbers that no float holds."""
    values = (10**400, float("inf"), "1", None, True, -0.0001, 3)
    assert [text.finite_number(value) for value in values] == [
        None, None, None, None, 1.0, -0.0001, 3.0]
    assert [text.figure(value, 2) for value in values] == ["-"] * 4 + ["1.00", "0.00", "3.00"]


@pytest.mark.parametrize("program", ["bash", "zsh"])
def test_what_is_to_be_pasted_reaches_a_command_unchanged(program):
    shell = shutil.which(program) or pytest.skip(f"no {program}")
    words = ["reward.kwargs.words=[a,b]", "~reward", "prompts.column=prompt;x", "run_name=my run",
             "it's", "a$b", "x=(1)", "#1", "{a,b}", "!x", "", "ünï", "*", "a~b"]
    typed = " ".join(map(text.pasted, words))
    done = subprocess.run([shell, "-c", f"printf '%s\\n' {typed}"], text=True,
                          capture_output=True, check=True)
    assert done.stdout.splitlines() == words
    assert text.pasted("ppo.num_steps=2") == "ppo.num_steps=2"


# Texts as they are typed --------------------------------------------------------------------------

TYPED = [
    {r"prompts.template={prompt}\n\tA:": "{prompt}\n\tA:",
     r"prompts.eval.template=\\t{prompt}\n": "\\t{prompt}\n",
     r"data.template=\\\n{prompt}\frac{1}{2}": "\\\n{prompt}\\frac{1}{2}",
     r"reward.step_separator=\n\n": "\n\n",
     r"generation.stop_sequences=[\n,'\\nabla','\n\n',\beta]":
         ["\n", r"\nabla", "\n\n", r"\beta"],
     r"prompts.items=['a\nb',{prompt:'\\theta',id:\t}]":
         ["a\nb", {"prompt": r"\theta", "id": "\t"}],
     r"reward.kwargs={sep:\n,deep:{list:['\\n','a b\tc']},n:2}":
         {"sep": "\n", "deep": {"list": [r"\n", "a b\tc"]}, "n": 2},
     r"env.kwargs.pattern='\d+\\nu'": r"\d+\nu",
     r"data.val=a\new": r"a\new", r"reward.fn=C\new.py:f": r"C\new.py:f"},  # paths are no texts
    {"prompts.template={prompt}\nA:": "{prompt}\nA:",  # a line break that a shell can type
     r"reward.step_separator=\\n": r"\n",
     r"reward.fns.one={fn:length,kwargs:{sep:'\\t'}}": {"fn": "length", "kwargs": {"sep": r"\t"}}}]


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize("typed", TYPED)
def test_typed_texts_have_line_breaks_and_tabs(typed):
    def assert_read(read) -> Any:
        config = compose(read).config
        assert {key: value_at(config, key) for key in expected} == expected
        return config

    expected = {word.partition("=")[0]: value for word, value in typed.items()}
    read = read_words(["model.path=lm", *typed])
    config = assert_read(read)
    # once only, also where words are read again by a job or a resume, and as words of Python's
    assert read_words(read.overrides).settings == read.settings
    assert_read(read_words(words_for(config)))
    mapping: dict[str, Any] = {}
    for key, value in expected.items():
        *parents, last = key.split(".")
        node = mapping
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    assert_read(read_words(mapping_words(mapping)))


def test_a_file_keeps_the_rules_of_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/own.yaml").write_text(
        "# @package _global_\nreward:\n  step_separator: \\n\ngeneration:\n"
        "  stop_sequences: [\"\\n\", '\\n']\n")
    config = compose(read_words(["+recipe=own"])).config
    assert config.reward.step_separator == r"\n"
    assert config.generation.stop_sequences == ["\n", r"\n"]
