"""``sweep.search``: jobs whose values optuna draws or chooses, that go on exactly after a kill."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import read_json
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from runs import words

from ppocli.config.schema import SweepConfig
from ppocli.errors import ConfigError
from ppocli.runs.search import Search, distribution, findings
from ppocli.runs.sweeps import SweepRecord, read_sweep


@pytest.mark.parametrize(("word", "expected"), [
    ("ppo.optimizer.lr=tag(log,interval(1e-5,1e-3))", FloatDistribution(1e-5, 1e-3, log=True)),
    ("ppo.ppo_epochs=interval(1,8)", IntDistribution(1, 8)),
    ("ppo.ppo_epochs=interval(1.2,4.8)", IntDistribution(2, 4)),
    ("ppo.ppo_epochs=tag(log,range(4,1,-1))", IntDistribution(2, 4, log=True)),
    ("ppo.ppo_epochs=range(1,8,2)", CategoricalDistribution(["1", "3", "5", "7"])),
    ("model.peft=choice({type:lora},{})", CategoricalDistribution(["{type:lora}", "{}"]))])
def test_ranges_in_hydras_grammar(word, expected):
    override = OverridesParser.create().parse_override(word)
    assert distribution(override.key_or_group, override) == expected


@pytest.mark.parametrize("word", [
    "ppo.init_kl_coef=tag(log,interval(0,1))", "ppo.init_kl_coef=interval(0,inf)",
    "ppo.ppo_epochs=interval(1.2,1.8)"])
def test_a_range_with_nothing_to_choose_from_is_refused(word):
    override = OverridesParser.create().parse_override(word)
    with pytest.raises(ConfigError, match="nothing in that range"):
        distribution(override.key_or_group, override)


def trained(reference: Path, run_dir: Path, reward: float, kl: float) -> None:
    """A finished run with these figures after training, as far as a search looks at it."""
    shutil.copytree(reference, run_dir, ignore=shutil.ignore_patterns(
        "checkpoints", "events", "model"))
    summary = read_json(run_dir / "summary.json")
    after = {**summary["eval_after"], "reward_mean": reward, "kl_mean": kl}
    (run_dir / "summary.json").write_text(json.dumps({**summary, "eval_after": after}))


def test_values_follow_from_numbers_and_earlier_results_and_the_best_jobs_are_found(reference,
                                                                                    tmp_path):
    """A search that is read from its folder before each batch chooses as one that goes through."""
    of = Search({"reward_mean": "maximize", "kl_mean": "minimize"}, {
        "lr": FloatDistribution(1e-5, 1e-3, log=True), "epochs": IntDistribution(1, 9),
        "kind": CategoricalDistribution(["a", "b"])})
    plan = SweepConfig(search="optuna", trials=8, seed=5)

    def go_through(folder: Path, sizes: list[int], trials: int = 8) -> tuple:
        folder.mkdir(exist_ok=True)
        before = read_sweep(folder) if (folder / "sweep.json").exists() else SweepRecord(
            folder, ("-m", "+recipe=quickstart", "lr=1,2", "sweep.search=optuna"), "/", (),
            of.written)
        for sweep, numbers in Search.read(before.search).batches(
                before, replace(plan, trials=trials), 2):
            sizes.append(len(numbers))
            for number in numbers:
                if number != 3:  # a job that fails has no run here
                    lr, epochs, _ = (word.split("=")[1] for word in sweep.jobs[number])
                    trained(reference, folder / str(number), -abs(float(lr) - 5e-4), float(epochs))
        return sweep.jobs

    sizes: list[int] = []
    whole = go_through(tmp_path / "whole", sizes)
    assert sizes == [0, 2, 2, 2, 2]
    assert len(set(whole)) == 8
    assert go_through(tmp_path / "cut", [], trials=4) == whole[:4]
    again: list[int] = []
    assert go_through(tmp_path / "cut", again) == whole
    assert again == [1, 2, 2]  # the job without a run, then the others
    found = findings(read_sweep(tmp_path / "whole"))
    points = {number: (abs(float(lr.split("=")[1]) - 5e-4), float(epochs.split("=")[1]))
              for number, (lr, epochs, _) in enumerate(whole) if number != 3}
    front = {number for number, point in points.items() if not any(
        other != point and other[0] <= point[0] and other[1] <= point[1]
        for other in points.values())}
    assert {each["job"] for each in found["best"]} == front
    assert found["best"][0]["job"] == min(points, key=points.__getitem__)


def test_without_optuna(world, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    said = command("-m", *words(), "ppo.gamma=1,0.9", "sweep.search=random", code=3).err
    assert "pip install 'ppocli[sweep]'" in said
