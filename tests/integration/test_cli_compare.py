"""``ppocli compare``: equal samples, settings that differ, wins on shared prompts."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers import jsonl, write_jsonl
from runs import Command, whole_copy

from ppocli.config.config_yaml import read_config
from ppocli.runs.run_folder import write_config


@pytest.fixture
def runs(reference, here) -> Path:
    """The current folder with two copies of a run; tests change the second."""
    whole_copy(reference, here / "runs/a")
    whole_copy(reference, here / "runs/b")
    return here


def change_rows(path: Path, change: Callable[[dict], dict | None]) -> None:
    rows = [change(row) for row in jsonl(path)]
    write_jsonl(path, (row for row in rows if row is not None))


def change_config(run: Path, **sections: dict) -> None:
    config = read_config(run / "config.yaml")
    for name, values in sections.items():
        part = getattr(config, name)
        config = replace(config, **{name: replace(part, **values)})
    write_config(config, run / "config.yaml")


@pytest.fixture
def compare(app) -> Command:
    return partial(app, "compare")


@pytest.fixture
def compared(compare) -> Callable[..., dict]:
    return lambda *given: json.loads(compare(*given, "--json", code=0).out)


def test_figures_at_equal_samples_and_at_the_end(runs, compared):
    change_rows(runs / "runs/b/metrics.jsonl", lambda row: None if row["step"] > 3 else row)
    found = compared("a", "b")
    rows = {row["step"]: row for row in jsonl(runs / "runs/a/metrics.jsonl")}
    assert found["episodes"] == rows[3]["episode"]
    a, b = found["runs"]
    assert (a["equal"]["step"], a["end"]["step"]) == (3, 4)
    assert (b["equal"]["step"], b["end"]["step"]) == (3, 3)
    assert a["equal"]["figures"]["reward/mean"] == rows[3]["reward/mean"]
    assert a["end"]["figures"]["reward/mean"] == rows[4]["reward/mean"]
    # evaluated at 0, 2 and 4
    assert a["equal"]["figures"]["eval/reward_mean"] == rows[2]["eval/reward_mean"]
    assert a["equal"]["figures"]["eval/metrics/words"] == rows[2]["eval/metrics/words"]
    assert a["equal"]["seconds"] == pytest.approx(sum(
        rows[s].get("time/step", 0) + rows[s].get("time/eval", 0) for s in range(4)))
    best = max((rows[s]["eval/reward_mean"], -s) for s in (0, 2, 4))
    assert (a["best"], a["best_step"], a["best_metric"]) == (best[0], -best[1], "reward_mean")


def test_settings_that_differ_and_only_these(runs, compared):
    change_config(runs / "runs/b", ppo={"init_kl_coef": 0.7}, eval={"every_steps": 9})
    found = compared("a", "b")["config_differences"]
    assert found == {"eval.every_steps": {"a": 2, "b": 9},
                     "ppo.init_kl_coef": {"a": read_config(
                         runs / "runs/a/config.yaml").ppo.init_kl_coef, "b": 0.7}}


def test_two_are_needed(runs, compare):
    assert "ppocli compare runs/ONE runs/OTHER" in compare("a", "runs/a", code=2).err
