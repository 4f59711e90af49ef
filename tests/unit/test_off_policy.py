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
from ppocli.ppo.step import plan_updates, to_experience, update_of
from ppocli.ppo.step_metrics import gap_figures
from ppocli.sampling.sampler import DecodeSampler
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


def test_a_ratio_beyond_fp32_has_a_finite_weight():
    found = importance_weights(torch.tensor([[200.0, -200.0]]), mask_of([2], 2), level="sequence",
                               cap=1e30)
    assert found.tolist() == [[1.0, 1.0]]
    assert importance_weights(torch.tensor([[200.0]]), mask_of([1], 1), level="token", cap=1e30
                              ).item() == pytest.approx(math.exp(20.0))


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
    # a cap that fp32 rounds down still counts
    importance = replace(cfg.ppo.importance, cap=1.3)
    capped = replace(found, extras=replace(
        found.extras, importance=found.extras.importance.clamp(max=1.3)))
    assert gap_figures(rollout, capped, importance)["rollout/importance_capped"] == 3 / 6
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
        kept = torch.zeros_like(batch.response_mask)
        kept[3] = batch.response_mask[3]
        plan = plan_updates(session, replace(
            plan.atoms, extras=replace(plan.atoms.extras, counts=kept)), 1)
        assert [3 in group.rows.tolist() for group in plan.groups] == [True] * cfg.ppo.ppo_epochs


def test_advantages_are_whitened_over_what_is_learnt_from(tmp_path):
    cfg = small_config(tmp_path, ppo__staleness=1)
    with session_of(cfg) as session:
        *_, (batch, _) = made_steps(PPOTask(session), 2)
    cfg.ppo.importance.reject = {"token_k1": 1.1}
    found = to_experience(batch, PPOState(0.0, 0.0), cfg)
    left = found.advantages[found.extras.counts].double()
    assert 1 < len(left) < int(batch.response_mask.sum())
    assert left.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert left.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)


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


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("t5", marks=pytest.mark.long)])
def test_each_step_learns_from_what_the_policy_of_k_steps_before_said(tmp_path, kind):
    """The same samples as that policy draws for these episodes when they are its own step's; the
    trainer's logprobs and the KL are the present policy's."""
    save_lm(tmp_path / "lm", kind)
    cfg = small_config(tmp_path, ppo__staleness=2, ppo__num_steps=5, ppo__chunk_size=6,
                       ppo__optimizer__lr=1e-2)
    fresh = copy.deepcopy(cfg)
    fresh.ppo.staleness = 0
    with session_of(cfg) as session, session_of(fresh) as other:
        policies, waited = [], []
        for step, (batch, _) in enumerate(made_steps(PPOTask(session), 5)):
            policies.append(copy.deepcopy(session.policy.state_dict()))
            waited.append(len(batch.extras.waiting.get("waiting/logprobs", ())))
            other.policy.load_state_dict(policies[max(step - 2, 0)])
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
    assert waited == [32, 32, 32, 16, 0]  # five steps are all there are


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


@pytest.mark.parametrize("keys", [{"ppo__old_logprobs": "sampler"},
                                  {"ppo__importance__level": "sequence"}])
def test_a_sampler_that_says_no_logprobs_is_refused(tmp_path, request, keys):
    engine = request.config.rootpath / "tests/outside/slow_sampler.py"
    cfg = small_config(tmp_path, rollout__engine=f"{engine}:Whole", **keys)
    with session_of(cfg) as session, refused(ConfigError, "Whole returns no logprobs"):
        rollout_of(session)


class Foreign(DecodeSampler):
    """An engine whose logprobs are a hundredth of a nat below those of a forward pass."""

    def __init__(self, setup):
        super().__init__(setup)
        self.logprobs_match = False

    def sample(self, *arguments, **more):
        for samples in super().sample(*arguments, **more):
            yield replace(samples, logprobs=samples.logprobs - 0.01 * samples.mask)


def test_an_engine_whose_logprobs_are_others_is_corrected_or_compared_with(tmp_path):
    cfg = small_config(tmp_path)
    with session_of(cfg) as built:
        session = replace(built, sampler=Foreign(built.sampler.setup))
        trainers = rollout_of(session)
        mask = trainers.response_mask
        torch.testing.assert_close(trainers.gap, 0.01 * mask, rtol=0, atol=2e-5)
        assert_own_logprobs(session.policy.lm, trainers)
        cfg.ppo.importance.level = "token"
        found = to_experience(rollout_of(session), PPOState(0.0, 0.0), cfg)
        torch.testing.assert_close(found.extras.importance, math.exp(0.01) * mask, rtol=0,
                                   atol=2e-5)
        cfg.ppo.importance.level, cfg.ppo.old_logprobs = None, "sampler"
        samplers = rollout_of(session)
    assert torch.equal(samplers.logprobs, trainers.extras.sampler_logprobs)
    assert torch.equal(samplers.values, trainers.values)
    assert samplers.gap is None


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
        whole, told = gradients(session, plan.atoms)
        cfg.ppo.micro_batch_size = 3
        parts, again = gradients(session, plan.atoms)
    assert told == pytest.approx(again, rel=1e-5, abs=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)
    # at the start of the step's updates every ratio to the trained policy is 1
    kept, weight = [], []
    for i, length in enumerate(batch.response_mask.sum(1).tolist()):
        gap = batch.gap[i, :length].double().tolist()
        if max(math.exp(x) - 1 - x for x in gap) <= 0.1:
            kept += [(i, t) for t, x in enumerate(gap) if 0.8 <= math.exp(x) <= 1.3]
            weight += [min(math.exp(x), 1.1) for x in gap if 0.8 <= math.exp(x) <= 1.3]
    wanted = -math.fsum(w * float(plan.atoms.advantages[at]) for at, w in zip(
        kept, weight, strict=True)) / len(kept)
    assert told["policy"] == pytest.approx(wanted, rel=1e-4)
