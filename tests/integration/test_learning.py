"""That it learns: a short run in the quick suite, the whole promise of one seed in the slow one; a
run without a critic as users see it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import jsonl, read_json


@pytest.fixture
def train(command, here: Path) -> Callable[..., Path]:
    """Train by a recipe with further words, in the current folder."""
    def train(*words: str, recipe: str = "quickstart") -> Path:
        command(f"+recipe={recipe}", *words, f"run_name={recipe}", code=0)
        return here / "runs" / recipe

    return train


def test_a_part_of_the_quickstart_raises_the_reward(train):
    run = train("ppo.total_episodes=1280", "prompts.eval.repeat=2")
    summary = read_json(run / "summary.json")
    before, after = summary["eval_before"], summary["eval_after"]
    assert before["reward_mean"] <= 0.6
    assert after["reward_mean"] >= before["reward_mean"] + 0.2
    assert before["kl_mean"] == pytest.approx(0.0, abs=1e-4)
    assert 0.1 < after["kl_mean"] < 6.0
    kl = [row["objective/kl"] for row in jsonl(run / "metrics.jsonl") if "objective/kl" in row]
    assert kl[0] == pytest.approx(0.0, abs=1e-4)


AS_USUAL = ("ppo.whiten_advantages=null", "ppo.kl_in=reward", "ppo.lam=0.95",
            "ppo.positive_nll_coef=0")
"""in place of what the recipe sets"""


ALWAYS = "[1.0] * len(responses)"
NOTHING_DENSE = "[[0.0] * len(ids) for ids in response_ids]"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "scores"), [
    (("ppo.logprobs_from=decode", *AS_USUAL), NOTHING_DENSE), ((), ALWAYS),
    (("ppo.logprobs_from=decode", "ppo.advantage=reinforce_pp", *AS_USUAL), NOTHING_DENSE)])
def test_a_reward_that_never_differs_leaves_the_policy_where_it_was(words, scores, here, command):
    """Neither rounding nor what the critic doesn't know yet is whitened into steps, nor do Adam's
    steps come of it."""
    Path("rare.py").write_text(f"def score(responses, response_ids, **_):\n    return {scores}\n")
    command(
        "+recipe=quickstart", "~reward", "reward.fn=rare.py:score", *words, "run_name=r",
        "ppo.total_episodes=null", "ppo.num_steps=4", "ppo.num_rollouts=32",
        "ppo.mini_batch_size=12",
        "generation.max_new_tokens=8", "eval.every_steps=null", "eval.at_start=false",
        "checkpoint.every_steps=null", "hardware.device=cpu", code=0)
    kl = [row["objective/kl"] for row in jsonl(here / "runs/r/metrics.jsonl")
          if "objective/kl" in row]
    assert len(kl) == 4
    assert max(map(abs, kl)) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_keeps_its_promise(train):
    run = train("seed=7")
    after = read_json(run / "summary.json")["eval_after"]
    assert after["reward_mean"] >= 0.92
    assert after["kl_mean"] <= 2.0


@pytest.mark.slow
def test_a_run_without_a_critic_has_no_figures_of_one_and_saves_no_value_head(train, here, app):
    run = train("ppo.total_episodes=64", "ppo.num_rollouts=32", "prompts.eval.limit=4",
                "prompts.eval.repeat=1", "hardware.device=cpu", "ppo.advantage=grpo", "ppo.n=4")
    row = jsonl(run / "metrics.jsonl")[-1]
    assert row["loss/kl_avg"] > 0
    assert row["objective/non_score_reward"] == 0
    assert row["objective/rlhf_reward"] == row["objective/scores"]
    assert not {"loss/value_avg", "val/error", "val/returns_mean"} & set(row)
    assert read_json(run / "summary.json")["updates"] == 2 * 2
    assert not list(run.rglob("value_*"))
    app("report", run, code=0)
