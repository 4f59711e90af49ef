"""From raw scores to what lands on the tokens, by hand-worked numbers."""

import math
from dataclasses import asdict, replace

import pytest
from sessions import hand_rollout as rollout_of

from ppocli.config.schema import RewardConfig, TrainConfig
from ppocli.ppo.experience import PPOState, penalties_of, shaped_scores, update_moments
from ppocli.ppo.losses import RunningMoments
from ppocli.ppo.rollout import Rollout, RolloutExtras
from ppocli.ppo.step import to_experience
from ppocli.ppo.step_metrics import rollout_samples, step_figures
from ppocli.runs.episode import Episode
from ppocli.training.task import OptimizeResult

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
    ({"min_response_length": 11, "min_response_penalty": 4.0, "missing_eos_penalty": 1.0,
      "penalty_mode": "replace"}, [-4.0, -4.0, -4.0]),  # the larger one
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
    restored = PPOState.from_json(asdict(first))  # what a checkpoint keeps
    rollout = rollout_of([5.0, 7.0], [1, 1], [True, True])
    second = update_moments(restored, rollout, cfg)
    assert second.moments == RunningMoments(4, 4.0, 20.0)
    scores, _ = shaped_scores(rollout, second, cfg)
    assert scores.tolist() == pytest.approx([5 / (20 / 3) ** 0.5, 7 / (20 / 3) ** 0.5])
    clipped = cfg_of(scale="running", clip=6.0, clip_first=True)  # as trlX: measured clipped
    assert update_moments(STATE, rollout, clipped).moments.mean == 5.5
    scores, _ = shaped_scores(rollout, second, cfg_of(scale="running", center=True))
    assert scores.tolist() == pytest.approx([1 / (20 / 3) ** 0.5, 3 / (20 / 3) ** 0.5])


def test_reference_scale_keeps_the_deviation_of_the_first_rollout():
    cfg = cfg_of(scale="ref")
    state = update_moments(STATE, rollout_of([0.0, 4.0], [1, 1], [True, True]), cfg)
    state = update_moments(state, rollout_of([0.0, 100.0], [1, 1], [True, True]), cfg)
    assert state.ref_std == pytest.approx(8.0 ** 0.5)


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
    figures = step_figures(several, 0.0, OptimizeResult(0, 0, 0, False, 0.0, {}, 0),
                           to_experience(several, STATE, cfg), cfg)
    assert figures["reward/penalty/missing_eos"] == pytest.approx(0.5 / 3)
    assert (figures["reward/a"], figures["reward/b"]) == (1.0, 1.5)
    assert not {"rewards", "penalties"} & rollout_samples(THREE, 3, cfg_of())[0].keys()
