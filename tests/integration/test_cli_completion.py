"""Completion: what is offered, Typer's protocols for three shells, and TAB in a real bash."""

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import environment, ppocli

from ppocli.cli.options import complete_word


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two runs in it."""
    for name in ("older", "newer"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("")
        (folder / "run.json").write_text("{}")
    os.utime(tmp_path / "runs/older/config.yaml", (1e9, 1e9))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "incomplete", "expected"), [
    ([], "ppo.kl_est", ["ppo.kl_estimator="]),
    ([], "ppo.kl_estimator=k", [f"ppo.kl_estimator=k{n}" for n in (1, 2, 3, "3+")]),
    ([], "model=re", ["model=reviews"]),
    ([], "ppo.kl_estimator=k1,ab", ["ppo.kl_estimator=k1,abs"]),
    ([], "eval.at_start=", ["eval.at_start=true", "eval.at_start=false"]),
    ([], "model.path=b", [f"model.path=builtin:{name}" for name in (
        "reviews", "randomwalks", "guess-number", "calculator")]),
    ([], "prompts.path=builtin:ra", ["prompts.path=builtin:randomwalks-prompts"]),
    ([], "reward.fn=key", ["reward.fn=keyword"]),
    ([], "resume=", ["resume=never", "resume=auto", "resume=runs/newer", "resume=runs/older"]),
    # as bash breaks words
    (["+recipe", "="], "h", ["hh_ppo", "hh_reward", "hh_sft"]),
    ([], "data.path=builtin:pipeline-pairs-", ["data.path=builtin:pipeline-pairs-eval"]),
    (["model.path", "=", "builtin"], ":", [
        ":reviews", ":randomwalks", ":guess-number", ":calculator"]),
    (["seed", "=", "1", "model", "="], "re", ["reviews"]),
    (["seed=1"], "reward.kw", ["reward.kwargs="]),
    (["seed=1"], "nothing", []),
])
def test_words_are_completed(words, incomplete, expected, runs):
    assert complete_word(words, incomplete) == expected


def test_a_new_word_is_completed_after_a_whole_one(runs):
    for before in (["seed=1"], ["seed", "=", "1"], ["+recipe=quickstart"], ["runs/newer"]):
        assert "+recipe=" in complete_word(before, "")


def test_fish_protocol_shows_what_keys_mean_and_leaves_files_to_fish(runs):
    def fish(line: str, action: str = "get-args", **more) -> list[list[str]]:
        done = ppocli(cwd=runs, _PPOCLI_COMPLETE="complete_fish", _TYPER_COMPLETE_ARGS=line,
                      _TYPER_COMPLETE_FISH_ACTION=action, **more)
        assert done.stderr == ""
        return [offer.split("\t") for offer in done.stdout.splitlines()]

    assert "watch" in [offer[0] for offer in fish("ppocli ")]
    # long help is no further offer
    (key, meaning), = fish("ppocli train model.reference.k", COLUMNS="40", TERMINAL_WIDTH="40")
    assert (key, len(meaning) > 10) == ("model.reference.kind=", True)
    fish("ppocli train see", "is-args", code=0)
    fish("ppocli train reward.fn=my_rew", "is-args", code=1)


# --- scripts --------------------------------------------------------------------------------

@pytest.mark.parametrize(("shell", "part"), [
    ("bash", "complete -o default"), ("zsh", "#compdef ppocli"), ("fish", "complete --command")])
def test_the_script_of_each_shell_is_printed(shell, part, app):
    assert part in app("completion", shell, code=0).out


# --- a real bash ----------------------------------------------------------------------------

Tab = Callable[[str], str]


@pytest.fixture
def bash(runs: Path) -> Iterator[Tab]:
    """TAB in an interactive bash that has read the installed script: a line to its completion."""
    (runs / "bin").mkdir()
    command = runs / "bin/ppocli"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -m ppocli \"$@\"\n")
    command.chmod(0o755)
    (runs / ".bashrc").write_text(ppocli("completion", "bash", cwd=runs, code=0).stdout)
    (runs / "my_file.jsonl").write_text("")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [shutil.which("bash"), "--rcfile", str(runs / ".bashrc"), "-i"], cwd=runs,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment(HOME=str(runs), PATH=f"{runs}/bin:{os.environ['PATH']}", TERM="dumb",
                        PS1="", COLUMNS="1000", INPUTRC="/dev/null", HISTFILE="/dev/null"))
    os.close(theirs)
    seen = ""

    def send(keys: str, until: str) -> str:
        nonlocal seen
        seen = ""
        os.write(ours, keys.encode())
        while until not in seen:
            seen += os.read(ours, 4096).decode(errors="replace")
        return seen

    send("bind -x '\"\\C-g\": echo \"<<$READLINE_LINE>>\"'; echo rea''dy\n", "ready")

    def tab(line: str) -> str:
        text = send(f"{line}\t\x07", ">>")
        os.write(ours, b"\x15")  # an empty line again
        return text.rpartition("<<")[2].partition(">>")[0]

    yield tab
    os.close(ours)
    process.wait(timeout=30)


@pytest.mark.slow
def test_tab_in_bash(bash):
    """A blank follows what is whole; after ``KEY=`` none does."""
    for line, completed in (
            ("ppocli tr", "ppocli train "),
            ("ppocli train +recipe=im", "ppocli train +recipe=imdb_sentiment "),
            ("ppocli train +rec", "ppocli train +recipe="),
            ("ppocli train +recipe=", "ppocli train +recipe="),  # several
            ("ppocli train ppo.kl_estimator=a", "ppocli train ppo.kl_estimator=abs "),
            ("ppocli train model.path=b", "ppocli train model.path=builtin:"),
            ("ppocli train model.path=builtin:re", "ppocli train model.path=builtin:reviews "),
            ("ppocli train prompts.path=my_f", "ppocli train prompts.path=my_file.jsonl "),
            ("ppocli watch runs/n", "ppocli watch runs/newer "),
            ("ppocli watch old", "ppocli watch older "),
            ("ppocli recipes show quick", "ppocli recipes show quickstart "),
            ("ppocli completion z", "ppocli completion zsh "),
            ("ppocli report --format m", "ppocli report --format md "),
            ("ppocli eval runs/newer prompts.eval.lim",
             "ppocli eval runs/newer prompts.eval.limit="),
            ("seed=3; X=1 ppocli resume runs/o", "seed=3; X=1 ppocli resume runs/older ")):
        assert bash(line) == completed
