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
    run = train("ppo.total_episodes=1536", "prompts.eval.repeat=2")
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


NOTHING, ALWAYS = "[0.0] * len(responses)", "[1.0] * len(responses)"
NOTHING_DENSE = "[[0.0] * len(ids) for ids in response_ids]"


@pytest.mark.parametrize(("words", "scores"), [
    (("ppo.logprobs_from=decode", *AS_USUAL), NOTHING_DENSE),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ((), ALWAYS),
        (("ppo.logprobs_from=decode", "ppo.advantage=reinforce_pp", *AS_USUAL), NOTHING_DENSE),
        (("ppo.logprobs_from=decode", *AS_USUAL), ALWAYS),
        (("ppo.advantage=grpo", "ppo.n=4"), ALWAYS), ((), NOTHING)))])
def test_a_reward_that_never_differs_leaves_the_policy_where_it_was(words, scores, here, command):
    """Neither rounding nor what the critic doesn't know yet is whitened into steps, nor do Adam's
    steps come of it."""
    Path("rare.py").write_text(f"def score(responses, response_ids, **_):\n    return {scores}\n")
    command(
        "+recipe=quickstart", "~reward", "reward.fn=rare.py:score", *words, "run_name=r",
        "ppo.total_episodes=null", "ppo.num_steps=6", "ppo.num_rollouts=32",
        "ppo.mini_batch_size=12",
        "generation.max_new_tokens=8", "eval.every_steps=null", "eval.at_start=false",
        "checkpoint.every_steps=null", "hardware.device=cpu", code=0)
    kl = [row["objective/kl"] for row in jsonl(here / "runs/r/metrics.jsonl")
          if "objective/kl" in row]
    assert len(kl) == 6
    assert max(map(abs, kl)) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_keeps_its_promise(train):
    run = train("seed=7")
    after = read_json(run / "summary.json")["eval_after"]
    assert after["reward_mean"] >= 0.92
    assert after["kl_mean"] <= 2.0


@pytest.fixture
def played(train) -> Callable[..., tuple[list[dict], list[dict]]]:
    """The rows of evaluations of a run with an environment, and its samples."""
    def played(recipe: str, *words: str) -> tuple[list[dict], list[dict]]:
        run = train("hardware.device=cpu", *words, recipe=recipe)
        return ([row for row in jsonl(run / "metrics.jsonl") if "eval/turns_mean" in row],
                jsonl(run / "samples.jsonl"))

    return played


@pytest.mark.slow
def test_players_begin_as_they_are_meant_to(played):
    few = ("ppo.total_episodes=32", "ppo.num_rollouts=16", "ppo.mini_batch_size=8")
    guessing, samples = played("guess_number", *few)
    assert len(guessing) == 2
    assert 0.3 < guessing[0]["eval/done_share"] < 0.65
    assert guessing[0]["eval/turns_mean"] > 5.5
    said = [turn["response"] for row in samples for turn in row["turns"]]
    legal = [text.isdecimal() and 1 <= int(text) <= 20 for text in said]
    assert sum(legal) / len(legal) > 0.97
    calculating, samples = played("calculator", *few)
    assert 0.04 < calculating[0]["eval/reward_mean"] < 0.2
    asked = [row["turns"][0]["response"].startswith("calc ") for row in samples]
    assert 0.1 < sum(asked) / len(asked) < 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_player_learns_to_search(played):
    after = played("guess_number", "seed=7")[0][-1]
    assert after["eval/done_share"] >= 0.95
    assert after["eval/turns_mean"] <= 3.7 + 0.7  # binary search takes 3.7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_player_learns_to_use_its_tool(played):
    before, *_, after = played("calculator", "seed=7")[0]
    assert before["eval/reward_mean"] < 0.2
    assert after["eval/reward_mean"] >= 0.9


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
