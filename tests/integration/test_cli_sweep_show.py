"""``ppocli sweep show`` and ``resume``: sweeps that were killed, jobs that are kept."""

import json
import os
import select
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import jsonl, ppocli, read_json
from runs import Command, copied, spawn, wait_for, whole_copy, words

from ppocli.cli import sweep_jobs as module
from ppocli.config.config_yaml import read_config
from ppocli.errors import CheckpointError
from ppocli.runs.run_folder import live_owner, lock, write_config
from ppocli.runs.sweeps import JobRecord, SweepRecord, read_sweep, write_sweep

KEYS = ["ppo.init_kl_coef=0.1", "ppo.init_kl_coef=0.2"]


def job(sweep: Path, number: int, status: str, varied: list[str], reward: float | None = None,
        kl: float | None = None, code: int | None = None) -> JobRecord:
    return JobRecord(number, tuple(varied), tuple(varied), status, code, reward, kl, 2.0,
                     str(sweep / str(number)), None)


@pytest.fixture
def sweep(reference, world) -> Path:
    """A sweep over two keys: finished, failed, being run when all was killed, never begun."""
    folder = world / "runs/sweep-1"
    whole_copy(reference, folder / "0")
    copied(reference, folder / "2", 2)
    given = [word for word in words(stateful=True) if not word.startswith("seed")]
    write_sweep(SweepRecord(folder, ("-m", *given, "seed=0,1", "ppo.init_kl_coef=0.1,0.2"),
                            str(world), True, (
        job(folder, 0, "finished", ["seed=0", KEYS[0]], 0.5, 0.25, 0),
        job(folder, 1, "failed", ["seed=0", KEYS[1]], code=7),
        job(folder, 2, "running", ["seed=1", KEYS[0]]),
        JobRecord(3, (), ("seed=1", KEYS[1]), "planned", None, None, None, 0.0, "", None))))
    return folder


@pytest.fixture
def show(app) -> Command:
    return partial(app, "sweep", "show")


@pytest.fixture
def shown(show) -> Callable[..., dict]:
    """The newest sweep or that of a name, in an order."""
    return lambda *given, sort="reward": json.loads(
        show(*given, "--sort", sort, "--json", code=0).out)


@pytest.fixture
def resume(app) -> Command:
    return partial(app, "sweep", "resume")


def test_status_is_told_even_of_jobs_that_nobody_wrote_down(sweep, shown):
    found = {each["job"]: each for each in shown()["jobs"]}
    assert [found[n]["status"] for n in range(4)] == ["finished", "failed", "interrupted",
                                                      "planned"]
    assert [found[n]["step"] for n in range(4)] == [4, None, 4, None]
    assert found[0]["reward_mean"] == jsonl(sweep / "0/metrics.jsonl")[-1]["eval/reward_mean"]
    assert found[3]["varied"] == {"seed": "1", "ppo.init_kl_coef": "0.2"}
    with lock(sweep / "2"):
        assert shown("sweep-1", sort="job")["jobs"][2]["status"] == "running"
    record = read_sweep(sweep)
    config = read_config(sweep / "0/config.yaml")
    top = f"generation.top_p={config.generation.top_p:e}"
    for varied, status in ((f"seed={config.seed + 7}", "failed"),  # of another run, or in use
                           ("+recipe=other", "failed"), (f"seed={config.seed}", "finished")):
        refused = job(sweep, 0, "failed", [top, varied], code=5)
        write_sweep(replace(record, jobs=(refused, *record.jobs[1:])))
        assert shown("sweep-1", sort="job")["jobs"][0]["status"] == status
    write_sweep(record)
    (sweep / "0").rename(sweep / "away")
    assert shown("runs/sweep-1", sort="job")["jobs"][0]["status"] == "gone"


def test_order_and_means_of_every_value(sweep, shown, reference):
    for number in (1, 3):
        whole_copy(reference, sweep / str(number))
    for number, reward, kl in ((0, 0.1, 3.0), (1, 0.4, 1.0), (3, 0.2, 2.0)):
        (sweep / str(number) / "metrics.jsonl").write_text(json.dumps(
            {"step": 4, "episode": 48, "eval/kl_mean": kl, "eval/reward_mean": reward}) + "\n")
    (sweep / "2/metrics.jsonl").write_text("")
    write_sweep(SweepRecord(sweep, ("-m",), str(sweep), True, tuple(
        job(sweep, n, "finished", [f"seed={n // 2}", KEYS[n % 2]]) for n in range(4))))
    assert [e["job"] for e in shown()["jobs"]] == [1, 3, 0, 2]
    assert [e["job"] for e in shown(sort="kl")["jobs"]] == [1, 3, 0, 2]
    assert [e["job"] for e in shown(sort="job")["jobs"]] == [0, 1, 2, 3]
    means = {(m["key"], m["value"]): m for m in shown()["marginal_means"]}
    assert means["seed", "0"]["jobs"] == 2
    assert means["seed", "0"]["reward_mean"] == pytest.approx(0.25)
    assert means["seed", "1"]["reward_mean"] == 0.2  # the interrupted job doesn't count
    assert means["ppo.init_kl_coef", "0.2"]["kl_mean"] == 1.5


def test_the_table(sweep, show):
    ended = show("--sort", "job", code=0)
    lines = ended.out.splitlines()
    assert lines[0].split() == ["job", "status", "step", "reward", "KL", "seconds", "seed",
                                "ppo.init_kl_coef", "folder"]
    assert lines[1].split()[:3] == ["0", "finished", "4/4"]
    assert lines[4].split() == ["3", "planned", "-", "-", "-", "-", "1", "0.2", "-"]
    assert lines[6].split() == ["value", "jobs", "reward", "KL"]
    assert ended.err.startswith("using runs/sweep-1 (the newest sweep)\n")
    assert ended.err.endswith("3 of 4 jobs are not finished; go on with: ppocli sweep resume "
                              "runs/sweep-1\n")


def test_a_job_that_was_resumed_with_other_values_shows_them(sweep, show, shown, command):
    own = read_config(sweep / "0/config.yaml").ppo
    command(f"resume={sweep / '0'}", "ppo.num_steps=5", "ppo.init_kl_coef=0.7",
            "checkpoint.keep_last=7", code=0)
    row, *_ = shown(sort="job")["jobs"]
    assert row["varied"] == {"seed": "0", "ppo.init_kl_coef": "0.7"}
    assert (row["step"], row["overrides"]) == (5, ["seed=0", KEYS[0]])
    change = {"step": 4, "before": f"{own.init_kl_coef:g}", "after": "0.7"}
    assert row["changed"]["ppo.init_kl_coef"] == [{**change, "key": "ppo.init_kl_coef"}]
    assert set(row["changed"]) == {"ppo.init_kl_coef"}  # the others change no step that was planned
    assert {mean["jobs"] for mean in shown()["marginal_means"]
            if mean["key"] == "ppo.init_kl_coef"} == {0}, "it is of neither value"
    head, line, *others = show("--sort", "job", code=0).out.splitlines()
    assert f"{own.init_kl_coef:g} -> 0.7 (from step 5)" in line
    assert "ppo.num_steps" not in head
    assert not any("->" in other for other in others)


def test_no_sweep(world, show):
    assert "There is no sweep in runs yet." in show(code=2).err
    Path("sweep.json").write_text('{"jobs": 3}')
    assert "sweep.json is damaged" in show(".", code=5).err


@pytest.mark.parametrize(("given", "said"), [
    (["seed=4"], "seed can't be changed: its values make the jobs of this sweep."),
    (["resume=never"], "resume can't be changed: a sweep goes on where it is."),
    (["run_name=x"], "run_name can't be changed: a sweep goes on where it is."),
    (["output_dir=x"], "output_dir can't be changed: a sweep goes on where it is."),
    (["hydra.sweep.dir=x"], "hydra.sweep.dir can't be changed"),
    (["ppo.cliprange=0.1,0.2"], "The words no longer give the jobs of this sweep."),
    (["nonsense"], "'nonsense' is neither an option nor a setting")])
def test_words_that_would_make_another_sweep_are_refused(sweep, resume, given, said):
    before = (sweep / "sweep.json").read_bytes()
    assert said in resume("runs/sweep-1", *given, code=2).err
    assert (sweep / "sweep.json").read_bytes() == before


def test_a_sweep_that_still_runs_is_refused(sweep, resume):
    with lock(sweep):
        err = resume(sweep, code=5).err
    assert f"The sweep in {sweep} is still running: process {os.getpid()} on " in err
    with lock(sweep / "2"):
        err = resume(sweep, code=5).err
    assert f"Job 2 of the sweep in {sweep} is still running: process {os.getpid()} on " in err
    assert f"  fix:   wait for it to end, or stop it: kill {os.getpid()}\n" in err


def test_finished_jobs_are_kept_without_being_loaded(sweep, reference, resume, monkeypatch):
    """Also where a word changes what they would have been trained with."""
    for number in (1, 2, 3):
        shutil.rmtree(sweep / str(number), ignore_errors=True)
        config = whole_copy(reference, sweep / str(number)) / "config.yaml"
        found = read_config(config)
        write_config(replace(found, seed=number // 2, ppo=replace(
            found.ppo, init_kl_coef=(0.1, 0.2)[number % 2])), config)
    monkeypatch.setattr(module, "launch", None)  # nothing may be started
    monkeypatch.chdir("/")  # the words name files from where the sweep was started
    ended = resume(sweep, "ppo.num_steps=9", code=0)
    assert ended.err.count("finished already, kept") == 4
    rows = [line.split() for line in ended.out.splitlines()]
    assert rows[1][:5] == ["0", "finished", "0", "0.5", "0.25"]  # as it was written down
    jobs = read_json(sweep / "sweep.json")["jobs"]
    after = read_json(sweep / "3/summary.json")["eval_after"]
    assert jobs[3]["reward_mean"] == after["reward_mean"]  # was known to its folder alone
    assert [each["status"] for each in jobs] == ["finished"] * 4


@pytest.mark.slow
def test_a_job_is_never_kept_as_the_run_of_another(sweep, reference, resume, monkeypatch, shown):
    """One that was refused for it, one that was killed first, and one that was not reached."""
    for number in (1, 2, 3):
        shutil.rmtree(sweep / str(number), ignore_errors=True)
        whole_copy(reference, sweep / str(number))
    record = read_sweep(sweep)
    record = replace(record, words=tuple(word.replace("seed=0,1", "seed=8,9")
                                         for word in record.words))
    jobs = [job(sweep, 0, "failed", ["seed=8", KEYS[0]], code=5),
            *(replace(record.jobs[n], varied=(f"seed={8 + n // 2}", KEYS[n % 2]))
              for n in (1, 2, 3))]
    write_sweep(replace(record, jobs=tuple(jobs)))
    monkeypatch.setattr(module, "launch", Mock(side_effect=CheckpointError("another's")))
    assert "finished already" not in resume(sweep, code=11).err
    assert [each["status"] for each in shown()["jobs"]] == ["failed"] * 4


@pytest.mark.slow
def test_a_setting_counts_from_the_job_on_that_takes_it(sweep, resume, monkeypatch):
    started = []

    def refuse(checked, caller):
        started.append((checked.config.ppo.num_steps, checked.config.ppo.total_episodes))
        raise CheckpointError("no")

    monkeypatch.setattr(module, "launch", refuse)
    before = read_sweep(sweep).words
    resume("runs/sweep-1", "ppo.mini_batch_size=500", code=11)
    assert (read_sweep(sweep).words, started) == (before, [])
    resume("runs/sweep-1", "ppo.total_episodes=60", code=11)  # the other length gives way
    assert started == [(None, 60)] * 3
    after = read_sweep(sweep).words
    assert {*before} - {*after} == {"ppo.num_steps=4"}
    assert {*after} - {*before} == {"ppo.total_episodes=60"}


def test_a_sweep_never_replaces_another(sweep, command):
    before = (sweep / "sweep.json").read_bytes()
    ended = command("-m", *words("seed=1,2", "hydra.sweep.dir=runs/sweep-1"), code=5)
    assert f"{sweep} holds a sweep already; nothing is overwritten." in ended.err
    assert f"go on with it: ppocli sweep resume {sweep}" in ended.err
    assert (sweep / "sweep.json").read_bytes() == before


@pytest.mark.slow
def test_kill_9_of_a_sweep_stops_its_job_and_the_sweep_goes_on(world, shown, resume):
    """What was planned is on the disk, the job saves and ends, and nothing is done twice."""
    given = [*words("ppo.num_steps=3"), "seed=1,2"]
    process = spawn("train", "-m", *given, "hydra.sweep.dir=s", cwd=world,
                    PPOCLI_FAULTS="score.before@8:sleep=12")
    wait_for((world / "s/0/checkpoints/step-000001").exists, process)
    planned = read_json(world / "s/sweep.json")
    assert [each["status"] for each in planned["jobs"]] == ["running", "planned"]
    worker = live_owner(world / "s/0")
    assert worker is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert f"is still running: process {worker.pid}" in resume("s", code=5).err
    ended = os.pidfd_open(worker.pid)
    try:
        assert select.select([ended], [], [], 60)[0], "the job outlives its sweep"
    finally:
        os.close(ended)
    process.communicate()
    assert read_json(world / "s/0/summary.json")["status"] == "stopped"
    found = shown("s", sort="job")["jobs"]
    assert [each["status"] for each in found] == ["stopped", "planned"]
    done = ppocli("sweep", "resume", "s", cwd=world, code=0)
    assert "resuming step" in done.stderr
    assert [each["status"] for each in shown("s")["jobs"]] == ["finished"] * 2
    assert all((world / f"s/{number}/model/config.json").is_file() for number in (0, 1))
