"""The learning rate that ppo.step_kl steers: numbers worked by hand, and runs."""

import math
from dataclasses import replace

import pytest
from sessions import planned, session_of, small_config

from ppocli.config.schema_training import PPOConfig
from ppocli.config.tasks import steers_rate
from ppocli.distributed.ranks import StopFlag
from ppocli.ppo.experience import PPOState, first_rate
from ppocli.ppo.ppo_task import PPOTask, kl_of_updates, next_rate
from ppocli.training.loop import initial_state
from ppocli.training.optimize import optimize


@pytest.mark.parametrize(("kls", "expected"), [
    # the share of the whole that K updates see: sum over k < K of (k/K)^1.5
    ([0.0, 1.0], 1.0 / 0.5 ** 1.5),
    ([0.0, 1.0, 2.0], 3.0 / ((1 / 3) ** 1.5 + (2 / 3) ** 1.5)),
    ([0.0, 0.3 / 8, 0.3 * 0.5 ** 1.5, 0.3 * 0.75 ** 1.5], 0.3),
    # what the samples' policy was away at first is not this step's
    ([0.5, 1.5], 1.0 / 0.5 ** 1.5),
    ([0.2, 0.1], 0.0), ([0.4], 0.0), ([], 0.0)])
def test_the_kl_of_a_step_by_hand(kls, expected):
    updates = [{"approx_kl": kl - 0.1, "ratio": 1.1} for kl in kls]
    assert kl_of_updates(updates, 2.0) == pytest.approx(2 * expected)


@pytest.mark.parametrize(("rate", "kl", "target", "expected"), [
    (0.1, 0.01, 0.04, 0.2), (2.0, 0.09, 0.01, 2.0 / 3.0),
    (0.1, 1e-6, 1.0, 0.8), (4.0, 1e6, 1.0, 0.5),  # by 8 at most
    (0.3, 0.0, 1.0, 0.3), (0.3, 0.1, 0.0, 0.3), (0.3, math.nan, 1.0, 0.3),
    (0.3, math.inf, 1.0, 0.3)])
def test_the_next_rate_by_hand(rate, kl, target, expected):
    assert next_rate(rate, kl, target) == pytest.approx(expected)


@pytest.mark.parametrize(("lr", "factor"), [
    (1e-3, 0.1), (1.41e-4, 0.1), (2.82e-5, 0.5), (1.41e-5, 1.0), (1e-7, 1.0), (0.0, 1.0)])
def test_a_small_rate_is_begun_with_as_it_is(lr, factor):
    assert first_rate(lr) == pytest.approx(factor)


def steps_of(session, count: int):
    """Each step's rate factor, its result and its figures."""
    task, steps = PPOTask(session), []
    state = initial_state(task)
    for _ in range(count):
        batch, plan = planned(task, state)
        result = optimize(task, plan, state, StopFlag())
        finished = task.finish(state, batch, plan, result)
        steps.append((PPOState.from_json(state.task).rate, result, finished.row))
        state = replace(state, step=state.step + 1, episodes=state.episodes + len(batch),
                        updates=state.updates + result.updates, task=finished.state)
    return steps


def test_a_run_begins_with_a_tenth_of_its_rate_and_follows_the_kl(tmp_path):
    cfg = small_config(tmp_path, ppo__step_kl=0.01, ppo__num_steps=4, ppo__scheduler__name="linear")
    with session_of(cfg) as session:
        (first, result, row), (second, later, _) = steps_of(session, 2)
    moved = kl_of_updates(result.made["all"], row["rollout/response_tokens_mean"])
    assert (first, len(result.made["all"])) == (0.1, 8)
    assert row["policy/step_kl"] == pytest.approx(moved)
    assert moved > 0
    assert second == pytest.approx(next_rate(0.1, moved, 0.01))
    # the last of a step's updates, of 32 in a rate that falls linearly
    assert result.lr == pytest.approx(1e-3 * 0.1 * (1 - 7 / 32))
    assert later.lr == pytest.approx(1e-3 * second * (1 - 15 / 32))


@pytest.mark.parametrize("lr", [pytest.param(1e-5, marks=pytest.mark.slow), 1e-2])
def test_whatever_rate_is_typed_the_steps_become_equal(tmp_path, lr):
    """A rate that is 1000 times another, and KLs that would be a million times as large."""
    cfg = small_config(tmp_path, ppo__step_kl=1e-3, ppo__num_steps=9, ppo__optimizer__lr=lr)
    with session_of(cfg) as session:
        kls = [row["policy/step_kl"] for _, _, row in steps_of(session, 9 if lr < 1e-3 else 6)]
    assert 3e-4 < math.fsum(kls[-3:]) / 3 < 3e-3, kls


def test_a_reward_that_never_differs_leaves_the_rate_where_it_was(tmp_path):
    """The KL of updates without a gradient is rounding: a rate that followed it would be huge by
    the time that a reward comes."""
    cfg = small_config(tmp_path, ppo__step_kl=0.5, ppo__num_steps=4, ppo__kl_in="loss")
    with session_of(cfg, lambda outputs, **_: [0.0] * len(outputs)) as session:
        assert {rate for rate, _, _ in steps_of(session, 4)} == {0.1}


@pytest.mark.parametrize(("sizes", "steered"), [
    ({"ppo_epochs": 1, "mini_batch_size": 16}, False), ({"ppo_epochs": 2}, True),
    ({"ppo_epochs": 1, "mini_batch_size": 8}, True), ({"step_kl": None}, False)])
def test_one_update_a_step_measures_nothing_and_is_not_steered(sizes, steered):
    assert steers_rate(PPOConfig(**{"num_rollouts": 16, "mini_batch_size": 16, "step_kl": 0.01,
                                    **sizes})) == steered
