"""``ppocli sweep show`` and ``resume``: what run folders say of jobs, and jobs that are kept."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers import jsonl, read_json
from runs import Command, copied, run, spawn, wait_for, whole_copy, words

from ppocli.cli import sweep_jobs as module
from ppocli.cli.job import Process
from ppocli.config.command_words import read_words
from ppocli.config.compose import compose
from ppocli.config.config_yaml import read_config
from ppocli.runs.run_folder import live_owner, lock, write_config
from ppocli.runs.sweeps import SweepRecord, read_sweep, write_sweep

GRID = tuple((f"seed={seed}", f"ppo.init_kl_coef={coef}") for seed in (0, 1) for coef in (0.1, 0.2))


def varied(run_dir: Path, number: int) -> Path:
    """Give a run the values of a job."""
    config = read_config(run_dir / "config.yaml")
    write_config(replace(config, seed=number // 2, ppo=replace(
        config.ppo, init_kl_coef=(0.1, 0.2)[number % 2])), run_dir / "config.yaml")
    return run_dir


@pytest.fixture
def sweep(reference, world) -> Path:
    """A sweep over two keys: finished, never begun, killed, never begun."""
    folder = world / "runs/sweep-1"
    varied(whole_copy(reference, folder / "0"), 0)
    varied(copied(reference, folder / "2", 2), 2)
    shared = [word for word in words(stateful=True) if not word.startswith("seed")]
    write_sweep(SweepRecord(folder, ("-m", *shared, "seed=0,1", "ppo.init_kl_coef=0.1,0.2"),
                            str(world), GRID))
    return folder


@pytest.fixture
def show(app) -> Command:
    return partial(app, "sweep", "show")


@pytest.fixture
def shown(show) -> Callable[..., dict]:
    """The newest sweep or that of a name, in order of its jobs."""
    return lambda *name, sort="job": json.loads(show(*name, "--sort", sort, "--json", code=0).out)


@pytest.fixture
def resume(app) -> Command:
    return partial(app, "sweep", "resume")


def test_the_state_of_each_job_is_that_of_its_run_folder(sweep, show, shown):
    jobs = shown()["jobs"]
    assert [job["status"] for job in jobs] == ["finished", "planned", "interrupted", "planned"]
    assert [job["step"] for job in jobs] == [4, None, 4, None]
    assert jobs[0]["figures"]["reward"] == jsonl(sweep / "0/metrics.jsonl")[-1]["eval/reward_mean"]
    assert jobs[3]["varied"] == {"seed": "1", "ppo.init_kl_coef": "0.2"}
    with lock(sweep / "2"):
        assert shown("sweep-1")["jobs"][2]["status"] == "running"
    ended = show("--sort", "job", code=0)
    lines = ended.out.splitlines()
    assert lines[1].split()[:3] == ["0", "finished", "4/4"]
    assert ended.err.startswith("using runs/sweep-1 (the newest sweep)\n")
    assert ended.err.endswith("3 of 4 jobs are not finished; go on with: ppocli sweep resume "
                              "runs/sweep-1\n")
    (sweep / "0").rename(sweep / "away")
    assert shown("runs/sweep-1")["jobs"][0]["status"] == "planned"


def test_the_best_job_comes_first(sweep, shown, reference):
    for number in (1, 3):
        varied(whole_copy(reference, sweep / str(number)), number)
    for number, reward, kl in ((0, 0.1, 3.0), (1, 0.4, 1.0), (3, 0.2, 2.0)):
        (sweep / str(number) / "metrics.jsonl").write_text(json.dumps(
            {"step": 4, "episode": 48, "eval/kl_mean": kl, "eval/reward_mean": reward}) + "\n")
    (sweep / "2/metrics.jsonl").write_text("")
    result = shown(sort="best")
    assert [job["job"] for job in result["jobs"]] == [1, 3, 0, 2]


def test_no_sweep(world, show):
    assert "There is no sweep in runs yet." in show(code=2).err
    Path("sweep.json").write_text('{"jobs": 3}')
    assert "sweep.json is damaged" in show(".", code=5).err


@pytest.mark.parametrize(("more", "message"), [
    (["run_name=x"], "run_name can't be changed"),
    (["seed=4"], "The words no longer give the jobs of this sweep.")])
def test_words_that_would_make_another_sweep_are_refused(sweep, resume, more, message):
    before = (sweep / "sweep.json").read_bytes()
    assert message in resume("runs/sweep-1", *more, code=2).err
    assert (sweep / "sweep.json").read_bytes() == before


def test_a_sweep_that_still_runs_is_refused_and_one_that_exists_is_not_replaced(sweep, resume,
                                                                               command):
    with lock(sweep):
        assert f"process {os.getpid()} on " in resume(sweep, code=5).err
    with lock(sweep / "2"):
        assert f"Job 2 of the sweep in {sweep} is still running" in resume(sweep, code=5).err
    before = (sweep / "sweep.json").read_bytes()
    ended = command("-m", *words("seed=1,2", "hydra.sweep.dir=runs/sweep-1"), code=5)
    assert f"{sweep} holds a sweep already; nothing is overwritten." in ended.err
    assert f"go on with it: ppocli sweep resume {sweep}" in ended.err
    assert (sweep / "sweep.json").read_bytes() == before


def test_finished_jobs_are_kept_and_settings_apply_to_the_others(sweep, reference, resume,
                                                                 monkeypatch):
    """Also where a word changes what finished ones would have been trained with."""
    started = []

    def pretend(words, log, cwd, variables):
        config = compose(read_words(words[1:])).config
        started.append((config.run_name, config.ppo.num_steps, config.resume, cwd))
        ended, other = os.pipe()
        os.close(other)
        return Process(ended, None)

    monkeypatch.setattr(module.job_process, "start", pretend)
    varied(whole_copy(reference, sweep / "1"), 1)
    monkeypatch.chdir("/")  # the words name files from where the sweep was started
    ended = resume(sweep, "ppo.num_steps=9", code=11)
    assert f"{sweep}: 2 of 4 jobs to run" in ended.err
    assert "2 of 4 jobs failed" in ended.err
    assert started == [("2", 9, "auto", str(sweep.parents[1])), ("3", 9, "never", str(Path.cwd()))]
    assert "ppo.num_steps=9" in read_sweep(sweep).words
    for number in (2, 3):
        shutil.rmtree(sweep / str(number), ignore_errors=True)
        varied(whole_copy(reference, sweep / str(number)), number)
    started.clear()
    assert resume(sweep, code=0).out.count("finished") == 4
    assert started == []


@pytest.mark.slow
def test_kill_9_of_a_sweep_stops_its_job_and_the_sweep_goes_on(world, shown, resume):
    """What was planned is on the disk, the job saves and ends, and nothing is done twice."""
    process = spawn("train", "-m", *words("ppo.num_steps=3"), "seed=1,2", "hydra.sweep.dir=s",
                    cwd=world, PPOCLI_FAULTS="score.before@8:sleep=8")
    wait_for((world / "s/0/checkpoints/step-000001").exists, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "Job 0 of the sweep in" in resume("s", code=5).err
    wait_for(lambda: live_owner(world / "s/0") is None)
    process.communicate()
    assert [job["status"] for job in shown("s")["jobs"]] == ["stopped", "planned"]
    assert read_json(world / "s/0/summary.json")["status"] == "stopped"
    assert "resuming step" in run("sweep", "resume", "s", cwd=world, code=0).err
    assert [job["status"] for job in shown("s")["jobs"]] == ["finished"] * 2
