"""Samples of another policy: importance weights, rejection, rollouts that waited (staleness)."""

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import mask_of, refused, save_lm
from sessions import (
    assert_own_logprobs,
    gradients,
    hand_rollout,
    idle_context,
    rollout_of,
    session_of,
    small_config,
)
from test_ppo_losses import loss_of

from ppocli.distributed.ranks import StopFlag
from ppocli.errors import ConfigError
from ppocli.ppo.advantages import CRITERIA, accepted_tokens, importance_weights
from ppocli.ppo.experience import PPOState
from ppocli.ppo.ppo_task import PPOTask
from ppocli.ppo.rollout import Rollout, RolloutExtras
from ppocli.ppo.step import to_experience, update_of
from ppocli.ppo.step_metrics import gap_figures
from ppocli.training.optimize import optimize
from ppocli.training.state import TrainState
from ppocli.training.task import Plan

RATIOS = [[2.0, 4.0, 9.0], [0.5, 1.5, 3.0]]
"""of the trained policy to the one that sampled; the first response has two tokens"""
MASK = mask_of([2, 3], 3)


@pytest.mark.parametrize(("level", "cap", "wanted"), [
    ("token", 2.0, [[2.0, 2.0, 0.0], [0.5, 1.5, 2.0]]),
    ("token", 10.0, [[2.0, 4.0, 0.0], [0.5, 1.5, 3.0]]),
    ("sequence", 10.0, [[8.0, 8.0, 0.0], [2.25] * 3]),  # 2 * 4, and 0.5 * 1.5 * 3
    ("sequence", 2.5, [[2.5, 2.5, 0.0], [2.25] * 3])])
def test_weights_by_hand(level, cap, wanted):
    found = importance_weights(torch.tensor(RATIOS).log(), MASK, level=level, cap=cap)
    torch.testing.assert_close(found, torch.tensor(wanted))


def naively_accepted(gaps: list[list[float]], name: str, low: float, high: float
                     ) -> list[list[bool]]:
    kinds = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    level, kind = name.rsplit("_", 1)
    found = []
    for row in gaps:
        each = [kinds[kind](x) for x in row]
        whole = {"token": None, "seq_sum": math.fsum(each), "seq_mean": math.fsum(each) / len(each),
                 "seq_max": max(each)}[level]
        found.append([low <= (x if whole is None else whole) <= high for x in each])
    return found


@pytest.mark.parametrize("name", CRITERIA)
def test_rejection_against_a_naive_loop(name):
    draw = random.Random(3)
    gaps = [[draw.gauss(0, 0.5) for _ in range(length)] for length in [1, 7, 4, 6, 2] * 8]
    tensor = torch.zeros(len(gaps), 7)
    for row, values in zip(tensor, gaps, strict=True):
        row[:len(values)] = torch.tensor(values)
    tensor[0, 3] = 100.0  # padding says nothing
    mask = mask_of([len(row) for row in gaps], 7)
    bound = [0.7, 1.3] if name.endswith("k1") else 0.1
    low, high = (math.log(0.7), math.log(1.3)) if name.endswith("k1") else (-math.inf, 0.1)
    found = accepted_tokens(tensor, mask, {name: bound})
    wanted = naively_accepted(gaps, name, low, high)
    assert [row[kept].tolist() for row, kept in zip(found, mask, strict=True)] == wanted
    assert not found[~mask].any()
    assert 0 < found.sum() < mask.sum()


def test_all_criteria_have_to_be_met_and_one_ratio_bounds_both_sides():
    gap = torch.tensor(RATIOS).log()
    assert accepted_tokens(gap, MASK, {"token_k1": 2.5}).tolist() == [[True, False, False],
                                                               [True, True, False]]
    both = {"token_k1": 2.5, "seq_sum_k1": [1.0, 5.0]}  # the products are 8 and 2.25
    assert accepted_tokens(gap, MASK, both).tolist() == [[False] * 3, [True, True, False]]


def test_weights_are_of_the_policy_loss_alone():
    two = {"logprobs": torch.zeros(2), "old_logprobs": torch.zeros(2), "weights": torch.ones(2) / 2,
           "advantages": torch.tensor([1.0, -2.0]), "values": torch.zeros(2), "total_tokens": 2,
           "old_values": torch.zeros(2), "returns": torch.ones(2), "ent_coef": 0.1, "kl_coef": 1.0,
           "entropy": torch.ones(2), "ref_logprobs": torch.full((2,), -0.5), "kl_estimator": "k2"}
    plain, found = loss_of(**two), loss_of(**two, importance=torch.tensor([0.5, 2.0]))
    assert (plain.policy.item(), found.policy.item()) == pytest.approx((0.5, 1.75))
    for name in ("value", "entropy", "kl", "ratio"):
        assert getattr(plain, name) == getattr(found, name)


def test_what_is_rejected_weighs_nothing_and_the_others_the_more(tmp_path):
    """By hand: token_k1 leaves out 1 of 2, 1 of 3 and 1 of 1 tokens; the second response did not
    end."""
    cfg = small_config(tmp_path, ppo__advantage="reinforce_pp", ppo__whiten_advantages=False)
    cfg.ppo.importance.reject = {"token_k1": [0.5, 2.0]}
    cfg.ppo.importance.level = "token"
    ratios = torch.tensor([[1.0, 4.0, 1.0], [1.5, 0.1, 1.0], [3.0, 1.0, 1.0]])
    rollout = hand_rollout([1.0, 3.0, 2.0], [2, 3, 1], [True, False, True])
    rollout = replace(rollout, logprobs=ratios.log() - 1.0,
                      extras=RolloutExtras(sampler_logprobs=torch.full((3, 3), -1.0)))
    state = PPOState(kl_coef=0.0, init_kl_coef=0.0)
    with session_of(cfg) as session:
        found = to_experience(rollout, state, cfg)
        for how, wanted in (("token-mean", [1 / 3, 1 / 3, 0]),
                            ("seq-mean-token-mean", [1 / 2, 1 / 4, 0])):
            cfg.ppo.loss_aggregation = how
            assert update_of(session, found, torch.arange(3)).weights.tolist() == pytest.approx(
                wanted)
        cfg.ppo.mask_truncated = True
        both = to_experience(rollout, state, cfg)
    assert found.extras.counts.tolist() == [[True, False, False], [True, False, True], [False] * 3]
    assert both.extras.counts.tolist() == [[True, False, False], [False] * 3, [False] * 3]
    assert found.advantages[1].tolist() == [3.0, 3.0, 3.0]
    row = gap_figures(rollout, found, cfg.ppo.importance)
    far = [0, math.log(4), math.log(1.5), math.log(10), 0, math.log(3)]
    assert row == pytest.approx({
        "rollout/logprob_gap_mean": math.fsum(far) / 6, "rollout/logprob_gap_max": math.log(10),
        "rollout/importance_mean": (1 + 2 + 1.5 + 0.1 + 1 + 2) / 6,
        "rollout/importance_capped": 2 / 6, "rollout/rejected_tokens": 3 / 6,
        "rollout/rejected_samples": 1 / 3}, rel=1e-5)


def test_of_a_rollout_that_is_all_rejected_no_update_is_made(tmp_path):
    """Nor of a minibatch: with momentum, a gradient of 0 would still be a step."""
    cfg = small_config(tmp_path, ppo__staleness=1, ppo__optimizer__lr=1e-2, ppo__num_steps=3)
    with session_of(cfg) as session:
        steps = made_steps(PPOTask(session), 3)
        next(steps)
        cfg.ppo.importance.reject = {"token_k2": 1e-12}
        (batch, plan), before = next(steps), copy.deepcopy(session.policy.state_dict())
        next(steps)
        assert all(torch.equal(now, before[name])
                   for name, now in session.policy.state_dict().items())
        row = gap_figures(batch, plan.atoms, cfg.ppo.importance)
        assert row["rollout/rejected_samples"] == 1.0
        assert not plan.groups


# Rollouts that waited -----------------------------------------------------------------------------

def made_steps(task: PPOTask, count: int) -> Iterator[tuple[Rollout, Plan]]:
    """The rollout and the plan of each step, before it is trained on."""
    state = TrainState(digests={}, judged_by="", task=task.initial()[0])
    for _ in range(count):
        batch = task.collect(state, idle_context())
        plan = task.plan(state, batch)
        yield batch, plan
        result = optimize(task, plan, state, StopFlag())
        done = task.finish(state, batch, plan, result)
        state = replace(state, step=state.step + 1, episodes=state.episodes + len(batch),
                        updates=state.updates + result.updates, task=done.state,
                        tensors=done.tensors)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_each_step_learns_from_what_the_policy_of_k_steps_before_said(tmp_path, kind):
    """The same samples as that policy draws for these episodes when they are its own step's; the
    trainer's logprobs and the KL are the present policy's."""
    save_lm(tmp_path / "lm", kind)
    cfg = small_config(tmp_path, ppo__staleness=1, ppo__num_steps=3, ppo__chunk_size=6,
                       ppo__optimizer__lr=1e-2)
    fresh = copy.deepcopy(cfg)
    fresh.ppo.staleness = 0
    with session_of(cfg) as session, session_of(fresh) as other:
        policies, waited = [], []
        for step, (batch, _) in enumerate(made_steps(PPOTask(session), 3)):
            policies.append(copy.deepcopy(session.policy.state_dict()))
            waited.append(len(batch.extras.waiting.get("waiting/logprobs", ())))
            other.policy.load_state_dict(policies[max(step - 1, 0)])
            wanted = rollout_of(other, 16 * step)
            assert batch.prompts.episodes == wanted.prompts.episodes == list(
                range(16 * step, 16 * step + 16))
            assert batch.responses == wanted.responses
            assert batch.scores == wanted.scores
            width = wanted.logprobs.shape[1]
            mask = wanted.response_mask
            assert torch.equal(batch.response_mask[:, :width], mask)
            torch.testing.assert_close(batch.extras.sampler_logprobs[:, :width] * mask,
                                       wanted.logprobs * mask, rtol=0, atol=2e-5)
            if kind == "gpt2":
                lm = session.policy.lm
                assert_own_logprobs(lm, replace(batch, ref_logprobs=batch.logprobs))
            far = float(batch.gap.abs().max())
            assert far < 1e-5 if step == 0 else far > 1e-2
    assert waited == [16, 16, 0]  # three steps are all there are


def test_a_larger_and_a_smaller_staleness_go_on_from_what_waits(tmp_path):
    cfg = small_config(tmp_path, ppo__staleness=2, ppo__num_steps=6)
    found = []
    with session_of(cfg) as session:
        task = PPOTask(session)
        for step, (batch, _) in enumerate(made_steps(task, 6)):
            waiting = batch.extras.waiting.get("waiting/mask", ())
            found.append((batch.prompts.episodes[0], len(waiting)))
            cfg.ppo.staleness = 0 if step == 0 else 1 if step == 3 else cfg.ppo.staleness
    assert found == [(0, 32), (16, 16), (32, 0), (48, 0), (64, 16), (80, 0)]


def test_a_sampler_that_says_no_logprobs_is_refused(tmp_path, request):
    engine = request.config.rootpath / "tests/outside/slow_sampler.py"
    cfg = small_config(tmp_path, rollout__engine=f"{engine}:Whole",
                       ppo__importance__level="sequence")
    with session_of(cfg) as session, refused(ConfigError, "Whole returns no logprobs"):
        rollout_of(session)


def test_corrected_gradients_do_not_depend_on_the_micro_batch(tmp_path):
    cfg = small_config(tmp_path, ppo__staleness=1, ppo__importance__level="token",
                       ppo__importance__cap=1.1, ppo__optimizer__lr=5e-4, ppo__vf_coef=0.0)
    cfg.ppo.importance.reject = {"token_k1": [0.8, 1.3], "seq_max_k3": 0.1}
    with session_of(cfg) as session:
        steps = made_steps(PPOTask(session), 2)
        next(steps)
        batch, plan = next(steps)
        cut = gap_figures(batch, plan.atoms, cfg.ppo.importance)
        assert 0 < cut["rollout/rejected_samples"] < cut["rollout/rejected_tokens"] < 1
        assert 0 < cut["rollout/importance_capped"] < 1
        # advantages are whitened over what is learnt from
        left = plan.atoms.advantages[plan.atoms.extras.counts].double()
        assert left.mean().item() == pytest.approx(0.0, abs=1e-6)
        whole, told = gradients(session, plan.atoms)
        cfg.ppo.micro_batch_size = 3
        parts, again = gradients(session, plan.atoms)
    assert told == pytest.approx(again, rel=1e-5, abs=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)
