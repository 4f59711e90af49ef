"""From raw scores to what lands on the tokens, by hand-worked numbers."""

import math
from dataclasses import replace

import pytest
from helpers import jsonl
from runs import words
from sessions import hand_rollout as rollout_of

from ppocli.config.schema import RewardConfig, TrainConfig
from ppocli.ppo.experience import PPOState, penalties_of, shaped_scores, update_moments
from ppocli.ppo.losses import RunningMoments
from ppocli.ppo.rollout import Rollout, RolloutExtras
from ppocli.ppo.step import to_experience
from ppocli.ppo.step_metrics import rollout_samples
from ppocli.runs.episode import Episode

STATE = PPOState(kl_coef=0.0, init_kl_coef=0.0)


def cfg_of(max_new_tokens: int = 10, **reward: object) -> TrainConfig:
    cfg = TrainConfig()
    return replace(cfg, reward=replace(RewardConfig(fn="x:y"), **reward), generation=replace(
        cfg.generation, max_new_tokens=max_new_tokens))


def shaped(rollout: Rollout, state: PPOState = STATE, **reward: object) -> list[float]:
    scores, dense = shaped_scores(rollout, state, cfg_of(**reward))
    assert dense is None
    return scores.tolist()


# three samples: one ended after 2 tokens, one after 8, one never (10)
THREE = rollout_of([1.0, 2.0, 3.0], [2, 8, 10], [True, True, False])


@pytest.mark.parametrize(("reward", "expected"), [
    ({}, [1.0, 2.0, 3.0]),
    ({"missing_eos_penalty": 0.5}, [1.0, 2.0, 2.5]),  # TRL: score minus penalty
    ({"missing_eos_penalty": 3.0, "penalty_mode": "replace"}, [1.0, 2.0, -3.0]),  # torchtune
    ({"min_response_length": 8, "min_response_penalty": 4.0, "penalty_mode": "replace"},
     [-4.0, 2.0, 3.0]),
    ({"min_response_length": 9, "min_response_penalty": 4.0, "missing_eos_penalty": 1.0},
     [-3.0, -2.0, 2.0]),
    # up to 6 of 10 tokens nothing, at 8 half, at 10 all of it
    ({"overlong_buffer": 4}, [1.0, 1.5, 2.0]),
    ({"overlong_buffer": 4, "missing_eos_penalty": 3.0, "penalty_mode": "replace"},
     [1.0, 1.5, -4.0]),
    ({"clip": 1.5, "missing_eos_penalty": 1.0}, [1.0, 1.5, 0.5]),  # clipped first
    ({"overlong_buffer": 4, "overlong_penalty": 0.5}, [1.0, 1.75, 2.5]),
    ({"scale": "ref", "ref_mean": 1.0, "ref_std": 2.0}, [0.0, 0.5, 1.0]),
    ({"scale": "ref", "ref_std": 2.0, "clip": 1.2}, [0.5, 1.0, 1.2]),
    ({"scale": "ref", "ref_std": 2.0, "clip": 1.2, "clip_first": True}, [0.5, 0.6, 0.6])])
def test_scores_after_shaping(reward, expected):
    state = replace(STATE, ref_std=reward.get("ref_std"))
    assert shaped(THREE, state, **reward) == pytest.approx(expected, abs=1e-7)


def test_an_episode_is_as_long_as_what_was_said_and_observed():
    rows = THREE.sequences
    episodes = replace(THREE, sequences=replace(rows, lengths=rows.lengths + 2),
                       extras=RolloutExtras(episodes=[Episode("", (), "done")] * 3))
    assert shaped(episodes, overlong_buffer=6) == pytest.approx([1.0, 1.0, 2.0])


def test_both_penalties_come_off_but_only_the_larger_one_replaces():
    """A response cut short by its drawn length: 3 tokens, never ended."""
    cut = rollout_of([5.0], [3], [False])
    both = {"missing_eos_penalty": 1.0, "min_response_length": 4, "min_response_penalty": 2.0}
    assert shaped(cut, **both) == [2.0]
    assert shaped(cut, **both, penalty_mode="replace") == [-2.0]


@pytest.mark.parametrize(("reward", "expected"), [
    ({"penalty_mode": "replace"}, [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]),
    ({"clip": 2.5}, [[1.0, 2.0, 0.0], [2.5, 2.5, 1.0]])])
def test_a_penalty_replaces_all_of_a_dense_reward(reward, expected):
    rollout = rollout_of([3.0, 7.0], [2, 3], [True, False], [[1.0, 2.0, 0.0], [3.0, 3.0, 1.0]])
    scores, dense = shaped_scores(rollout, STATE, cfg_of(missing_eos_penalty=2.0, **reward))
    assert scores.tolist() == [0.0, -2.0]
    assert dense.tolist() == expected


def test_running_scale_divides_by_the_deviation_of_all_scores_so_far():
    """Scores 1, 3 and then 5, 7: mean 4, squares 9 + 1 + 1 + 9 = 20, deviation sqrt(20 / 3)."""
    cfg = cfg_of(scale="running")
    first = update_moments(STATE, rollout_of([1.0, 3.0], [1, 1], [True, True]), cfg)
    assert first.moments == RunningMoments(2, 2.0, 2.0)
    restored = PPOState.from_json(first.to_json())  # what a checkpoint keeps
    rollout = rollout_of([5.0, 7.0], [1, 1], [True, True])
    second = update_moments(restored, rollout, cfg)
    assert second.moments == RunningMoments(4, 4.0, 20.0)
    scores, _ = shaped_scores(rollout, second, cfg)
    assert scores.tolist() == pytest.approx([5 / (20 / 3) ** 0.5, 7 / (20 / 3) ** 0.5])
    scores, _ = shaped_scores(rollout, second, cfg_of(scale="running", center=True))
    assert scores.tolist() == pytest.approx([1 / (20 / 3) ** 0.5, 3 / (20 / 3) ** 0.5])


def test_reference_scale_keeps_the_deviation_of_the_first_rollout():
    cfg = cfg_of(scale="ref")
    state = update_moments(STATE, rollout_of([0.0, 4.0], [1, 1], [True, True]), cfg)
    state = update_moments(state, rollout_of([0.0, 100.0], [1, 1], [True, True]), cfg)
    assert state.ref_std == pytest.approx(8.0 ** 0.5)


@pytest.mark.parametrize("scale", ["running", "ref"])
def test_what_is_clipped_before_scaling_is_measured_clipped(scale):
    """As trlX: scores 0.5, -1, 1 and 0.2 after the clip deviate by 0.85. Entries of a dense reward
    are clipped before they are summed: 1.5, -1 deviate by sqrt(2 * 1.25 ** 2) from their mean."""
    cfg = cfg_of(scale=scale, clip=1.0, clip_first=True)
    rollout = rollout_of([0.5, -1.0, 100.0, 0.2], [1] * 4, [True] * 4)
    state = update_moments(STATE, rollout, cfg)
    scores, _ = shaped_scores(rollout, state, cfg)
    assert scores.tolist() == pytest.approx([0.588235, -1.176471, 1.176471, 0.235294], abs=1e-6)
    tokens = rollout_of([50.5, -2.0], [2, 1], [True, True], [[50.0, 0.5], [-2.0, 0.0]])
    state = update_moments(STATE, tokens, cfg)
    assert state.moments.std == pytest.approx(1.25 * 2 ** 0.5)
    _, dense = shaped_scores(tokens, state, cfg)
    assert dense.flatten().tolist() == pytest.approx([0.565685, 0.282843, -0.565685, 0.0], abs=1e-6)
    # clipped after it, as TRL does, they are measured as they came
    assert update_moments(STATE, tokens, cfg_of(scale=scale, clip=1.0)).moments.mean == 24.25


def test_whitened_rewards_keep_their_mean():
    """Rewards 0, 2 (first sample) and 0, 4: mean 1.5, variance (2.25 + 0.25 + 2.25 + 6.25) / 4 =
    2.75. Whitened: -1.5, 0.5, -1.5 and 2.5 over sqrt(2.75), plus 1.5. Undiscounted returns without
    values are the rewards still to come."""
    cfg = cfg_of()
    cfg = replace(cfg, ppo=replace(cfg.ppo, whiten_rewards=True, lam=1.0, whiten_advantages=False))
    found = to_experience(rollout_of([2.0, 4.0], [2, 2], [True, True]), STATE, cfg).returns
    rewards = [0.5954660, 1.8015113, 0.5954660, 3.0075568]
    assert found.flatten().tolist() == pytest.approx(
        [rewards[0] + rewards[1], rewards[1], rewards[2] + rewards[3], rewards[3]], abs=1e-5)


def test_penalties_and_rewards_are_told_apart():
    cfg = cfg_of(missing_eos_penalty=0.5, overlong_buffer=4)
    assert penalties_of(THREE, cfg)["missing_eos"].tolist() == pytest.approx(
        [math.nan, math.nan, 0.5], nan_ok=True)
    assert penalties_of(THREE, cfg_of()) == {}
    several = replace(THREE, parts={"a": [1.0, 1.0, 1.0], "b": [None, 1.0, 2.0]})
    rows = rollout_samples(several, 3, cfg)
    assert rows[0]["penalties"] == {"missing_eos": None, "overlong": 0.0}
    assert rows[2]["penalties"] == {"missing_eos": 0.5, "overlong": 1.0}
    assert [row["rewards"] for row in rows] == [
        {"a": 1.0, "b": None}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}]
    assert not {"rewards", "penalties"} & rollout_samples(THREE, 3, cfg_of())[0].keys()


def test_what_a_run_writes_of_rewards_penalties_and_tokens(command, world):
    command(*words(
        "reward.fn=null", "reward.fns.good.fn=rewards.py:plain", "reward.fns.long.fn=length",
        "reward.fns.long.kwargs.target=4", "reward.fns.long.weight=0.5", "run_name=r",
        "reward.missing_eos_penalty=1", "ppo.num_steps=1", "tracking.log_rollouts=true",
        "tracking.rollout_tokens=true"), code=0)
    row = jsonl(world / "runs/r/metrics.jsonl")[-1]
    samples = jsonl(world / "runs/r/samples.jsonl")
    drawn = [sample for sample in samples if sample["kind"] == "rollout"]
    assert len(drawn) == 12
    for sample in samples:
        parts = sample["rewards"]
        assert sample["score"] == pytest.approx(parts["good"] + 0.5 * parts["long"])
    for sample in drawn:
        assert sample["penalties"] == {"missing_eos": None if sample["finished"] else 1.0}
        for name in ("response_ids", "logprobs", "values", "kl_per_token"):
            assert len(sample[name]) == sample["response_tokens"]
    unended = sum(not sample["finished"] for sample in drawn)
    assert row["reward/penalty/missing_eos"] == pytest.approx(unended / 12)
    assert row["reward/long"] == pytest.approx(sum(s["rewards"]["long"] for s in drawn) / 12)
