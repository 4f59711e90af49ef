"""Resuming after something has changed: what is taken over, what is refused, what is kept."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import jsonl, save_lm, write_prompts
from runs import copied, words

from ppocli.config.resolved import read_config
from ppocli.runs.record import Change, read_changes


@pytest.fixture
def stopped(reference, world) -> Path:
    """A run stopped after step 2 of the reference run, in a world of its own."""
    return copied(reference, world / "runs/r", 2)


def test_another_kl_coefficient_is_used_from_here_on(command, stopped):
    ended = command(f"resume={stopped}", "ppo.init_kl_coef=0.7", code=0)
    rows = jsonl(stopped / "metrics.jsonl")
    assert rows[2]["objective/kl_coef"] < 0.2
    assert rows[3]["objective/kl_coef"] == 0.7
    assert "starts anew" in ended.said


@pytest.mark.parametrize(("word", "code"), [
    ("reward.fn=nosuch:f", 7), ("generation.max_new_tokens=5000", 2), ("seed=9", 5)])
def test_a_refused_change_leaves_the_run_as_it_was(word, code, command, stopped):
    before = (stopped / "config.yaml").read_bytes()
    command(f"resume={stopped}", word, code=code)
    assert (stopped / "config.yaml").read_bytes() == before
    assert not (stopped / "config.next.yaml").exists()


def test_an_accepted_change_becomes_the_runs_own(command, stopped):
    ended = command(f"resume={stopped}", "ppo.optimizer.lr=2e-3", code=0)
    assert read_config(stopped / "config.yaml").ppo.optimizer.lr == 2e-3
    assert read_changes(stopped) == [Change(2, "ppo.optimizer.lr", "0.001", "0.002")]
    ended = command(f"resume={stopped}", "ppo.vf_coef=0.5")
    assert "already finished" in ended.said
    assert read_changes(stopped)[1:] == [Change(4, "ppo.vf_coef", "0.1", "0.5")]
    summary = json.loads((stopped / "summary.json").read_text())
    assert json.loads((stopped / "run.json").read_text())["run_id"] == summary["run_id"]
    assert not (stopped / "config.next.yaml").exists()


def test_prompts_that_have_changed_are_noticed(command, world):
    ended = command(*words("run_name=r", "ppo.num_steps=1"), code=0)
    write_prompts(world / "prompts.jsonl", ["the plot", "we saw"])
    ended = command(f"resume={world / 'runs/r'}", "ppo.num_steps=2", code=5)
    assert "Not what the run was started with: prompts, evaluation prompts." in ended.said


def test_a_reference_that_has_changed_is_noticed(command, world):
    ended = command(*words("run_name=r", "ppo.num_steps=1"), code=0)
    shutil.rmtree(world / "lm")
    save_lm(world / "lm", seed=5)
    ended = command(f"resume={world / 'runs/r'}", "ppo.num_steps=2", code=5)
    assert "Not what the run was started with: reference model." in ended.said


def test_a_finished_run_that_goes_on_keeps_its_model_under_its_step(command, world):
    assert command(*words("run_name=r", "ppo.num_steps=1")).code == 0
    first = (world / "runs/r/model/model.safetensors").read_bytes()
    command(f"resume={world / 'runs/r'}", "ppo.num_steps=2", code=0)
    kept = world / "runs/r/model-step-000001/model.safetensors"
    assert kept.read_bytes() == first
    assert (world / "runs/r/model/model.safetensors").read_bytes() != first
    assert json.loads((world / "runs/r/summary.json").read_text())["steps"] == 2


def test_best_is_forgotten_when_another_figure_is_asked_for(command, stopped):
    command(f"resume={stopped}", "checkpoint.metric=metrics/words", code=0)
    best = json.loads((stopped / "summary.json").read_text())["best"]
    assert (best["name"], best["step"]) == ("metrics/words", 4)


def test_figures_that_do_not_exist_are_saved_as_null(command, world):
    """A reward that never applies has no mean; that must not keep a checkpoint from being made."""
    (world / "never.py").write_text("def never(outputs, **_):\n    return [None] * len(outputs)\n")
    plain = [word for word in words("run_name=r", "ppo.num_steps=1")
             if not word.startswith("reward.fn=")]
    ended = command(*plain, "reward.fns.a.fn=rewards.py:plain", "reward.fns.b.fn=never.py:never")
    assert ended.code == 0, ended.said
    row = jsonl(world / "runs/r/metrics.jsonl")[-1]
    assert row["reward/b"] is None
    assert row["eval/reward/a"] is not None
    state = json.loads((world / "runs/r/checkpoints/latest/state.json").read_text())
    assert state["eval_last"]["reward/b"] is None
