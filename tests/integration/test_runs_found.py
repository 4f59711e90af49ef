"""Runs by folder and by name, and folders that are damaged, unreadable or not what was meant."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment
from runs import copied, whole_copy

from ppocli.cli.follow import find_watched
from ppocli.cli.output import code_of
from ppocli.cli.plot import plot_runs
from ppocli.cli.runs import compare, print_runs, report, watch
from ppocli.cli.train import resume_words, show_sweep
from ppocli.errors import CheckpointError, InputError
from ppocli.runs import target
from ppocli.runs.record import read_run
from ppocli.storage.retention import note_removed


@pytest.fixture
def here(reference, tmp_path, monkeypatch) -> Path:
    """The current folder, with a run and a sweep of one job below ``runs``."""
    monkeypatch.chdir(tmp_path)
    whole_copy(reference, tmp_path / "runs/done")
    whole_copy(reference, tmp_path / "runs/kl/0")
    (tmp_path / "runs/kl/sweep.json").write_text('{"words": [], "jobs": []}')
    return tmp_path


@pytest.mark.parametrize("name", ["done", "kl/0"])
def test_every_command_takes_the_name_that_the_list_shows(here, name):
    assert target.find_run(name, say=print) == Path("runs", name)
    assert target.find_target(name, say=print).run_dir == here / "runs" / name
    assert find_watched(name, print) == (here / "runs" / name, f"runs/{name}")
    assert resume_words(name, ["seed=1"]) == [f"resume=runs/{name}", "seed=1"]


def test_a_path_is_no_name(here, monkeypatch):
    for given in ("./done", "../done", f"{here}/done"):
        with pytest.raises(InputError, match="does not exist"):
            target.find_run(given, say=print)
        assert resume_words(given, []) == [f"resume={Path(given)}"]
    (here / "done").mkdir()  # what lies in the current folder comes first
    assert resume_words("done", []) == ["resume=done"]
    with pytest.raises(InputError, match="x does not exist"):
        target.find_run("x" * 300, say=print)


def test_hints_name_jobs_of_sweeps_as_the_list_does(here):
    with pytest.raises(InputError, match=r"did you mean kl/0\?"):
        target.find_run("kl/O")
    with pytest.raises(InputError, match=r"did you mean kl/0\?"):
        find_watched("kl/O", print)


@pytest.mark.parametrize(("given", "fix"), [
    ("nope", "name one of runs/kl"), ("runs/kk", "runs/kl; did you mean runs/kl?"),
    ("runs/kl/0", "it is a job of a sweep: name runs/kl"),
    ("kl/0", "it is a job of a sweep: name runs/kl")])
def test_what_is_no_sweep_leads_to_those_that_are(here, capsys, given, fix):
    assert code_of(lambda: show_sweep(given, "reward", False)) == 5
    err = capsys.readouterr().err
    assert err.startswith(f"Error: {given} is no sweep (it holds no sweep.json).\n")
    assert fix in err


def test_commands_that_take_runs_only_propose_runs_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (lambda: report(None, None, None, False, False),
                    lambda: plot_runs([], metric="reward", smooth=1, out=None, overwrite=False,
                                      as_json=False)):
        assert code_of(command) == 2
        assert ("  fix:   name a run's folder; or train one first: ppocli train "
                "+recipe=quickstart\n") in capsys.readouterr().err


def test_a_run_whose_checkpoints_were_pruned_says_so(here):
    shutil.rmtree(here / "runs/done/checkpoints")
    (here / "runs/done/checkpoints").mkdir()
    note_removed(here / "runs/done/checkpoints")
    with pytest.raises(CheckpointError, match="deleted by ppocli runs prune") as refused:
        target.find_target("done", say=print, checkpoint=True)
    assert refused.value.fix == "name its model, which is still there: runs/done/model"


# ------------------------------------------------------------------------------------ damage

LOOK = """
import sys
from pathlib import Path
from ppocli.cli.follow import find_watched
from ppocli.cli.runs import compare, print_runs, prune_runs
from ppocli.cli.train import show_sweep
from ppocli.runs.target import find_run
try:
    list(Path("runs/shut").iterdir())
    sys.exit("it can be read")
except PermissionError:
    pass
print_runs(None, False)
prune_runs(None, checkpoints=True, failed=True, keep_best=False, older_than=None, dry_run=True,
           yes=False, as_json=False)
show_sweep(None, "reward", False)
find_watched(None, print)
find_run(None, say=print)
compare(["done", "kl/0"], False)
"""


def test_folders_that_cannot_be_read_are_passed_over(here):
    for name in ("shut", "done/eval", "kl/1"):
        (here / "runs" / name).mkdir(mode=0, exist_ok=True)
    copied(here / "runs/kl/0", here / "runs/closed", 2)
    (here / "runs/closed").chmod(0)
    whole_copy(here / "runs/kl/0", here / "runs/half")
    (here / "runs/half/checkpoints").chmod(0)
    powers = []
    if os.geteuid() == 0:  # whom a mode doesn't stop
        if shutil.which("setpriv") is None:
            pytest.skip("root can read every folder, and setpriv is missing")
        powers = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]
    done = subprocess.run([*powers, sys.executable, "-c", LOOK], cwd=here, env=environment(),
                          text=True, capture_output=True, check=False)
    for name in ("shut", "done/eval", "kl/1", "closed", "half/checkpoints"):
        (here / "runs" / name).chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "runs/half is left alone: it can't be read: Permission denied\n" in done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()[1:4]} == {"done", "half", "kl/0"}
    assert "closed" not in done.stdout + done.stderr


def test_a_damaged_summary_and_damaged_rows_spoil_no_list(here, capsys):
    run = here / "runs/done"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1].update({"episode": "many", "reward/mean": [1], "time/step": "long",
                     "val/ratio": 10 ** 400})
    rows += [{"step": "five"}, {"step": [5]}, {"step": None}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "summary.json").write_text('{"status": "finished", "steps": "four", "best": 3}')
    record = read_run(run)
    assert (record.status, record.step, record.episodes) == ("interrupted", 4, 0)
    assert record.series("val/ratio")[-1][0] == 3
    for command in (lambda: print_runs(None, False),
                    lambda: compare(["done", "kl/0"], True),
                    lambda: report("done", None, None, False, False),
                    lambda: target.find_target("done", say=print),
                    lambda: watch("done", interval=0.1, from_start=False, plain=True,
                                  as_json=False)):
        assert code_of(command) == 0, capsys.readouterr().err


def test_a_step_that_was_saved_without_a_row_counts(here, capsys):
    """As a stop in the evaluation of a step leaves it."""
    run = here / "runs/done"
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "stopped"}))
    record = read_run(run)
    assert (record.status, record.step) == ("stopped", 4)
    assert (record.episodes, record.updates) == (summary["episodes"], summary["updates"])
    assert code_of(lambda: print_runs(None, True)) == 0
    assert {row["name"]: row["step"] for row in json.loads(capsys.readouterr().out)} == {
        "done": 4, "kl/0": 4}
    assert code_of(lambda: report("done", None, None, False, True)) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["episodes"]) == (4, summary["episodes"])
    assert told["sentence"] == "Stopped at step 4 of 4."
