"""``ppocli train`` on real pseudo terminals: the live view, a window that changes, Ctrl-C."""

import re
from pathlib import Path

import pytest
from helpers import read_json, stable_rows
from runs import STEPS, words
from terminal import Terminal

from ppocli.cli.output import print_table

PRINTING = '''

def printing(outputs, **columns):
    print("the reward speaks")
    return plain(outputs)
'''


def pane(lines: list[str]) -> list[str]:
    """The rows of the live view, the last ones of the screen."""
    starts = [at for at, line in enumerate(lines) if line.startswith("── training")]
    return lines[starts[-1]:] if starts else []


def test_the_live_view_of_a_run(reference, world: Path):
    """The numbers are those of a run that was piped; nothing of the view is left at the end."""
    with Terminal("train", *words("run_name=r", stateful=True), cwd=world,
                  PPOCLI_FAULTS="score.before@10:sleep=2") as terminal:
        screen = terminal.screen
        # a screen is written in pieces: the first rows may stand there without the others
        terminal.wait_for(lambda: all(part in "\n".join(pane(screen.lines)) for part in (
            "step 2/4", "── training r ──", "reward  ", "KL  ", "now     ", "samples of step",
            " │ ", " left, ", " so far")))
        assert terminal.end() == 0
    said = screen.lines
    assert not [line for line in said if "── training" in line or " so far" in line], said
    assert [line for line in said if re.match(r"step \d/4 ", line)] == sorted(
        line for line in said if line.startswith("step "))
    assert sum(line.startswith("step ") for line in said) == STEPS
    assert any("before and after" in line for line in said)
    assert "".join(said).rstrip().endswith(str(world / "runs/r/model")), "it may take two lines"
    assert screen.unknown == set()  # no hidden cursor, no other screen
    assert stable_rows(world / "runs/r/metrics.jsonl") == stable_rows(reference / "metrics.jsonl")


@pytest.mark.slow
def test_ctrl_c_prints_below_the_view_which_is_gone(world: Path):
    """A reward that prints does so above it; colours are off."""
    with (world / "rewards.py").open("a") as file:
        file.write(PRINTING)
    with Terminal("--no-color", "train", *words("run_name=r", "reward.fn=rewards.py:printing",
                                                  "ppo.num_steps=2000"), cwd=world) as terminal:
        screen = terminal.screen
        # any step but the first: a busy machine may show none in particular
        terminal.wait_for(lambda: any(re.search(r"step [1-9]\d*/2000", line)
                                      for line in pane(screen.lines)))
        rows = pane(screen.lines)
        above = screen.lines[:-len(rows)]
        assert "the reward speaks" in above
        assert not any("── training" in line for line in above)
        terminal.type(b"\x03")
        assert terminal.end() == 130
    said = [line for line in screen.lines if line]
    at = next(number for number, line in enumerate(said) if "Stopped: stopped by SIGINT" in line)
    assert "resume with: ppocli resume" in " ".join(said[at:])
    assert len(said) - at <= 4
    assert not any("── training" in line for line in said)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.raw), "colours"
    assert read_json(world / "runs/r/summary.json")["status"] == "stopped"


@pytest.mark.parametrize(("columns", "heading"), [
    (42, "run name    status    step  reward  an age"),
    (24, "run name    status    s…")])
def test_lines_of_a_table_are_cut_to_the_width(columns, heading, monkeypatch, capsys):
    rows = [("run name", "status", "step", "reward", "an age"),
            ("a-long-one", "finished", "1/4", "0.5", "4 min")]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(rows)
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= columns
    assert printed[0] == heading
