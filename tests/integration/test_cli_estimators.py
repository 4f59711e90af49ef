"""A training without a critic as users see it: the run, its files, and what can be made of them."""

import json

import pytest
from helpers import jsonl, ppocli

SMALL = ("+recipe=quickstart", "run_name=r", "ppo.total_episodes=64", "ppo.num_rollouts=32",
         "prompts.eval.limit=4", "prompts.eval.repeat=1", "hardware.device=cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    ppocli("train", *SMALL, "ppo.advantage=grpo", "ppo.n=4", cwd=folder, code=0)
    return folder


def test_figures_of_a_critic_are_left_out_and_those_of_the_kl_term_are_there(run):
    row = jsonl(run / "runs/r/metrics.jsonl")[-1]
    assert row["loss/kl_avg"] > 0
    assert row["objective/non_score_reward"] == 0
    assert row["objective/rlhf_reward"] == row["objective/scores"]
    assert not {"loss/value_avg", "val/error", "val/returns_mean"} & set(row)
    assert json.loads((run / "runs/r/summary.json").read_text())["updates"] == 2 * 4


def test_no_value_head_is_saved_and_export_says_so(run):
    assert not list(run.rglob("value_*"))
    ended = ppocli("export", "runs/r", "--include-value-head", "--output", "x", cwd=run, code=3)
    assert "has no value head: it was trained without a critic" in ended.stderr
    assert not (run / "x").exists()


def test_the_report_copes(run):
    ppocli("report", "runs/r", cwd=run, code=0)
