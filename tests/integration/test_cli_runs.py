"""``ppocli runs list`` and ``prune``: what is told of runs, and what may never be deleted."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers import environment, jsonl
from runs import Command, copied, whole_copy

from ppocli.errors import CheckpointError
from ppocli.runs.listing import carry_out, plan_pruning
from ppocli.runs.run_folder import lock
from ppocli.runs.target import find_target


@pytest.fixture
def runs(reference, here) -> Path:
    """A folder with a finished run, one that failed at once, one interrupted after a checkpoint,
    and one of a sweep; and things that are no runs."""
    root = here / "runs"
    whole_copy(reference, root / "done")
    failed = copied(reference, root / "failed", 0)
    (failed / "summary.json").write_text('{"status": "failed", "steps": 4}')
    shutil.rmtree(failed / "checkpoints")
    copied(reference, root / "cut", 2)
    whole_copy(reference, root / "sweep-1/0")
    (root / "notes").mkdir()
    (root / "notes/config.yaml").write_text("mine: true")
    (root / "paper.txt").write_text("mine")
    for number, name in enumerate(["failed", "cut", "sweep-1/0", "done"]):
        for path in (root / name).iterdir():
            os.utime(path, (1.7e9 + number, 1.7e9 + number))
    return root


@pytest.fixture
def typed(app) -> Command:
    return partial(app, "runs")


@pytest.fixture
def listed(typed) -> Callable[..., list[dict]]:
    return lambda *given: json.loads(typed("list", *given, "--json", code=0).out)


@pytest.fixture
def prune(app) -> Command:
    return lambda *given, code=0: app("runs", "prune", "--yes", *given, code=code)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*")) if path.name != ".lock"}


def test_the_list_of_runs(runs, listed):
    with lock(runs / "cut"):
        found = listed()
    assert [run["name"] for run in found] == ["done", "sweep-1/0", "cut", "failed"]
    assert [run["status"] for run in found] == ["finished", "finished", "running", "failed"]
    rows = jsonl(runs / "done/metrics.jsonl")
    done = found[0]
    assert (done["step"], done["total_steps"], done["pid"]) == (4, 4, None)
    assert found[2]["pid"] == os.getpid()
    assert done["reward_mean"] == rows[-1]["reward/mean"]
    best = max((row["eval/reward_mean"], -row["step"]) for row in rows if "eval/reward_mean" in row)
    assert (done["best"], done["best_step"]) == (best[0], -best[1])
    assert done["bytes"] == sum(p.stat().st_size for p in (runs / "done").rglob("*")
                                if p.is_file() and not p.is_symlink()
                                and "latest" not in p.parts and "best" not in p.parts)
    assert done["written"] == "2023-11-14T22:13:23+00:00"
    assert (done["model"], done["reward"]) == ("lm", "rewards.py:score")
    assert listed(runs / "sweep-1")[0]["name"] == "0"


def test_checkpoints_of_finished_runs_go_and_all_else_stays(runs, prune):
    (runs / "done/checkpoints/step-000009/policy").mkdir(parents=True)
    (runs / "done/checkpoints/.discarded-step-000001-1234").mkdir()
    (runs / "done/nonfinite-dump/step-000001").mkdir(parents=True)
    before = snapshot(runs)
    told = prune("--dry-run")
    assert snapshot(runs) == before
    assert [line.split()[0] for line in told.out.splitlines()[1:]] == ["done", "sweep-1/0"]
    assert told.err.endswith("could be given back; nothing was deleted.\n")
    prune()
    after = snapshot(runs)
    assert after.keys() <= before.keys()
    gone = {name.split("/checkpoints/")[0] for name in before.keys() - after.keys()}
    assert gone == {"done", "sweep-1/0", "done/nonfinite-dump", "done/nonfinite-dump/step-000001"}
    assert os.listdir(runs / "done/checkpoints") == []
    assert all(after[name] == before[name] for name in after.keys() & before.keys())
    assert "There is nothing to delete in runs." in prune().err


def test_the_best_checkpoint_can_stay(runs, prune):
    best = os.readlink(runs / "done/checkpoints/best")
    prune("--keep-best")
    assert sorted(os.listdir(runs / "done/checkpoints")) == ["best", best]
    assert find_target("done", say=print, best=True).step == int(best.removeprefix("step-"))


def but_log(folder):
    """What is in a run's folder, but for the lines of its log."""
    return {name: what for name, what in snapshot(folder).items() if name != "ppocli.log"}


@pytest.mark.slow
def test_a_pruned_run_still_loads_and_says_why_it_cannot_go_on(runs, prune, command):
    prune()
    target = find_target("done", say=print)
    assert (target.step, target.model) == (4, str(runs / "done/model"))
    before = but_log(runs / "done")
    assert "No valid checkpoint" in command("resume=runs/done", "ppo.num_steps=9", code=5).err
    assert command("resume=runs/done").code == 0  # nothing left to do
    assert but_log(runs / "done") == before


def test_a_run_that_began_again_after_the_plan_is_left_alone(runs):
    plan = {removal.run.name: removal for removal in plan_pruning(runs)}
    with lock(runs / "done"), pytest.raises(CheckpointError, match="is in use by process"):
        carry_out(plan["done"])
    os.utime(runs / "done/metrics.jsonl")
    with pytest.raises(CheckpointError, match="has been written to meanwhile and is left alone"):
        carry_out(plan["done"])
    shutil.rmtree(runs / "sweep-1")
    carry_out(plan["0"])
    assert not (runs / "sweep-1").exists()
    assert (runs / "done/checkpoints/step-000004").exists()


def test_a_run_on_another_machine_is_left_alone(runs, prune):
    (runs / "done/.lock").write_text(json.dumps({
        "pid": 1, "host": "elsewhere", "boot": "b", "started": 1}))
    assert "it may be running on elsewhere (.lock says so)" in prune().err
    assert (runs / "done/checkpoints/step-000004").exists()


def test_links_are_left_alone(runs, prune, here):
    elsewhere = whole_copy(runs / "done", here / "elsewhere/kept")
    (runs / "link").symlink_to(elsewhere)
    shutil.move(runs / "done/checkpoints", here / "big")
    (runs / "done/checkpoints").symlink_to(here / "big")
    before = snapshot(here / "big")
    prune()
    assert (elsewhere / "checkpoints/step-000004").exists()
    assert snapshot(here / "big") == before


def test_only_old_ones(runs, prune):
    os.utime(runs / "done/metrics.jsonl")
    prune("--older-than", "1d")
    assert (runs / "done/checkpoints/step-000004").exists()
    assert not (runs / "sweep-1/0/checkpoints/step-000004").exists()
    assert "--older-than 7 weeks: must be a number with s, min, h, d or w" in prune(
        "--older-than", "7 weeks", code=2).err


def test_without_a_terminal_yes_is_needed(runs, typed):
    assert "add --yes" in typed("prune", code=2).err
    assert (runs / "done/checkpoints/step-000004").exists()


@pytest.mark.slow
def test_on_a_terminal_it_asks(runs):
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "ppocli", "runs", "prune"], cwd=runs.parent,
                               stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment(), text=True)
    try:
        os.close(theirs)
        os.write(ours, b"\n")
        _, err = process.communicate(timeout=60)
    finally:
        os.close(ours)
    assert process.returncode == 0
    assert "? [y/N]" in err
    assert (runs / "done/checkpoints/step-000004").exists()
    assert "Nothing was deleted." in err


# -------------------------------------------------------------- show; commands that are gone


def test_one_run_is_shown_and_its_command_trains_it_again(runs, typed):
    facts = json.loads(typed("show", "done", "--json", code=0).out)
    assert facts["checkpoints"] == [str(runs / f"done/checkpoints/step-{step:06d}")
                                    for step in (1, 2, 3, 4)]
    shown = typed("show", "done", code=0).out
    assert shown.endswith(facts["command"] + "\n")
    assert "checkpoints  step-000001, step-000002" in shown
