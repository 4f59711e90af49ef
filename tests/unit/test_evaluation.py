"""The arithmetic of evaluations, their arguments and folders."""

import itertools
import math
import statistics

import pytest

from ppocli.evaluation.statistics import (
    best_of_n,
    best_of_n_kl,
    clustered_stderr,
    compare,
    figures_of,
    frontier_of,
)

SCORES = [0.3, -1.0, 2.5, 2.5, 0.0, 7.0]


def row(score, prompt=0, *, response="a b", kl=0.5, rewards=None, metrics=None, **more):
    return {"model": "policy", "prompt_index": prompt, "prompt": "p", "response": response,
            "score": score, "kl": kl, "response_tokens": 2, "finished": True,
            "rewards": rewards or {"r": score}, "metrics": metrics or {}, **more}


def stderr(values, prompts):
    return clustered_stderr(list(zip(values, prompts, strict=True)))


def test_samples_of_one_prompt_do_not_count_as_independent():
    single = statistics.stdev(SCORES) / math.sqrt(len(SCORES))
    assert stderr(SCORES, range(6)) == pytest.approx(single)
    assert stderr(SCORES, [0] * 6) == pytest.approx(single), "one prompt"
    copies = [score for score in SCORES for _ in range(4)]
    assert stderr(copies, [prompt for prompt in range(6) for _ in range(4)]) == pytest.approx(
        single)
    assert stderr(SCORES, [0, 0, 1, 1, 2, 2]) == pytest.approx(
        statistics.stdev([-0.35, 2.5, 3.5]) / math.sqrt(3))
    assert math.isnan(stderr([], []))
    assert math.isnan(stderr([1.0], [0]))


def test_figures_leave_out_what_has_no_score():
    rows = [row(1.0, 0, rewards={"a": 0.5, "b": None}, metrics={"m": 2.0}),
            row(None, 1, rewards={"a": None, "b": None}, metrics={"m": 4.0}),
            row(4.0, 2, response="a b c", rewards={"a": 1.5, "b": 1.0}, metrics={"m": 6.0})]
    found = figures_of(rows)
    assert (found["samples"], found["scored"]) == (3, 2)
    assert found["figures"]["reward_mean"] == 2.5
    assert found["figures"]["metrics/m"] == 4.0
    assert found["figures"]["reward/a"] == 1.0
    assert found["figures"]["reward/b"] == 1.0
    assert found["figures"]["distinct_1"] == 3 / 7
    assert found["figures"]["distinct_3"] == 1.0
    assert found["stderr"]["reward_mean"] == 1.5
    assert math.isnan(found["stderr"]["reward/b"])
    assert found["stderr"]["metrics/m"] == pytest.approx(2 / math.sqrt(3))
    assert found["quantiles"]["p50"] == 2.5


def test_pass_at_k_is_the_mean_over_all_subsets_and_the_majority_is_scored():
    scores = {0: [1.0, 0.0, 0.0, 0.0, 1.0], 1: [0.0] * 5, 2: [1.0] * 5}
    predictions = {0: ["4", "7", "7", None, "4"], 1: [None] * 5, 2: ["1", "1", "2", "2", "3"]}
    rows = [row(score, prompt, extra={"pred": predictions[prompt][number]})
            for prompt, each in scores.items() for number, score in enumerate(each)]
    results = figures_of(rows)
    for k in (2, 4, 5):
        values = [statistics.mean(max(some) for some in itertools.combinations(each, k))
                  for each in scores.values()]
        assert results["figures"][f"pass_at_{k}"] == pytest.approx(statistics.mean(values))
        assert results["stderr"][f"pass_at_{k}"] == pytest.approx(
            statistics.stdev(values) / math.sqrt(3))
    # of the first prompt two answers are equally frequent, one right; the second has no answer
    assert results["figures"]["maj_at_5"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_a_share_of_outcomes_that_are_all_alike_is_no_certainty():
    """The least error is half of Wilson's interval at one standard error: at a share of 1 or 0 its
    bounds are 1 (or 0) and 1/(n+1) from there."""
    rows = [row(1.0, prompt, rewards={"a": 0.0, "b": 2.0}, metrics={"m": 1.0})
            for prompt in range(10)]
    errors = figures_of(rows)["stderr"]
    for name in ("reward_mean", "reward/a", "metrics/m", "finished_share"):
        assert errors[name] == pytest.approx(0.5 / 11), name
    assert errors["reward/b"] == errors["kl_mean"] == errors["response_tokens_mean"] == 0.0
    assert compare(rows, [row(0.0, prompt) for prompt in range(10)])["stderr"] == 0.5 / 11
    assert figures_of(rows[:4] * 2)["stderr"]["reward_mean"] == 0.1, "over prompts"
    mixed = [*rows, row(0.0, 10), row(0.0, 11)]
    assert figures_of(mixed)["stderr"]["reward_mean"] == pytest.approx(
        statistics.stdev([1.0] * 10 + [0.0] * 2) / math.sqrt(12))
    assert math.isnan(figures_of(rows[:1])["stderr"]["reward_mean"])


def test_a_tie_is_half_a_win_and_unscored_pairs_are_left_out():
    policy = [row(1.0, 0), row(1.0, 1), row(0.0, 2), row(None, 3), row(1.0, 4)]
    against = [row(0.0, 0), row(1.0, 1), row(2.0, 2), row(0.0, 3), row(0.5, 4)]
    found = compare(policy, against)
    assert [found[k] for k in ("compared", "wins", "ties", "losses")] == [4, 2, 1, 1]
    assert found["win_rate"] == 2.5 / 4
    assert found["difference"] == -0.5 / 4
    assert found["stderr"] == pytest.approx(statistics.stdev([1, 0.5, 0, 1]) / 2)
    assert math.isnan(compare(policy[3:4], against[3:4])["win_rate"])


@pytest.mark.parametrize("n", range(1, 7))
def test_best_of_n_is_the_mean_over_all_subsets(n):
    subsets = [max(subset) for subset in itertools.combinations(SCORES, n)]
    assert best_of_n(SCORES, n) == pytest.approx(statistics.mean(subsets))


def test_what_is_best_by_one_reward_is_worth_what_another_says():
    learned, gold = [0.1, 0.9, 0.5], [3.0, 1.0, 2.0]
    assert best_of_n(learned, 1, gold) == pytest.approx(2.0)
    assert best_of_n(learned, 2, gold) == pytest.approx((1.0 + 1.0 + 2.0) / 3)
    assert best_of_n(learned, 3, gold) == 1.0


def test_kl_of_best_of_n():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(0.1931, abs=1e-4)
    assert best_of_n_kl(16) == pytest.approx(1.8351, abs=1e-4)


def frontier(policy_scores, kl, *, plain=True):
    """Three prompts whose base scores are 0 to 15 (and shifted)."""
    base = [row(float(score + prompt), prompt) for prompt in range(3) for score in range(16)]
    policy = [row(score + prompt, prompt, kl=kl) for prompt in range(3) for score in policy_scores]
    return frontier_of(base, policy, plain_sampling=plain)


def test_a_policy_is_compared_with_best_of_n_at_its_own_kl():
    expected = best_of_n([float(s) for s in range(16)], 4) + 1.0
    found = frontier([14.0, 15.0], best_of_n_kl(4))
    assert found["points"][2]["reward"] == pytest.approx(expected)
    assert found["points"][2]["prompts"] == 3
    assert found["best_of_n_at_policy_kl"] == pytest.approx(expected)
    assert found["verdict"] == "above"
    assert found["difference"] == pytest.approx(15.5 - expected)
    assert frontier([2.0], best_of_n_kl(4))["verdict"] == "below"
    halfway = frontier([2.0], (best_of_n_kl(4) + best_of_n_kl(8)) / 2)
    assert halfway["best_of_n_at_policy_kl"] == pytest.approx(
        (halfway["points"][2]["reward"] + halfway["points"][3]["reward"]) / 2)
    below = frontier([2.0], -1e-7)
    assert below["best_of_n_at_policy_kl"] == found["points"][0]["reward"], "rounding below 0"
