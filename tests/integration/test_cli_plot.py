"""``ppocli plot``: figures by name, smoothing, pictures, and what a terminal can show."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import environment, jsonl, ppocli
from runs import whole_copy

from ppocli.cli.output import code_of
from ppocli.cli.plot import plot_runs
from ppocli.report.curves import smoothed


@pytest.fixture
def runs(reference, tmp_path, monkeypatch) -> Path:
    """The current folder, with two runs in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    whole_copy(reference, tmp_path / "runs/one")
    other = whole_copy(reference, tmp_path / "runs/other")
    rows = jsonl(other / "metrics.jsonl")
    for row in rows:
        row["lr"] = 7.0
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def plot(capsys, *given: str, metric: str = "reward,kl", smooth: int = 1, out: str | None = None,
         overwrite: bool = False, as_json: bool = False) -> tuple[int, str, str]:
    code = code_of(lambda: plot_runs(given, metric=metric, smooth=smooth,
                                     out=None if out is None else Path(out), overwrite=overwrite,
                                     as_json=as_json))
    return (code, *capsys.readouterr())


def test_the_newest_run_is_drawn_in_dots_as_wide_as_the_terminal(runs):
    done = ppocli("plot", cwd=runs, COLUMNS="60", PYTHONIOENCODING="utf-8", code=0)
    assert done.stderr.startswith("using runs/")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("reward/mean of ")
    assert "objective/kl of " in done.stdout
    assert max(map(len, lines)) == 60
    assert any(0x2800 < ord(letter) <= 0x28FF for letter in done.stdout)
    assert "\x1b" not in done.stdout


def test_an_encoding_without_braille_gets_ascii(runs):
    done = ppocli("plot", "runs/one", "--metric", "lr", cwd=runs, PYTHONIOENCODING="ascii", code=0)
    assert done.stdout.isascii()
    assert "\\u" not in done.stdout
    assert "*" in done.stdout


def test_json_has_the_points_of_the_run(runs, capsys):
    code, out, _ = plot(capsys, "one", metric="reward,eval,policy/grad_norm", as_json=True)
    rows = jsonl(runs / "runs/one/metrics.jsonl")
    assert code == 0
    for each, name in zip(json.loads(out)["series"],
                          ["reward/mean", "eval/reward_mean", "policy/grad_norm"], strict=True):
        there = [row for row in rows if row.get(name) is not None]
        assert each == {"run": "one", "metric": name, "steps": [row["step"] for row in there],
                        "values": [row[name] for row in there]}
        assert len(there) >= 3


def test_runs_lie_over_one_another_with_a_legend(runs, capsys):
    code, out, _ = plot(capsys, "one", "runs/other", metric="lr")
    assert code == 0
    assert out.startswith("lr\n")
    assert out.endswith("  * one\n  o other\n")
    assert out.splitlines()[1].lstrip().startswith("7┤oooo")


def test_smoothing_is_a_mean_over_steps():
    points = [(0, 8.0), (1, 2.0), (2, 4.0), (5, 6.0)]
    assert smoothed(points, 1) == points
    assert smoothed(points, 2) == [(0, 8.0), (1, 5.0), (2, 3.0), (5, 6.0)]
    assert smoothed(points, 4) == [(0, 8.0), (1, 5.0), (2, 14 / 3), (5, 5.0)]


def test_svg_holds_a_chart_for_each_figure(runs, capsys):
    code, out, _ = plot(capsys, "one", "other", metric="reward,lr", smooth=2, out="new/a.svg")
    assert (code, out) == (0, "new/a.svg\n")
    root = ElementTree.parse("new/a.svg").getroot()
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["reward/mean, mean of 2 steps", "lr, mean of 2 steps"]
    assert (root.get("width"), root.get("height")) == ("640", "480")
    code, _, _ = plot(capsys, "one", metric="lr", out="b.svg")
    assert ElementTree.parse("b.svg").getroot().get("height") == "240"


@pytest.mark.parametrize("out", ["file/a.svg", "file/b/a.png", "/proc/a.svg", f"{'n' * 300}.svg"])
def test_a_place_that_can_not_be_written_is_told(runs, capsys, out):
    Path("file").write_text("")
    code, said, err = plot(capsys, "one", metric="lr", out=out)
    assert (code, said) == (6, "")
    assert err.startswith("Error: ")
    assert err.endswith("name a file on another disk or in another folder: --out FILE\n")


def test_png(runs, capsys):
    whole_copy(runs / "runs/one", runs / "runs/_日本 $x$")
    code, out, err = plot(capsys, "one", "_日本 $x$", out="a.png")
    assert (code, out, err) == (0, "a.png\n", "")
    assert Path("a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_png_without_matplotlib_names_the_extra(runs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = plot(capsys, "one", out="a.png")
    assert (code, out) == (2, "")
    assert err == ("Error: Drawing a .png needs matplotlib, which is not installed.\n"
                   "  where: --out\n"
                   "  fix:   pip install 'ppocli[plot]'; or write a .svg, which needs nothing\n")
    assert not Path("a.png").exists()


def test_nothing_is_overwritten_without_being_told(runs, capsys):
    Path("a.svg").write_text("mine")
    code, _, err = plot(capsys, "one", out="a.svg")
    assert code == 2
    assert err == ("Error: a.svg exists already; nothing is overwritten.\n  where: --out\n"
                   "  fix:   choose another name, or add --overwrite\n")
    assert Path("a.svg").read_text() == "mine"
    assert plot(capsys, "one", out="a.svg", overwrite=True)[0] == 0
    assert Path("a.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(("given", "said"), [
    ({"metric": "rewrd"}, "--metric rewrd: there is no such figure in these runs; did you mean "
                          "reward?"),
    ({"metric": "objective/k"}, "did you mean objective/kl"),
    ({"smooth": 0}, "--smooth 0: must be at least 1"),
    ({"out": "a.gif"}, "--out a.gif: must end in .svg or .png")])
def test_wrong_options(runs, capsys, given, said):
    code, out, err = plot(capsys, "one", **given)
    assert (code, out) == (2, "")
    assert said in err
    if "metric" in given:
        assert ("choose of: reward, kl, length, entropy, clip, lr, loss, eval; or by full name: "
                in err)


def test_no_run_and_no_figures(runs, capsys):
    code, _, err = plot(capsys, "onee")
    assert code == 3
    assert "onee does not exist" in err
    assert "did you mean one" in err
    Path("runs/one/metrics.jsonl").write_text("")
    code, _, err = plot(capsys, "one")
    assert code == 3
    assert "There are no figures in one.\n" in err
    assert "it ended without a row" in err
    from ppocli.storage.run_folder import lock

    with lock(Path("runs/one").absolute()):
        code, _, err = plot(capsys, "one")
    assert code == 3
    assert "There are no figures in one yet.\n" in err
    assert "wait for the first step" in err


def test_parts_of_a_run_stand_for_it_and_equal_names_are_told_apart(runs, capsys):
    whole_copy(runs / "runs/one", runs / "elsewhere/one")
    code, out, _ = plot(capsys, "runs/one/checkpoints/step-000002/policy", "elsewhere/one/model",
                        "runs/one", metric="lr", as_json=True)
    assert code == 0
    assert [each["run"] for each in json.loads(out)["series"]] == ["runs/one", "elsewhere/one"]


def test_what_only_reads_loads_no_torch(runs):
    code = ("import sys; from ppocli.cli import plot, runs\n"
            "runs.watch('one', interval=1, from_start=True, plain=True, as_json=False)\n"
            "runs.report('one', None, None, False, False)\n"
            "plot.plot_runs(['one'], metric='lr', smooth=1, out=None, overwrite=False, "
            "as_json=True)\n"
            "runs.compare(['one', 'other'], True)\nruns.print_runs(None, True)\n"
            "print({'torch', 'transformers', 'matplotlib'} & set(sys.modules), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, env=environment(), text=True,
                          capture_output=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "set()")
