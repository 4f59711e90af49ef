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


def test_lines_of_exceptions():
    assert text.first_line(ValueError("\n one\ntwo")) == "one"
    assert text.first_line("x" * 400) == "x" * 300
    assert text.first_line(OSError()) == "OSError"
    assert text.error_line(ValueError("one\ntwo")) == "ValueError: one"
    assert text.error_line(KeyError()) == "KeyError"


def test_a_number_is_shown_as_it_was_given():
    assert [text.shown(value) for value in (1.0, 1.0000001, 1e-5, 0.1)] == [
        "1", "1.0000001", "1e-05", "0.1"]


def test_figures_of_damaged_files():
    """JSON has whole numbers that no float holds."""
    values = (10**400, float("inf"), "1", None, True, -0.0001, 3)
    assert [text.finite_number(value) for value in values] == [
        None, None, None, None, 1.0, -0.0001, 3.0]
    assert [text.figure(value, 2) for value in values] == ["-"] * 4 + ["1.00", "0.00", "3.00"]


def test_paths_are_told_in_a_folder_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert text.short_path(f"{tmp_path}/a/b") == "a/b"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert text.short_path(f"{gone}/a") == f"{gone}/a"


def test_counts_and_sizes():
    assert [text.counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [text.format_bytes(n) for n in (12, 3400, 214 * 10**6, 94 * 10**8, 123 * 10**8)] == [
        "12 bytes", "3 kB", "214 MB", "9.4 GB", "12 GB"]
    assert [text.format_memory(n) for n in (2048, 5 * 2**20, 1234 * 2**30)] == [
        "2 KiB", "5 MiB", "1234 GiB"]


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
