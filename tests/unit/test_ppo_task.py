"""What PPO decides around its losses, by hand-worked numbers: when a phase ends, how far the policy
has moved, which samples come next and in which order they are learnt from."""

import copy
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from sessions import experience_of, hand_rollout, rollout_of, session_of, set_keys, small_config

from ppocli.config.schema import TrainConfig
from ppocli.distributed.ranks import StopFlag
from ppocli.ppo.experience import PPOState, after_step, explained_variance
from ppocli.ppo.ppo_task import PPOTask
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.step import plan_updates, to_experience, update_of
from ppocli.ppo.step_metrics import optimize_figures, watch
from ppocli.training.loop import _better
from ppocli.training.optimize import optimize
from ppocli.training.state import Best, PhaseClock, TrainState
from ppocli.training.task import OptimizeResult, StepContext, Verdict

FINE = {"approx_kl": 0.0, "ratio": 1.0, "max_log_ratio": 0.0}


VERDICTS = [
    ({"approx_kl": 0.0299}, Verdict.STEP),  # 1.5 times 0.02 is 0.03
    ({"approx_kl": 0.0301}, Verdict.STOP),
    ({"approx_kl": -0.5}, Verdict.STEP),
    ({"ratio": 1.79}, Verdict.STEP),
    ({"ratio": 1.81}, Verdict.SKIP),
    ({"approx_kl": 0.0301, "ratio": 1.81}, Verdict.STOP),
    ({"approx_kl": float("nan"), "ratio": 1.81}, Verdict.NONFINITE)]


def test_the_verdict_on_an_update(tmp_path, caplog):
    cfg = small_config(tmp_path, ppo__target_kl=0.02, ppo__ratio_threshold=1.8)
    with session_of(cfg) as session:
        task = PPOTask(session)
        assert [task.judge({**FINE, **terms}) for terms, _ in VERDICTS] == [
            verdict for _, verdict in VERDICTS]
        assert task.judge({**FINE, "ratio": 1.8004, "max_log_ratio": 7.123}) is Verdict.SKIP
        assert "ratio 1.8004 exceeds ppo.ratio_threshold=1.8 (log-ratios of up to 7.12): " in (
            caplog.records[-1].message)
        cfg.ppo.target_kl = cfg.ppo.ratio_threshold = None
        assert task.judge({"approx_kl": 50.0, "ratio": 50.0}) is Verdict.STEP


def two_responses() -> Rollout:
    """Of three tokens and one. Log-ratios 0.1, 0.2, 0.3 and 0.5: sums 0.6 and 0.5, mean 0.55."""
    rollout = hand_rollout([1.0, 2.0], [3, 1], [True, True])
    return replace(rollout, has_reference=True,
                   logprobs=torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 7.0, 7.0]]),
                   ref_logprobs=torch.tensor([[-1.1, -1.2, -1.3], [-1.5, 0.0, 0.0]]))


def test_the_kl_of_a_sequence_is_the_sum_over_its_tokens():
    assert two_responses().sequence_kl == pytest.approx(0.55)
    assert np.isnan(replace(two_responses(), has_reference=False).sequence_kl)


def next_kl_coef(state: PPOState, rollout: Rollout, cfg: TrainConfig) -> float:
    return after_step(state, rollout, to_experience(rollout, state, cfg), cfg, 1).kl_coef


def test_the_controller_is_fed_that_sum():
    """0.55 at target 0.5 is 0.1 too much, at 2 samples of a horizon of 4: half of that."""
    cfg = TrainConfig()
    cfg = replace(cfg, ppo=replace(cfg.ppo, kl_controller="adaptive", target=0.5, horizon=4))
    state = PPOState(kl_coef=0.2, init_kl_coef=0.2)
    assert next_kl_coef(state, two_responses(), cfg) == pytest.approx(0.2 * 1.05)
    # a KL below zero by rounding alone counts as 0; one that is really below moves nothing
    for off, coef in ((5e-6, 0.2 * 0.9), (1e-3, 0.2)):
        below = replace(two_responses(), ref_logprobs=two_responses().logprobs + off)
        assert next_kl_coef(state, below, cfg) == pytest.approx(coef)
    fixed = replace(cfg, ppo=replace(cfg.ppo, kl_controller="fixed"))
    assert next_kl_coef(state, two_responses(), fixed) == 0.2


def test_whitened_advantages_have_no_mean():
    """Scores 2 and 4 without values: every token of a response is worth its score. Of 2, 2, 4, 4
    the mean is 3 and the deviation 1."""
    cfg = TrainConfig()
    cfg = replace(cfg, ppo=replace(cfg.ppo, lam=1.0, gamma=1.0, whiten_advantages=True))
    found = to_experience(hand_rollout([2.0, 4.0], [2, 2], [True, True]),
                          PPOState(kl_coef=0.0, init_kl_coef=0.0), cfg)
    assert found.advantages.flatten().tolist() == pytest.approx([-1.0, -1.0, 1.0, 1.0], abs=1e-4)


def test_a_step_collects_from_where_the_one_before_ended(tmp_path):
    with session_of(small_config(tmp_path)) as session:
        clock = PhaseClock(session.backend.device)
        task = PPOTask(session)
        state = TrainState({}, "", step=1, episodes=16, task=task.initial()[0])
        rollout = task.collect(state, StepContext(StopFlag(), clock))
    assert rollout.prompts.episodes == list(range(16, 32))


def test_a_sample_depends_on_its_episode_not_on_its_row(tmp_path):
    with session_of(small_config(tmp_path)) as session:
        whole, part = rollout_of(session), rollout_of(session, start=6, count=4)
    assert part.responses == whole.responses[6:10]
    assert len(set(whole.responses)) > 8


def test_each_pass_over_the_samples_has_an_order_of_its_own(tmp_path):
    """That of numpy's generator for (seed, step, epoch), dealt into minibatches of 8."""
    with session_of(small_config(tmp_path, seed=3, ppo__ppo_epochs=2)) as session:
        experience = experience_of(session)
        plan = plan_updates(session, experience, 5)
    assert [group.epoch for group in plan.groups] == [0, 0, 1, 1]
    for epoch in (0, 1):
        order = np.random.default_rng([3, 5, epoch]).permutation(16).tolist()
        found = [plan.groups[2 * epoch + half].rows.tolist() for half in (0, 1)]
        assert found == [order[:8], order[8:]]


def test_passes_of_the_critic_alone_come_first_in_an_order_of_their_own(tmp_path):
    """They change nothing in the order of the passes that train both."""
    with session_of(small_config(tmp_path, ppo__ppo_epochs=2)) as session:
        experience = experience_of(session)
        plain = plan_updates(session, experience, 0).groups
        session.cfg.ppo.critic_epochs = 2
        groups = plan_updates(session, experience, 0).groups
        assert PPOTask(session).length.total_updates(TrainState({}, "")) == 2 * len(groups)
    assert [group.epoch for group in groups] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [group.part for group in groups] == ["critic"] * 4 + ["all"] * 4
    assert [g.rows.tolist() for g in groups[4:]] == [g.rows.tolist() for g in plain]
    passes = [tuple(a.rows.tolist() + b.rows.tolist())
              for a, b in zip(groups[::2], groups[1::2], strict=True)]
    assert len(set(passes)) == 4
    assert all(sorted(one) == list(range(16)) for one in passes)


def test_in_pretraining_the_critic_learns_what_followed_and_the_policy_nothing(tmp_path):
    """By hand: a score of 2 behind three tokens, gamma 0.5: returns 0.5, 1, 2 whatever lambda. The
    advantages keep theirs."""
    cfg = small_config(tmp_path, ppo__lam=0.3, ppo__lam_value=0.6, ppo__gamma=0.5,
                       ppo__value_pretrain_steps=2, ppo__whiten_advantages=False)
    rollout = replace(hand_rollout([2.0], [3], [True]), values=torch.tensor([[0.7, -0.2, 0.4]]))
    state = PPOState(kl_coef=0.0, init_kl_coef=0.0)
    found = to_experience(rollout, state, cfg, pretrains=True)
    assert found.returns.tolist()[0] == pytest.approx([0.5, 1.0, 2.0])
    later = to_experience(rollout, state, cfg)
    assert later.returns.tolist()[0] != pytest.approx([0.5, 1.0, 2.0])
    assert torch.equal(later.advantages, found.advantages)
    with session_of(cfg) as session:
        task, batch = PPOTask(session), rollout_of(session)
        own, _ = task.initial()
        for step, at, part in ((1, None, "critic"), (1, 1, "all"), (2, None, "all")):
            given = TrainState({}, "", step=step, task={**own, "pretrained_at": at})
            plan = task.plan(given, batch)
            assert {group.part for group in plan.groups} == {part}
            assert plan.atoms.extras.pretrains == (part == "critic")


@pytest.mark.parametrize(("n", "switched_on", "baseline"), [
    (2, True, [2.5, 2.5, 2.5, 2.5]), (2, False, [0.0] * 4), (1, True, [0.0] * 4)])
def test_the_samples_of_a_prompt_are_the_critics_baseline_too(tmp_path, n, switched_on, baseline):
    """By hand: scores 1, 4 and 4, 1 of two prompts have the same mean, and predict each other
    backwards: what is left is the mean over the rollout, 2.5."""
    cfg = small_config(tmp_path, ppo__n=n, ppo__group_baseline=switched_on,
                       ppo__whiten_advantages=False)
    scores = [1.0, 4.0, 4.0, 1.0]
    found = to_experience(hand_rollout(scores, [1] * 4, [True] * 4),
                          PPOState(kl_coef=0.0, init_kl_coef=0.0), cfg)
    assert found.advantages[:, 0].tolist() == pytest.approx(
        [score - base for score, base in zip(scores, baseline, strict=True)])


def test_pretraining_ends_when_the_returns_are_explained_or_the_steps_are_made(tmp_path, caplog):
    """By hand: returns 1, 3 have variance 1; values 1, 2 are wrong by 0, 1: half is explained."""
    cfg = small_config(tmp_path, ppo__value_pretrain_steps=3, ppo__lam=0.5)
    rollout = replace(hand_rollout([1.0, 3.0], [1, 1], [True, True]),
                      values=torch.tensor([[1.0], [2.0]]))
    state = PPOState(kl_coef=0.0, init_kl_coef=0.0)
    found = to_experience(rollout, state, cfg, pretrains=True)
    assert explained_variance(found) == pytest.approx(0.5)
    same = to_experience(replace(rollout, scores=[2.0, 2.0]), state, cfg, pretrains=True)
    caplog.set_level("INFO", "ppocli")
    for until, experience, step, at in ((None, found, 1, None), (None, found, 3, 3),
                                        (0.49, found, 1, 1), (0.51, found, 2, None),
                                        (0.49, same, 1, None)):
        cfg.ppo.value_pretrain_until = until
        caplog.clear()
        after = after_step(state, rollout, experience, cfg, step)
        assert after.pretrained_at == at
        assert ("explains 0.500 of the variance" in caplog.text) == (at is not None)
        assert PPOState.from_json(asdict(after)) == after


def test_responses_that_did_not_end_weigh_nothing_and_still_count_for_the_others(tmp_path):
    """By hand: of 2, 3 and 1 tokens the second response did not end; rewards 1, 3, 2."""
    cfg = small_config(tmp_path, ppo__advantage="reinforce_pp", ppo__whiten_advantages=False,
                       ppo__mask_truncated=True)
    rollout = hand_rollout([1.0, 3.0, 2.0], [2, 3, 1], [True, False, True])
    with session_of(cfg) as session:
        found = to_experience(rollout, PPOState(kl_coef=0.0, init_kl_coef=0.0), cfg)
        group = update_of(session, found, torch.arange(3))
        assert group.weights.tolist() == pytest.approx([1 / 3, 0, 1 / 3])
        assert update_of(session, found, torch.tensor([1])).weights.tolist() == [0.0]
    assert found.advantages[1].tolist() == [3.0, 3.0, 3.0]


def test_good_responses_are_imitated_by_the_token_however_an_update_is_cut(tmp_path):
    cfg = small_config(tmp_path, ppo__positive_nll_coef=0.1, ppo__positive_above=0.5,
                       ppo__mask_truncated=True, ppo__logprobs_from="forward")
    with session_of(cfg) as session:
        rollout = rollout_of(session)
        scores = [float(i % 3 == 0) for i in range(len(rollout))]
        rollout = replace(rollout, scores=scores)
        experience = to_experience(rollout, PPOState(kl_coef=0.0, init_kl_coef=0.0), cfg)
        accepted = torch.arange(rollout.response_mask.shape[1]) % 3 < 2  # of tokens, by a criterion
        experience = replace(experience, extras=replace(
            experience.extras, counts=experience.extras.counts & accepted))
        group, task = update_of(session, experience, torch.arange(len(rollout))), PPOTask(session)
        counted = [i for i, score in enumerate(scores) if score > 0.5 and rollout.finished[i]]
        assert 0 < len(counted) < len(rollout)
        lengths = rollout.response_mask.sum(1).tolist()
        # the policy is still the one that sampled
        said = [value for i in counted for value in
                rollout.logprobs[i, :lengths[i]][accepted[:lengths[i]]].tolist()]
        wanted = -math.fsum(said) / len(said)
        for size in (3, len(rollout)):
            sums = torch.zeros(len(task.terms))
            for rows in group.rows.split(size):
                found = task.loss(experience, rows, group.weights[rows], group)
                sums += found.terms
            told = dict(zip(task.terms, sums.tolist(), strict=True))
            assert told["nll"] == pytest.approx(wanted, rel=1e-5)
            assert told["total"] == pytest.approx(
                told["policy"] + cfg.ppo.vf_coef * told["value"] + 0.1 * told["nll"], rel=1e-5)


@pytest.mark.parametrize(("off", "charged"), [(9e-6, 0.0), (2e-5, -2e-6), (float("nan"), None)])
def test_a_kl_of_rounding_alone_is_not_charged_and_nan_is_no_rounding(tmp_path, off, charged):
    cfg = small_config(tmp_path, ppo__advantage="reinforce_pp", ppo__whiten_advantages=False)
    rollout = hand_rollout([0.0, 0.0], [1, 1], [True, True])
    rollout = replace(rollout, has_reference=True, ref_logprobs=torch.full((2, 1), -off),
                      kl=torch.full((2, 1), off))
    found = to_experience(rollout, PPOState(kl_coef=0.1, init_kl_coef=0.1), cfg).advantages
    assert (found.isnan().all() if charged is None
            else found.flatten().tolist() == pytest.approx([charged, charged]))


def test_the_best_evaluation_is_the_highest_finite_one():
    best = Best(step=2, metric=1.5)
    assert _better(1.6, best, lowest=False)
    assert not _better(1.5, best, lowest=False)  # the earlier of two equal ones stays
    assert _better(-3.0, None, lowest=False)
    for figure in (None, float("nan"), float("inf")):
        assert not _better(figure, None, lowest=False)


def test_what_evaluations_are_judged_by(tmp_path):
    """Not by how the reward is called, nor by an environment that nobody plays."""
    def judged(**more: object) -> str:
        task = PPOTask(replace(session, cfg=small_config(tmp_path, **more)))
        return task.resume.eval_fingerprint()

    with session_of(small_config(tmp_path)) as session:
        assert judged(reward__timeout=9.0) == judged(env__max_turns=1) == judged()
        different = [judged(), judged(reward__clip=1.0), judged(generation__temperature=0.5),
                     judged(env__fn="guess_number"),
                     judged(env__fn="guess_number", env__max_turns=1)]
    assert len(set(different)) == len(different)


def test_the_entropy_bonus_changes_by_equal_parts_to_its_end(tmp_path):
    """Four steps: the loss has the weight of its step, and the figures tell it."""
    found = []
    with session_of(small_config(tmp_path, ppo__num_steps=4, ppo__ent_coef=0.3,
                                 ppo__ent_coef_end=0.0, ppo__mini_batch_size=16,
                                 ppo__ppo_epochs=1)) as session:
        task, rollout = PPOTask(session), rollout_of(session)
        # the last step comes early behind steps of more samples
        for step, episodes in [(0, 0), (1, 16), (3, 48), (1, 48)]:
            state = TrainState({}, "", step=step, episodes=episodes, task=task.initial()[0])
            plan = task.plan(state, rollout)
            terms, = optimize(task, plan, state, StopFlag()).first.values()
            bonus = terms["policy"] + session.cfg.ppo.vf_coef * terms["value"] - terms["total"]
            found.append(bonus / terms["entropy"])
            row = optimize_figures(OptimizeResult(0, 0, 0, False, 0.0, {}, 0), plan.atoms,
                                   session.cfg.ppo)
            assert row["objective/ent_coef"] == pytest.approx(found[-1], abs=1e-5)
    assert found == pytest.approx([0.3, 0.2, 0.0, 0.0], abs=1e-5)


EVALUATED = {"eval_before": {"reward_mean": 0.5, "metrics/truth": 0.8}, "eval_step": 0}


@pytest.mark.parametrize(("row", "state", "said", "steps"), [
    ({"rollout/response_tokens_mean": 3.0}, {}, "Responses have 3.0 tokens in the mean, less", 3),
    ({"val/ratio": 1.2}, {}, r"is off 1 by more than 0.1 for 3 steps \(1.20\)", 3),
    ({"val/var_explained": -0.01}, {}, "explains less than the mean would for 10 steps", 10),
    ({}, {"eval_last": {"reward_mean": 0.9, "metrics/truth": 0.7}},
     "reward rises while metrics/truth falls", 3),
    ({}, {"eval_last": {"reward_mean": 0.4, "metrics/truth": 0.7}}, None, 12)])
def test_signs_are_spoken_of_once_they_last(tmp_path, row, state, said, steps):
    healthy = {"objective/kl": 1.0, "val/ratio": 1.0, "rollout/response_tokens_mean": 10.0}
    found = []
    with session_of(small_config(tmp_path)) as session:
        rollout = rollout_of(session)
        own, _ = watch(session, rollout, PPOState(0.1, 0.1), healthy, TrainState({}, ""))
        for _ in range(12):
            own, messages = watch(session, rollout, own, healthy | row,
                                  TrainState({}, "", **EVALUATED | state))
            found.append(messages)
    assert [i + 1 for i, messages in enumerate(found) if messages] == ([steps] if said else [])
    assert said is None or re.search(said, found[steps - 1][0])


SPREAD = [0.1, 0.5, 0.9, 0.3]
FLAT = [
    ({}, [0.7] * 4, "All rewards are equal (0.7) in the first rollout: "),
    ({}, SPREAD, None), ({}, [5.0, 5.1] * 2, None),
    # half of them 0.01 apart: a deviation of 0.005, next to a mean of 10
    ({}, [10.0, 10.01] * 2, "All rewards are nearly equal (10 to 10.01) in the first rollout: "),
    ({"reward.fn": "length"}, [0.5, 0.51] * 2, None),
    ({"reward.fn": "reward_model"}, [0.5, 0.51] * 2, "All rewards are nearly equal (0.5 to 0.51)"),
    ({"ppo.advantage": "grpo", "ppo.n": 2}, [1.0, 1.0, 0.0, 0.0],
     "In 100% of the groups all 2 responses have the same reward, in the first rollout: ppo.adv"),
    ({"ppo.advantage": "rloo", "ppo.n": 2}, [1.0, 0.0, 0.0, 0.0], None)]


def test_rewards_without_a_difference_are_spoken_of_at_once(tmp_path):
    row = {"objective/kl": 1.0, "val/ratio": 1.0, "rollout/response_tokens_mean": 2.0}

    def said(session, rollouts: list[list[float]]) -> list[list[str]]:
        own, found = PPOState(0.1, 0.1), []
        for step, scores in enumerate(rollouts):
            rollout = hand_rollout(scores, [2] * 4, [True] * 4)
            own, messages = watch(session, rollout, own, row, TrainState({}, "", step=step))
            found.append(messages)
        return found

    with session_of(small_config(tmp_path)) as session:
        for keys, scores, says in FLAT:
            here = replace(session, cfg=set_keys(copy.deepcopy(session.cfg), keys))
            first, *later = said(here, [scores] * 5)
            assert [one.startswith(says or "-") for one in first] == [True] * (says is not None)
            assert not any(later), keys
            # from the second rollout on it may be chance
            after = said(here, [SPREAD, *[scores] * 5])
            assert [len(one) for one in after] == [0, 0, 0, len(first), 0, 0], keys
            assert says is None or "3 rollouts in a row" in after[3][0]
