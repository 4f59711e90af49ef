"""``sweep.search``: jobs whose values optuna draws or chooses, that go on exactly after a kill."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from helpers import read_json
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from runs import run, spawn, wait_for, words

from ppocli.config.schema import SweepConfig, TrainConfig
from ppocli.errors import ConfigError
from ppocli.runs.run_folder import RunFolder
from ppocli.runs.search import (
    METRICS,
    _shown,
    _tell,
    distribution,
    findings,
    objectives,
    open_study,
)
from ppocli.runs.sweeps import JobRecord, read_sweep

RANGES = ("ppo.optimizer.lr=tag(log,interval(1e-4,1e-2))", "ppo.ppo_epochs=range(1,4)",
          "ppo.gamma=1.0,0.9")


def search(*more: str) -> list[str]:
    own = [word for word in words("ppo.num_steps=1") if not word.startswith(
        ("ppo.optimizer.lr", "ppo.ppo_epochs", "ppo.gamma"))]
    return ["train", "-m", *own, "hydra.sweep.dir=runs/s", *RANGES, *more]


def drawn(world: Path, sweep: str = "s") -> list[list[str]]:
    jobs = read_json(world / "runs" / sweep / "sweep.json")["jobs"]
    return [job["varied"] for job in jobs]


@pytest.mark.parametrize(("word", "expected"), [
    ("ppo.optimizer.lr=interval(0.001,0.1)", FloatDistribution(0.001, 0.1)),
    ("ppo.optimizer.lr=tag(log,interval(1e-5,1e-3))", FloatDistribution(1e-5, 1e-3, log=True)),
    ("ppo.ppo_epochs=interval(1,8)", IntDistribution(1, 8)),
    ("ppo.num_rollouts=tag(log,range(8,129))", IntDistribution(8, 128, log=True)),
    ("ppo.ppo_epochs=interval(1.2,4.8)", IntDistribution(2, 4)),
    ("ppo.ppo_epochs=tag(log,range(4,1,-1))", IntDistribution(2, 4, log=True)),
    ("ppo.ppo_epochs=range(1,8,2)", CategoricalDistribution(["1", "3", "5", "7"])),
    ("ppo.advantage=gae,grpo", CategoricalDistribution(["gae", "grpo"])),
    ("model.peft=choice({type:lora},{})", CategoricalDistribution(["{type:lora}", "{}"]))])
def test_ranges_in_hydras_grammar(word, expected):
    override = OverridesParser.create().parse_override(word)
    assert distribution(override.key_or_group, override) == expected


@pytest.mark.parametrize("word", [
    "ppo.init_kl_coef=tag(log,interval(0,1))", "ppo.init_kl_coef=interval(1,0)",
    "ppo.init_kl_coef=interval(0,inf)", "ppo.ppo_epochs=tag(log,range(0,3))",
    "ppo.ppo_epochs=range(3,3)", "ppo.ppo_epochs=interval(1.2,1.8)"])
def test_a_range_with_nothing_to_choose_from_is_refused(word):
    override = OverridesParser.create().parse_override(word)
    with pytest.raises(ConfigError, match="nothing in that range"):
        distribution(override.key_or_group, override)


def test_a_search_has_one_aim(world, app):
    folder = world / "runs/s"
    folder.mkdir(parents=True)
    open_study(folder, ["maximize"]).set_user_attr(METRICS, ["reward_mean"])
    said = app(*search("sweep.search=random", "sweep.trials=1", "sweep.direction=minimize"),
               code=2).err
    assert "this search is for reward_mean (maximize), not " in said
    assert open_study(folder).user_attrs == {METRICS: ["reward_mean"]}


@pytest.mark.slow
@pytest.mark.parametrize("trials", [2, 7])
def test_a_search_goes_on_exactly_after_a_kill(world: Path, trials):
    given = search("sweep.search=optuna", f"sweep.trials={trials}", "sweep.seed=5000")
    run(*given, cwd=world, code=0)
    whole = drawn(world)
    assert len(whole) == trials
    assert len({tuple(each) for each in whole}) == trials
    (world / "runs/s").rename(world / "runs/whole")
    process = spawn(*given, cwd=world)
    wait_for(lambda: (world / "runs/s/sweep.json").exists() and len(drawn(world)) > 1, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    study = open_study(world / "runs/s")
    assert TrialState.RUNNING in [trial.state for trial in study.trials]
    ended = run("sweep", "resume", "s", cwd=world, code=0)
    assert "finished already, kept" not in ended.err  # what is told is not asked again
    assert drawn(world) == whole
    values = [[trial.value for trial in open_study(world / "runs" / name).trials]
              for name in ("s", "whole")]
    assert values[0] == values[1]  # the numbers of every job too
    assert "resume=" not in findings(read_sweep(world / "runs/s"))["command"]


@pytest.mark.slow
def test_several_objectives_importance_and_the_best_command(world: Path, app):
    run(*search("sweep.search=random", "sweep.trials=5", "sweep.metric=[reward_mean,kl_mean]"),
        cwd=world, code=0)
    found = json.loads(app("sweep", "show", "s", "--json", code=0).out)
    after = {job["job"]: read_json(world / f"runs/s/{job['job']}/summary.json")
             ["eval_after"] for job in found["jobs"]}
    points = {number: (-one["reward_mean"], one["kl_mean"]) for number, one in after.items()}
    front = {number for number, (reward, kl) in points.items() if not any(
        other != (reward, kl) and other[0] <= reward and other[1] <= kl
        for other in points.values())}
    assert {each["job"] for each in found["best"]} == front
    assert found["best"][0]["job"] == min(front, key=points.__getitem__)
    assert set(found["importance"]) == {"reward_mean", "kl_mean"}
    assert sum(found["importance"]["kl_mean"].values()) == pytest.approx(1, abs=0.01)
    shown = app("sweep", "show", "s", code=0).out
    assert shown.endswith(found["command"] + "\n")
    app(*shlex.split(found["command"])[1:], "run_name=again", code=0)
    best = found["best"][0]["job"]
    again, first = (read_json(RunFolder(world / "runs" / name).summary)
                    ["eval_after"] for name in ("again", f"s/{best}"))
    assert again == first


@pytest.mark.parametrize(("more", "said"), [
    (["ppo.gamma=interval(0.1,0.2)"], "add sweep.search=optuna or sweep.search=random"),
    (["sweep.search=optuna"], "there is nothing to search"),
    (["seed=range(3,3)"], "there is nothing in that range"),
    (["sweep.search=optun", "ppo.gamma=1,0.9"], "did you mean optuna?"),
    (["sweep.search=optuna", "ppo.gamma=1,0.9", "sweep.metric=[reward_mean,kl_mean]",
      "sweep.direction=maximize"], "1 direction for 2 metrics")])
def test_what_is_wrong_with_a_search_is_told_before_a_job(more, said, world, command):
    assert said in command("-m", *words(), *more, code=2).err
    assert not list(world.glob("runs/*/[0-9]"))


@pytest.mark.parametrize(("value", "high", "shown"), [
    (0.999964321, 0.99999, "0.99996"), (0.123456789, 0.2, "0.1235"), (0.12345, 0.12345, "0.12345")])
def test_a_value_that_is_rounded_stays_in_its_interval(value, high, shown):
    assert _shown(value, FloatDistribution(0.0, high)) == shown


def test_a_figure_that_no_job_has_ends_the_search(tmp_path):
    study = open_study(tmp_path, ["maximize"])
    (tmp_path / "summary.json").write_text('{"eval_after": {"reward_mean": 2.0}}')
    metrics, _ = objectives(SweepConfig(metric="eval/reward_mean"), TrainConfig())
    assert metrics == ["reward_mean"]
    done = JobRecord(0, (), (), "finished")
    _tell(study, study.ask(), done, tmp_path, metrics)
    with pytest.raises(ConfigError, match=r"reward_men is not among .* job 0's .*: reward_mean"):
        _tell(study, study.ask(), done, tmp_path, ["reward_men"])
    assert [trial.value for trial in study.trials] == [2.0, None]


def test_without_optuna(world, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    said = command("-m", *words(), "ppo.gamma=1,0.9", "sweep.search=random", code=2).err
    assert "pip install 'ppocli[sweep]'" in said


@pytest.mark.slow
def test_a_sweep_has_a_name_and_keys_of_free_mappings_need_no_plus(world, app, command):
    (world / "rewards.py").write_text("def scaled(outputs, by):\n"
                                      "    return [by * len(text) for text in outputs]\n")
    own = [*words("ppo.num_steps=1", "reward.fn=rewards.py:scaled"), "reward.kwargs.by=1,3"]
    command("-m", *own, "run_name=mine", code=0)
    jobs = read_json(world / "runs/mine/sweep.json")["jobs"]
    assert [job["varied"] for job in jobs] == [["reward.kwargs.by=1"], ["reward.kwargs.by=3"]]
    assert jobs[1]["reward_mean"] > jobs[0]["reward_mean"] > 0
    assert "2 jobs" in app("sweep", "resume", "mine", code=0).err
    assert "holds a sweep already" in command("-m", *own, "run_name=mine", code=5).err
    assert "is a run's" in command("-m", *own, "hydra.sweep.dir=runs/mine/0", code=5).err
    for wrong in ("run_name=a,b", "run_name=x-${seed}"):
        assert "a sweep has one name" in command("-m", *own, wrong, code=2).err
    assert "lie in one folder" in command("-m", *own, "hydra.sweep.dir=${seed}", code=2).err
    first = command("-m", *own, "seed=7,8", "ppo.gamma=interval(0.5,1)", "--cfg", "job", "-p",
                    "reward.kwargs", code=0)
    assert first.out == "# @package reward.kwargs\nby: 1\n"
