"""Which run is meant by a folder, a path or a name; names that are taken, and run folders that are
damaged."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import jsonl, save_lm
from runs import spawn, wait_for, whole_copy, words

from ppocli.cli.follow import find_watched
from ppocli.cli.train import resume_words
from ppocli.errors import CheckpointError, InputError
from ppocli.runs.record import read_run
from ppocli.runs.target import find_run, find_target


@pytest.fixture
def place(reference, here) -> Path:
    """The current folder, with a run and a sweep of one job below ``runs``."""
    whole_copy(reference, here / "runs/done")
    whole_copy(reference, here / "runs/kl/0")
    (here / "runs/kl/sweep.json").write_text('{"words": [], "cwd": "", "jobs": []}')
    return here


@pytest.mark.parametrize("name", ["done", "kl/0"])
def test_every_command_takes_the_name_that_the_list_shows(place, name):
    assert find_run(name, say=print) == Path("runs", name)
    assert find_target(name, say=print).run_dir == place / "runs" / name
    assert find_watched(name) == Path("runs", name)
    assert resume_words(name, ["seed=1"]) == [f"resume=runs/{name}", "seed=1"]


def test_a_path_is_no_name(place, monkeypatch):
    for given in ("./done", "../done", f"{place}/done"):
        with pytest.raises(InputError, match="does not exist"):
            find_run(given, say=print)
        with pytest.raises(CheckpointError, match="There is no run"):
            resume_words(given, [])


@pytest.fixture
def twice(place) -> Path:
    """The current folder with ``./lm``, a model, and ``runs/lm``, trained from it."""
    save_lm(place / "lm")
    return (place / "runs/done").rename(place / "runs/lm")


def test_a_name_of_a_path_and_of_a_run_is_refused(twice, app):
    assert "write ./lm or runs/lm" in app("export", "lm", code=2).err
    assert find_run("lm") == Path("runs/lm")  # ./lm is no run that could be reported on
    assert find_target("./lm", say=print).run_dir is None
    shutil.rmtree("lm")
    Path("lm").symlink_to(twice)
    assert find_target("lm", say=print).run_dir == twice  # both are one


def test_near_names_are_told_before_anything_loads(place, app):
    assert "There is no run don; did you mean done?" in app("resume", "don", code=5).err
    assert "did you mean base?" in app("eval", "done", "--against", "bse", code=3).err


def test_what_is_no_sweep_leads_to_those_that_are(place, app):
    err = app("sweep", "show", "runs/kk", code=5).err
    assert err.startswith("Error: runs/kk is no sweep (it holds no sweep.json).\n")
    assert "did you mean runs/kl?" in err


def test_without_any_run_the_first_is_proposed(here, app):
    for name in ("plot", "watch"):
        assert "ppocli train +recipe=quickstart" in app(name, code=2).err


# ------------------------------------------------------------------------------------ damage


def test_a_damaged_summary_and_damaged_rows_spoil_no_list(place, app):
    run = place / "runs/done"
    rows = jsonl(run / "metrics.jsonl")
    rows[-1].update({"episode": "many", "reward/mean": [1], "time/step": "long",
                     "val/ratio": 10 ** 400})
    rows += [{"step": "five"}, {"step": [5]}, {"step": None}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "summary.json").write_text('{"status": "finished", "steps": "four", "best": 3}')
    record = read_run(run)
    assert (record.status, record.step, record.episodes) == ("interrupted", 4, 0)
    assert record.series("val/ratio")[-1][0] == 3
    for given in (["runs", "list"], ["compare", "done", "kl/0"], ["report", "done"],
                  ["watch", "done", "--no-progress"]):
        app(*given, code=0)
    assert find_target("done", say=print).step == 4


def test_a_run_that_is_going_on_is_named_with_its_process(command, validate, world):
    (world / "slow.py").write_text("import time\n\ndef score(outputs):\n    time.sleep(300)\n")
    typed = words("run_name=r", "reward.fn=slow.py:score")
    process = spawn("train", *typed, cwd=world)
    try:
        wait_for((world / "runs/r/run.json").is_file, process)
        for each, given in ((command, typed), (command, [*typed, "resume=auto"]),
                            (validate, ["resume=runs/r"])):
            assert f"runs/r is running (pid {process.pid} on " in each(*given, code=5).err
    finally:
        process.kill()
        process.communicate()
