"""Small texts for people, each against lines written by hand."""

import shutil
import subprocess

import pytest

from ppocli.config import text


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
