"""Completion: what is offered, Typer's protocols for three shells, and TAB in a real bash."""

import os
from pathlib import Path

import pytest
from helpers import ppocli

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
    ([], "eval.at_start=", ["eval.at_start=true", "eval.at_start=false"]),
    ([], "model.path=b", [f"model.path=builtin:{name}" for name in (
        "reviews", "randomwalks", "guess-number", "calculator")]),
    ([], "reward.fn=key", ["reward.fn=keyword"]),
    ([], "resume=", ["resume=never", "resume=auto", "resume=runs/newer", "resume=runs/older"]),
    # as bash breaks words
    (["+recipe", "="], "h", ["hh_ppo", "hh_reward", "hh_sft"]),
    (["model.path", "=", "builtin"], ":", [
        ":reviews", ":randomwalks", ":guess-number", ":calculator"]),
    (["seed", "=", "1", "model", "="], "re", ["reviews"]),
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

    (key, meaning), = fish("ppocli train model.reference.k")
    assert (key, len(meaning) > 10) == ("model.reference.kind=", True)
    fish("ppocli train reward.fn=my_rew", "is-args", code=1)


# --- scripts --------------------------------------------------------------------------------

@pytest.mark.parametrize(("shell", "part"), [
    ("bash", "complete -o default"), ("zsh", "#compdef ppocli"), ("fish", "complete --command")])
def test_the_script_of_each_shell_is_printed(shell, part, app):
    assert part in app("completion", shell, code=0).out


# --- a real bash ----------------------------------------------------------------------------
