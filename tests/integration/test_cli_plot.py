"""``ppocli plot``: figures by name, smoothing, pictures, and what a terminal can show."""

import json
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import jsonl, ppocli, write_jsonl
from runs import Command, imported_by, whole_copy

from ppocli.publish.curves import smoothed


@pytest.fixture
def runs(reference, here) -> Path:
    """The current folder, with two runs in it."""
    whole_copy(reference, here / "runs/one")
    other = whole_copy(reference, here / "runs/other")
    write_jsonl(other / "metrics.jsonl", (
        {**row, "lr": 7.0} for row in jsonl(other / "metrics.jsonl")))
    return here


@pytest.fixture
def plot(runs, app) -> Command:
    return partial(app, "plot")


@pytest.mark.slow
def test_the_newest_run_is_drawn_in_dots_as_wide_as_the_terminal(runs):
    done = ppocli("plot", cwd=runs, COLUMNS="60", PYTHONIOENCODING="utf-8", code=0)
    assert done.stderr.startswith("using runs/")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("reward/mean of ")
    assert "objective/kl of " in done.stdout
    assert max(map(len, lines)) == 60
    assert any(0x2800 < ord(letter) <= 0x28FF for letter in done.stdout)
    assert "\x1b" not in done.stdout


def test_json_has_the_points_of_the_run(runs, plot):
    done = plot("one", "--metric", "reward,eval,policy/grad_norm", "--json", code=0)
    rows = jsonl(runs / "runs/one/metrics.jsonl")
    for each, name in zip(json.loads(done.out)["series"],
                          ["reward/mean", "eval/reward_mean", "policy/grad_norm"], strict=True):
        there = [row for row in rows if row.get(name) is not None]
        assert each == {"run": "one", "metric": name, "steps": [row["step"] for row in there],
                        "values": [row[name] for row in there]}
        assert len(there) >= 3


def test_runs_lie_over_one_another_with_a_legend(plot):
    out = plot("one", "runs/other", "--metric", "lr", code=0).out
    assert out.startswith("lr\n")
    assert out.endswith("  * one\n  o other\n")
    assert out.splitlines()[1].lstrip().startswith("7┤oooo")


def test_smoothing_is_a_mean_over_steps():
    points = [(0, 8.0), (1, 2.0), (2, 4.0), (5, 6.0)]
    assert smoothed(points, 1) == points
    assert smoothed(points, 2) == [(0, 8.0), (1, 5.0), (2, 3.0), (5, 6.0)]
    assert smoothed(points, 4) == [(0, 8.0), (1, 5.0), (2, 14 / 3), (5, 5.0)]


def test_svg_draws_evaluations_over_the_rollouts_of_each_figure(plot):
    done = plot("one", "other", "-m", "reward,lr", "--smooth", 2, "--output", "new/a.svg", code=0)
    assert done.out == "new/a.svg\n"
    texts = [(e.text or "").strip() for e in ElementTree.parse("new/a.svg").getroot().iter(
        "{http://www.w3.org/2000/svg}text")]
    for text, times in (("reward/mean, mean of 2 steps", 1), ("lr, mean of 2 steps", 1),
                        ("one", 2), ("other", 2), ("one, evaluation", 1), ("step", 2)):
        assert texts.count(text) == times, text


def test_a_place_that_can_not_be_written_is_told(plot):
    Path("file").write_text("")
    done = plot("one", "--output", "file/b/a.png", code=6)
    assert done.out == ""
    assert done.err.splitlines()[-1].startswith("  fix:   choose a")


def test_png(runs, plot):
    whole_copy(runs / "runs/one", runs / "runs/_日本 $x$")
    assert plot("one", "_日本 $x$", "--output", "a.png", code=0).said == "a.png\n"
    assert Path("a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_pictures_without_matplotlib_name_the_extra(plot, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'ppocli[plot]'" in plot("one", "--output", "a.png", code=3).err
    assert not Path("a.png").exists()


@pytest.mark.parametrize(("given", "said"), [
    ("--metric rewrd", "--metric rewrd: there is no such figure in these runs; did you mean "
                       "reward?"),
    ("--output a.gif", "a.gif must end in .svg or .png")])
def test_wrong_options(plot, given, said):
    done = plot("one", *given.split(), code=2)
    assert said in done.err
    assert done.out == ""


def test_what_only_reads_loads_no_torch(runs):
    code = ("from ppocli.cli import results, runs\n"
            "runs.watch('one', interval=1, from_start=True, plain=True, as_json=False)\n"
            "runs.report('one', None, None, False, False)\n"
            "results.plot_runs(['one'], metric='lr', smooth=1, out=None, overwrite=False, "
            "as_json=True)\n"
            "results.compare(['one', 'other'], True)\nruns.print_runs(None, True)")
    assert not {"torch", "transformers", "matplotlib"} & imported_by(code, runs)
