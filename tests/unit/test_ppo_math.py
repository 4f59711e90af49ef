"""Hand-worked numbers for whitening, KL, moments, noise and schedule."""

import math

import numpy as np
import pytest
import torch

from ppocli.config.schema_training import SchedulerConfig
from ppocli.ppo.losses import RunningMoments, adapt_kl_coef, kl_per_token, masked_mean, whiten
from ppocli.sampling.samples import EVALUATION, ROLLOUT, uniform
from ppocli.training.optimize import lr_factor

# --- whitening -------------------------------------------------------------------------------


def test_whiten_by_hand():
    # 1, 2, 3 valid: mean 2, biased variance 2/3
    x = torch.tensor([[1.0, 2.0], [3.0, 99.0]])
    mask = torch.tensor([[True, True], [True, False]])
    root = math.sqrt(2 / 3)
    centred = whiten(x, mask, center=True)
    torch.testing.assert_close(centred, torch.tensor([[-1 / root, 0.0], [1 / root, 0.0]]))
    kept = whiten(x, mask, center=False)
    torch.testing.assert_close(kept, torch.tensor([[2 - 1 / root, 2.0], [2 + 1 / root, 0.0]]))


def test_whitening_without_spread_or_entries_is_finite():
    assert whiten(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), center=True).tolist() == [
        [0.0, 0.0], [0.0, 0.0]]
    assert whiten(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool), center=True).tolist() == [
        [0.0, 0.0]]
    assert float(masked_mean(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))) == 0.0


# --- KL --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected", "turned"), [
    ("k1", 0.5, -0.5), ("abs", 0.5, 0.5), ("k2", 0.125, 0.125),
    ("k3", math.exp(-0.5) - 1 + 0.5, math.exp(0.5) - 1.5),
    ("k3+", math.exp(-0.5) - 1 + 0.5, math.exp(0.5) - 1.5)])
def test_kl_estimators_by_hand(name, expected, turned):
    """``turned`` where the reference likes the token more."""
    one, other = torch.tensor([-1.0]), torch.tensor([-1.5])
    torch.testing.assert_close(kl_per_token(one, other, name), torch.tensor([expected]))
    torch.testing.assert_close(kl_per_token(other, one, name), torch.tensor([turned]))


@pytest.mark.parametrize(("coef", "kl", "horizon", "samples", "expected"), [
    (0.2, 30.0, 10000, 256, 0.201024),  # clipped to +0.2; n 256 of horizon 10000
    (0.2, 6.6, 10000, 100, 0.2 * (1 + 0.1 * 0.01)), (0.2, 0.0, 10000, 100, 0.2 * (1 - 0.2 * 0.01)),
    # a rollout beyond the horizon can't make the penalty a reward
    (0.1, 0.0, 1, 500, 0.08), (0.1, 99.0, 1, 500, 0.12),
    (0.2, -3.0, 100, 100, 0.2)])  # a negative KL never moves the coefficient
def test_controller_numbers(coef, kl, horizon, samples, expected):
    assert adapt_kl_coef(coef, kl, target=6, horizon=horizon, num_samples=samples) == \
        pytest.approx(expected)


# --- moments, noise, schedule ----------------------------------------------------------------


def test_moments_merge_to_the_moments_of_all():
    xs, ys = [1.0, 2.0, 4.0], [10.0, -3.0]
    both = RunningMoments.of(xs).merge(RunningMoments.of(ys))
    assert both.mean == pytest.approx(np.mean(xs + ys))
    assert both.std == pytest.approx(np.std(xs + ys, ddof=1))
    assert RunningMoments().merge(RunningMoments.of(xs)) == RunningMoments.of(xs)
    assert RunningMoments.of([3.0]).std == 1.0
    assert RunningMoments.of([0.1] * 12).std == 1.0  # rounding errors are no spread
    assert RunningMoments.of([]).count == 0


def test_noise_depends_on_seed_stream_episode_and_position_only():
    whole = uniform(7, ROLLOUT, range(20), 16)
    assert np.array_equal(uniform(7, ROLLOUT, [13, 4], 9), whole[[13, 4], :9])
    assert not np.array_equal(uniform(8, ROLLOUT, range(20), 16), whole)
    assert not np.array_equal(uniform(7, EVALUATION, range(20), 16), whole)


def test_noise_is_uniform_and_uncorrelated():
    u = uniform(0, ROLLOUT, range(2000), 50)
    assert u.min() > 0.0
    assert u.max() < 1.0
    counts, _ = np.histogram(u, bins=20, range=(0, 1))
    expected = u.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi square, 19 degrees: p ~ 7e-4
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.02


def test_schedule_values():
    def at(update, name, warmup=0, ratio=0.0):
        return lr_factor(SchedulerConfig(name, warmup, ratio), update, total_updates=10)

    assert [at(u, "constant", 3) for u in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert at(0, "linear") == 1.0
    assert at(5, "linear") == pytest.approx(0.5)
    assert at(10, "linear") == 0.0
    assert at(50, "linear", ratio=0.1) == pytest.approx(0.1)
    assert at(5, "cosine", ratio=0.2) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="nope"):
        at(5, "nope")


@pytest.mark.parametrize(("name", "kwargs", "by_hand"), [
    ("cosine_with_restarts", {"num_cycles": 2}, {2: 1.0, 4: 0.5, 6: 1.0, 8: 0.5, 10: 0.0}),
    ("polynomial", {"power": 2.0}, {2: 1.0, 6: 0.25, 10: 0.0}),
    ("inverse_sqrt", {"timescale": 2}, {2: 1.0, 8: 0.5}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"},
     {2: 1.0, 6: 1.0, 8: 0.5, 10: 0.0})])
def test_schedules_of_transformers(name, kwargs, by_hand):
    """Two updates of warm-up, of ten; the lowest rate lifts what is above it alike."""
    for lowest in (0.0, 0.2):
        schedule = SchedulerConfig(name, 2, lowest, kwargs)
        for update, shape in by_hand.items():
            assert lr_factor(schedule, update, 10) == pytest.approx(lowest + (1 - lowest) * shape)
    assert lr_factor(schedule, 0, 10) == pytest.approx(1 / 3)
