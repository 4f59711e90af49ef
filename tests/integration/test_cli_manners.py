"""Options before the command: quiet, verbose, without colours; and options of ``train``."""

import os
from collections.abc import Iterator

import pytest
from helpers import ppocli
from runs import words

from ppocli.cli import output
from ppocli.cli.train import run_words


@pytest.fixture
def manner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``set_manner`` changes in the process is undone."""
    monkeypatch.setattr(output._Manner, "quiet", False)
    monkeypatch.setattr(output._Manner, "plain", False)
    monkeypatch.setenv("PPOCLI_DEBUG", "")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    os.environ.pop("NO_COLOR", None)


@pytest.mark.parametrize(("asked", "mode"), [
    ({}, "auto"), ({"plain": True}, "lines"), ({"quiet": True}, "quiet"),
    ({"quiet": True, "plain": True}, "quiet")])
def test_the_display_follows_the_options(asked, mode, manner):
    output.set_manner(**asked)
    output.set_manner()  # a command without the option takes nothing back
    assert output.display_mode() == mode


def test_quiet_leaves_out_notes_only(manner, capsys):
    output.set_manner(quiet=True)
    output.say("a note")
    output.complain("warning: a warning")
    assert capsys.readouterr().err == "warning: a warning\n"


def test_quiet_training_prints_the_model_and_warnings(world):
    done = ppocli("--quiet", "train", *words("run_name=r", "ppo.num_steps=1"), cwd=world, code=0)
    assert done.stdout == f"{world}/runs/r/model\n"
    log = (world / "runs/r/ppocli.log").read_text()
    warned = [line.split(" WARNING ")[1] for line in log.splitlines() if " WARNING " in line]
    assert done.stderr.splitlines() == [f"warning: {text}" for text in warned]
    assert "INFO step 1/1" in log  # the log has everything


def test_verbose_adds_the_traceback(tmp_path):
    for option in ("-v", "--verbose"):
        assert "Traceback" in ppocli(option, "train", "seed=x", cwd=tmp_path).stderr
    ppocli("train", "seed=x", cwd=tmp_path, code=2)


def test_no_color_holds_for_the_process_and_what_it_starts(manner):
    output.set_manner(no_color=True, verbose=True)
    assert (os.environ["NO_COLOR"], os.environ["PPOCLI_DEBUG"]) == ("1", "1")


@pytest.mark.parametrize(("word", "said"), [
    ("--no-progres", "unknown option --no-progres; did you mean --no-progress?"),
    ("--dry-rum", "unknown option --dry-rum; did you mean --dry-run?"),
    ("-q", "it stands before the command: ppocli -q train ..."),
    ("--no-color", "it stands before the command: ppocli --no-color train ...")])
def test_options_that_are_misspelt_or_misplaced(word, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert output.code_of(lambda: run_words([word])) == 2
    assert said in capsys.readouterr().err


def test_dry_run_trains_and_writes_nothing(world):
    before = {path for path in world.rglob("*") if "__pycache__" not in path.parts}
    ppocli("train", *words("run_name=r"), "--dry-run", cwd=world, code=0)
    assert {path for path in world.rglob("*") if "__pycache__" not in path.parts} == before
