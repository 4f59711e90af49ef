"""Hand-worked numbers and a naive float64 reference for every formula of the algorithm."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from ppocli.ppo.advantages import gae, token_rewards
from ppocli.ppo.kl import adapt_kl_coef, kl_per_token
from ppocli.ppo.losses import AGGREGATIONS, ppo_loss, token_weights
from ppocli.ppo.masking import masked_mean, whiten
from ppocli.ppo.moments import RunningMoments, moments_of, scale_scores
from ppocli.ppo.noise import EVALUATION, ROLLOUT, uniform
from ppocli.ppo.schedule import lr_factor


def mask_of(lengths, width):
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


# --- rewards ---------------------------------------------------------------------------------


def test_score_lands_on_the_last_valid_token_of_each_sample():
    mask = mask_of([1, 3, 2], 3)
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.full((3, 3), 0.5), mask,
                            kl_coef=0.2)
    expected = [[0.9, 0.0, 0.0], [-0.1, -0.1, 1.9], [-0.1, 2.9, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_a_response_without_tokens_gets_nothing():
    rewards = token_rewards(torch.tensor([5.0]), torch.zeros(1, 2), mask_of([0], 2), kl_coef=1.0)
    assert rewards.tolist() == [[0.0, 0.0]]


def test_dense_rewards_stay_on_their_tokens():
    dense = torch.tensor([[0.1, 0.2, 0.3]])
    rewards = token_rewards(torch.tensor([1.0]), torch.zeros(1, 3), mask_of([3], 3), kl_coef=0.0,
                            dense=dense)
    torch.testing.assert_close(rewards, torch.tensor([[0.1, 0.2, 1.3]]))


# --- GAE -------------------------------------------------------------------------------------


def test_gae_by_hand():
    # gamma 0.5, lam 0.5: delta_1 = 1 - 0.4 = 0.6; delta_0 = 0 + 0.5*0.4 - 0.2 = 0
    # A_1 = 0.6; A_0 = 0 + 0.25 * 0.6 = 0.15; returns 0.35 and 1.0
    advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.2, 0.4]]),
                              mask_of([2], 2), gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.15, 0.6]]))
    torch.testing.assert_close(returns, torch.tensor([[0.35, 1.0]]))


def naive_gae(rewards, values, lengths, gamma, lam):
    """A_t as the double sum of its definition, float64, one token at a time."""
    out = np.zeros(np.shape(rewards))
    for i, n in enumerate(lengths):
        for t in range(n):
            for k in range(t, n):
                after = values[i][k + 1] if k + 1 < n else 0.0
                out[i][t] += (gamma * lam) ** (k - t) * (
                    rewards[i][k] + gamma * after - values[i][k])
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_gae_equals_its_definition(gamma, lam):
    rng = random.Random(1)
    lengths, width = [7, 1, 4, 6], 7
    rewards = [[rng.gauss(0, 1) for _ in range(width)] for _ in lengths]
    values = [[rng.gauss(0, 1) for _ in range(width)] for _ in lengths]
    mask = mask_of(lengths, width)
    advantages, returns = gae(torch.tensor(rewards, dtype=torch.float64),
                              torch.tensor(values, dtype=torch.float64), mask, gamma=gamma, lam=lam)
    expected = naive_gae(rewards, values, lengths, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), (expected + np.array(values)) * mask.numpy(),
                               atol=1e-12)


def test_what_follows_a_response_touches_nothing():
    mask = mask_of([2, 3], 3)
    rewards, values = torch.randn(2, 3), torch.randn(2, 3)
    polluted_rewards, polluted_values = rewards.clone(), values.clone()
    polluted_rewards[0, 2], polluted_values[0, 2] = 100.0, -50.0
    clean = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    dirty = gae(polluted_rewards, polluted_values, mask, gamma=1.0, lam=0.95)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)


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


def test_whitening_over_two_ranks_equals_whitening_the_whole():
    x, mask = torch.randn(6, 5), mask_of([5, 2, 3, 1, 4, 5], 5)
    whole = whiten(x, mask, center=True)
    sums = []
    # every rank contributes its sums first; then each computes with the totals
    for step in range(2):
        parts = []
        for rows in (slice(0, 2), slice(2, 6)):
            calls = iter(sums)

            def reduce(local, calls=calls, parts=parts):
                known = next(calls, None)
                if known is None:
                    parts.append(local)
                    raise StopIteration
                return known

            with pytest.raises((StopIteration, RuntimeError)):
                whiten(x[rows], mask[rows], center=True, reduce=reduce)
        sums.append(parts[0] + parts[1])
        assert len(parts) == 2, step
    for rows in (slice(0, 2), slice(2, 6)):
        calls = iter(sums)
        got = whiten(x[rows], mask[rows], center=True, reduce=lambda _, calls=calls: next(calls))
        torch.testing.assert_close(got, whole[rows])


def test_whitening_without_spread_or_entries_is_finite():
    assert whiten(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), center=True).tolist() == [
        [0.0, 0.0], [0.0, 0.0]]
    assert whiten(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool), center=True).tolist() == [
        [0.0, 0.0]]
    assert float(masked_mean(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))) == 0.0


# --- KL --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [
    ("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_kl_estimators_by_hand(name, expected):
    lp, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    torch.testing.assert_close(kl_per_token(lp, ref, name), torch.tensor([expected]))


def test_kl_estimators_when_the_reference_likes_the_token_more():
    lp, ref = torch.tensor([-1.5]), torch.tensor([-1.0])
    assert kl_per_token(lp, ref, "k1").item() == pytest.approx(-0.5)
    assert kl_per_token(lp, ref, "abs").item() == pytest.approx(0.5)
    assert kl_per_token(lp, ref, "k3").item() == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)


def test_k1_and_k3_estimate_the_same_divergence():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    true = float((p * (p / q).log()).sum())
    for name in ("k1", "k3"):
        assert float((p * kl_per_token(p.log(), q.log(), name)).sum()) == pytest.approx(true,
                                                                                        abs=1e-6)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "k9")


def test_controller_numbers():
    # kl 30 at target 6 is clipped to +0.2; n 256 of horizon 10000
    assert adapt_kl_coef(0.2, 30.0, target=6, horizon=10000, num_samples=256) == pytest.approx(
        0.201024)
    assert adapt_kl_coef(0.2, 6.6, target=6, horizon=10000, num_samples=100) == pytest.approx(
        0.2 * (1 + 0.1 * 0.01))
    assert adapt_kl_coef(0.2, 0.0, target=6, horizon=10000, num_samples=100) == pytest.approx(
        0.2 * (1 - 0.2 * 0.01))


def test_a_rollout_beyond_the_horizon_cannot_make_the_penalty_a_reward():
    assert adapt_kl_coef(0.1, 0.0, target=6, horizon=1, num_samples=500) == pytest.approx(0.08)
    assert adapt_kl_coef(0.1, 99.0, target=6, horizon=1, num_samples=500) == pytest.approx(0.12)


def test_a_negative_kl_never_moves_the_coefficient():
    assert adapt_kl_coef(0.2, -3.0, target=6, horizon=100, num_samples=100) == 0.2


# --- losses ----------------------------------------------------------------------------------


def loss_of(**over):
    given = {"logprobs": torch.tensor([math.log(1.5)]), "values": torch.tensor([1.0]),
             "entropy": None, "old_logprobs": torch.zeros(1), "old_values": torch.tensor([0.5]),
             "advantages": torch.tensor([1.0]), "returns": torch.tensor([2.0]),
             "weights": torch.ones(1), "total_tokens": 1, "cliprange": 0.2,
             "cliprange_value": 0.2, "vf_coef": 0.1, "ent_coef": 0.0}
    return ppo_loss(**{**given, **over})


def test_policy_loss_by_hand():
    assert loss_of().policy.item() == pytest.approx(-1.2)  # clipped: -1 * 1.2 > -1 * 1.5
    assert loss_of(advantages=torch.tensor([-1.0])).policy.item() == pytest.approx(1.5)
    low = torch.tensor([math.log(0.5)])
    assert loss_of(logprobs=low).policy.item() == pytest.approx(-0.5)
    pushed = loss_of(logprobs=low, advantages=torch.tensor([-1.0]))
    assert pushed.policy.item() == pytest.approx(0.8)


def test_value_loss_by_hand():
    # (1-2)^2 = 1; clipped value 0.5 + 0.2 = 0.7: (0.7-2)^2 = 1.69; half the larger
    loss = loss_of()
    assert loss.value.item() == pytest.approx(0.845)
    assert loss.total.item() == pytest.approx(-1.2 + 0.1 * 0.845)
    assert loss.value_clipfrac.item() == 1.0
    assert loss.policy_clipfrac.item() == 1.0
    assert loss.ratio.item() == pytest.approx(1.5)
    assert loss.approx_kl.item() == pytest.approx(-math.log(1.5))


def test_entropy_bonus_lowers_the_loss():
    with_bonus = loss_of(entropy=torch.tensor([2.0]), ent_coef=0.01)
    assert with_bonus.total.item() == pytest.approx(loss_of().total.item() - 0.02)


def naive_loss(rows, aggregation, clip, clip_v, vf):
    """The whole update, one token at a time in float64."""
    total = 0.0
    tokens = sum(len(r["lp"]) for r in rows)
    for r in rows:
        for j in range(len(r["lp"])):
            ratio = math.exp(r["lp"][j] - r["old"][j])
            a = r["adv"][j]
            pg = max(-a * ratio, -a * min(max(ratio, 1 - clip), 1 + clip))
            v, vo, ret = r["v"][j], r["v_old"][j], r["ret"][j]
            vc = vo + min(max(v - vo, -clip_v), clip_v)
            loss = pg + vf * 0.5 * max((v - ret) ** 2, (vc - ret) ** 2)
            if aggregation == "token-mean":
                total += loss / tokens
            elif aggregation == "seq-mean-token-mean":
                total += loss / len(r["lp"]) / len(rows)
            else:
                total += loss / len(rows)
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [[0, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]])
def test_loss_equals_the_naive_reference_however_it_is_cut(aggregation, cut):
    rng = random.Random(3)
    lengths = [4, 1, 6, 2, 3]
    names = ("lp", "old", "adv", "v", "v_old", "ret")
    rows = [{n: [rng.gauss(0, 0.5) for _ in range(k)] for n in names} for k in lengths]
    total = 0.0
    for start, end in itertools.pairwise(cut):
        part = rows[start:end]
        sizes = torch.tensor(lengths[start:end])
        weights = token_weights(sizes, aggregation=aggregation, total_tokens=sum(lengths),
                                total_samples=len(lengths)).double()

        def flat(name, part=part):
            return torch.tensor([x for r in part for x in r[name]], dtype=torch.float64)

        total += ppo_loss(
            logprobs=flat("lp"), values=flat("v"), entropy=None, old_logprobs=flat("old"),
            old_values=flat("v_old"), advantages=flat("adv"), returns=flat("ret"),
            weights=weights.repeat_interleave(sizes), total_tokens=sum(lengths), cliprange=0.2,
            cliprange_value=0.3, vf_coef=0.7, ent_coef=0.0).total.item()
    assert total == pytest.approx(naive_loss(rows, aggregation, 0.2, 0.3, 0.7), rel=1e-6)


# --- moments, noise, schedule ----------------------------------------------------------------


def test_moments_merge_to_the_moments_of_all():
    xs, ys = [1.0, 2.0, 4.0], [10.0, -3.0]
    both = moments_of(xs).merge(moments_of(ys))
    assert both.mean == pytest.approx(np.mean(xs + ys))
    assert both.std == pytest.approx(np.std(xs + ys, ddof=1))
    assert RunningMoments().merge(moments_of(xs)) == moments_of(xs)
    assert moments_of([3.0]).std == 1.0
    assert moments_of([0.1] * 12).std == 1.0  # rounding errors are no spread
    assert moments_of([]).count == 0


def test_scale_then_clip():
    assert scale_scores([10.0, -1.0], std=2.0, clip=3.0) == [3.0, -0.5]
    assert scale_scores([4.0], std=2.0, mean=1.0) == [1.5]


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
        return lr_factor(update, name=name, total_updates=10, warmup_updates=warmup,
                         min_lr_ratio=ratio)

    assert [at(u, "constant", 3) for u in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert at(0, "linear") == 1.0
    assert at(5, "linear") == pytest.approx(0.5)
    assert at(10, "linear") == 0.0
    assert at(50, "linear", ratio=0.1) == pytest.approx(0.1)
    assert at(5, "cosine", ratio=0.2) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="nope"):
        at(5, "nope")
