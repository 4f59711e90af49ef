"""Advantage estimators against numbers worked out by hand and naive float64 references."""

import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import mask_of

from ppocli.ppo.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    gae,
    grpo,
    reinforce_pp,
    rloo,
    token_rewards,
)


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def samples(rewards, lengths, groups=None, values=None, **over):
    rewards = torch.as_tensor(rewards)
    groups = range(len(rewards)) if groups is None else groups
    return AdvantageInputs(rewards, mask_of(lengths, rewards.shape[1]),
                           torch.tensor(list(groups)), values, **over)


# --- rewards ---------------------------------------------------------------------------------


def test_score_lands_on_the_last_valid_token_of_each_sample():
    mask = mask_of([1, 3, 2], 3)
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.full((3, 3), 0.5), mask,
                            kl_coef=0.2)
    expected = torch.tensor([[0.9, 0.0, 0.0], [-0.1, -0.1, 1.9], [-0.1, 2.9, 0.0]])
    torch.testing.assert_close(rewards, expected)
    dense = token_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.full((3, 3), 0.5), mask,
                          kl_coef=0.2, dense=mask * torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(dense, expected + mask * torch.tensor([0.1, 0.2, 0.3]))


# --- GAE -------------------------------------------------------------------------------------


def test_gae_by_hand():
    # gamma 0.5, lam 0.5: delta_1 = 1 - 0.4 = 0.6; delta_0 = 0 + 0.5*0.4 - 0.2 = 0
    # A_1 = 0.6; A_0 = 0 + 0.25 * 0.6 = 0.15; returns 0.35 and 1.0
    advantages, returns = gae(samples([[0.0, 1.0]], [2], values=torch.tensor([[0.2, 0.4]]),
                                      gamma=0.5, lam=0.5))
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


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95)])
def test_gae_equals_its_definition(gamma, lam):
    rng = random.Random(1)
    lengths, width = [7, 1, 4, 6], 7
    rewards = [[rng.gauss(0, 1) for _ in range(width)] for _ in lengths]
    values = [[rng.gauss(0, 1) for _ in range(width)] for _ in lengths]
    mask = mask_of(lengths, width)
    advantages, returns = gae(samples(double(rewards), lengths, gamma=gamma, lam=lam,
                                      values=double(values)))
    expected = naive_gae(rewards, values, lengths, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), (expected + np.array(values)) * mask.numpy(),
                               atol=1e-12)


def test_the_critic_learns_with_a_lambda_of_its_own():
    rng = random.Random(2)
    lengths, width = [7, 1, 4], 7
    rewards, values = ([[rng.gauss(0, 1) for _ in range(width)] for _ in lengths] for _ in range(2))
    mask = mask_of(lengths, width).numpy()
    advantages, returns = gae(samples(double(rewards), lengths, gamma=0.9, lam=0.8, lam_value=1.0,
                                      values=double(values)))
    np.testing.assert_allclose(advantages, naive_gae(rewards, values, lengths, 0.9, 0.8))
    targets = naive_gae(rewards, values, lengths, 0.9, 1.0) + np.array(values)
    np.testing.assert_allclose(returns, targets * mask)


def test_lambda_grows_with_the_length_of_the_response():
    """lambda = 1 - 1 / (alpha l), not below 0; the critic's stays ``lam``."""
    rng = random.Random(3)
    lengths, width, alpha = [7, 2, 1, 4], 7, 0.5
    rewards, values = ([[rng.gauss(0, 1) for _ in range(width)] for _ in lengths] for _ in range(2))
    advantages, returns = gae(samples(double(rewards), lengths, gamma=0.9, lam=0.95,
                                      lam_alpha=alpha, values=double(values)))
    for row, (length, lam) in enumerate(zip(lengths, [1 - 2 / 7, 0, 0, 0.5], strict=True)):
        one = naive_gae([rewards[row]], [values[row]], [length], 0.9, lam)[0]
        np.testing.assert_allclose(advantages[row], one, atol=1e-12)
    targets = naive_gae(rewards, values, lengths, 0.9, 0.95) + np.array(values)
    np.testing.assert_allclose(returns, targets * mask_of(lengths, width).numpy(), atol=1e-12)


def test_lambda_over_turns_grows_with_the_tokens_of_the_response():
    given = samples(double([[1.0, 2.0, 4.0, 8.0]]), [4], lam_alpha=0.5, gamma=0.9,
                    values=double([[0.1, 0.2, 0.3, 0.4]]))
    advantages, _ = gae(replace(given, turns=torch.tensor([[0, 0, 1, 1]])))
    first, second = naive_gae([[3.0, 12.0]], [[0.1, 0.3]], [2], 0.9, 1 - 1 / (0.5 * 4))[0]
    np.testing.assert_allclose(advantages[0], [first, first, second, second])


# --- what holds of every estimator --------------------------------------------------------------


def random_samples(seed, lengths, groups, width=6, **over):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), width, generator=generator)
    values = torch.randn(len(lengths), width, generator=generator)
    mask = mask_of(lengths, width)
    return samples(rewards * mask, lengths, groups, values, gamma=0.9, lam=0.8, **over)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_follows_a_response_touches_nothing(name):
    clean = random_samples(0, [2, 3, 6, 1], [0, 0, 1, 1])
    rewards, values = clean.rewards.clone(), clean.values.clone()
    rewards[~clean.mask], values[~clean.mask] = 100.0, -50.0
    dirty = AdvantageInputs(rewards, clean.mask, clean.groups, values, 0.9, 0.8)
    for a, b in zip(ESTIMATORS[name].estimate(clean), ESTIMATORS[name].estimate(dirty),
                    strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert (ESTIMATORS[name].estimate(clean)[0][~clean.mask] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_only_a_critic_has_returns_to_learn(name):
    given = random_samples(3, [2, 3], [0, 0])
    returns = ESTIMATORS[name].estimate(given)[1]
    assert (returns is not None) == ESTIMATORS[name].needs_critic
    if not ESTIMATORS[name].needs_critic:
        without = AdvantageInputs(given.rewards, given.mask, given.groups, None, 0.9, 0.8)
        assert torch.equal(ESTIMATORS[name].estimate(without)[0],
                           ESTIMATORS[name].estimate(given)[0])


# --- GRPO ----------------------------------------------------------------------------------------


def naive_groups(rewards, lengths, groups, how):
    """Advantages of whole responses, one sample at a time in float64."""
    outcomes = [math.fsum(row[:n]) for row, n in zip(rewards, lengths, strict=True)]
    found = []
    for i, own in enumerate(outcomes):
        peers = [o for j, o in enumerate(outcomes) if groups[j] == groups[i]]
        others = [o for j, o in enumerate(outcomes) if groups[j] == groups[i] and j != i]
        if not others:
            found.append(0.0)
        elif how == "rloo":
            found.append(own - math.fsum(others) / len(others))
        elif how == "batch":
            found.append((own - math.fsum(peers) / len(peers)) / statistics.stdev(outcomes))
        else:
            centred = own - math.fsum(peers) / len(peers)
            found.append(centred / (statistics.stdev(peers) + 1e-6) if how == "grpo" else centred)
    return [[a if t < n else 0.0 for t in range(len(rewards[0]))]
            for a, n in zip(found, lengths, strict=True)]


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "rloo", "batch"])
def test_group_estimators_equal_the_naive_reference(how):
    rng = random.Random(5)
    lengths = [3, 1, 5, 2, 4, 4, 2, 5]
    groups = [0, 0, 0, 1, 1, 2, 3, 3]  # of 3: invalid ones are missing
    rewards = [[rng.gauss(0, 1) if t < n else 0.0 for t in range(5)] for n in lengths]
    given = samples(double(rewards), lengths, groups, group_std=how == "grpo",
                    batch_std=how == "batch")
    advantages, _ = (rloo if how == "rloo" else grpo)(given)
    np.testing.assert_allclose(advantages.numpy(), naive_groups(rewards, lengths, groups, how),
                               rtol=0, atol=1e-6)


def grouped(n, *, spread, values=0.0):
    """512 responses of two tokens, n to a prompt: the last token's reward is 3 + the prompt's share
    (deviation ``spread``) + noise of deviation 1, of which ``values`` know the share given."""
    draws = torch.Generator().manual_seed(n)
    prompts = spread * torch.randn(512 // n, generator=draws).repeat_interleave(n)
    rewards = torch.stack([torch.zeros(512), 3.0 + prompts
                           + torch.randn(512, generator=draws)], 1)
    return samples(rewards, [2] * 512, (torch.arange(512) // n).tolist(),
                   values=(3.0 + values * prompts)[:, None].expand(512, 2))


def baseline_error(given, *, group_baseline):
    return gae(replace(given, group_baseline=group_baseline))[0][:, 0].var().item()


def test_samples_of_a_prompt_correct_each_others_values():
    alone, known = grouped(1, spread=2.0), grouped(4, spread=2.0, values=1.0)
    with_it, without = (gae(replace(alone, group_baseline=on)) for on in (True, False))
    assert torch.equal(with_it[0], without[0])
    assert torch.equal(with_it[1], without[1])
    # values that know prompts: nothing is left to correct
    assert baseline_error(known, group_baseline=True) == pytest.approx(
        baseline_error(known, group_baseline=False), rel=0.02)
    for n in (2, 4, 8):  # values that don't: less than alone, and less than RLOO leaves
        given = grouped(n, spread=1.0)
        error = baseline_error(given, group_baseline=True)
        assert error < 0.9 * baseline_error(given, group_baseline=False)
        assert error < rloo(given)[0][:, 0].var().item()


def test_group_baseline_by_hand():
    # returns less first values: 1, 3 and 4, 8; of the others: 3, 1 and 8, 4; both have mean 4.
    # slope = (-3*-1 + -1*-3 + 0*4 + 4*0) / (1 + 9 + 16 + 0) = 6/26
    given = samples(double([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 9.0]]), [2] * 4, [0, 0, 1, 1],
                    values=double([[0.0, 0.5], [0.0, 0.5], [1.0, 0.5], [1.0, 0.5]]),
                    group_baseline=True)
    missed = 4.0 + 6 / 26 * double([-1.0, -3.0, 4.0, 0.0])
    advantages, returns = gae(given)
    torch.testing.assert_close(advantages[:, 0], double([1.0, 3.0, 4.0, 8.0]) - missed)
    torch.testing.assert_close(advantages[:, 1], double([0.5, 2.5, 4.5, 8.5]) - missed)
    torch.testing.assert_close(returns, double([[1.0] * 2, [3.0] * 2, [5.0] * 2, [9.0] * 2]))
    # lambda 0: a correction that both sides of a step have cancels, but at the end
    advantages, returns = gae(replace(given, lam=0.0))
    torch.testing.assert_close(advantages[:, 0], double([0.5, 0.5, -0.5, -0.5]))
    torch.testing.assert_close(advantages[:, 1], double([0.5, 2.5, 4.5, 8.5]) - missed)
    torch.testing.assert_close(returns[:, 0], double([0.5] * 4) + missed)


# --- RLOO and REINFORCE++ ------------------------------------------------------------------------


def test_reinforce_pp_by_hand():
    # gamma 0.5: 1; 2 + 0.5; 0 + 1.25
    advantages, returns = reinforce_pp(samples([[0.0, 2.0, 1.0], [3.0, 9.0, 9.0]], [3, 1],
                                               gamma=0.5))
    torch.testing.assert_close(advantages, torch.tensor([[1.25, 2.5, 1.0], [3.0, 0.0, 0.0]]))
    assert returns is None
