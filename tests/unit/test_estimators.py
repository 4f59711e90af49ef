"""What must hold of the engine whichever advantage estimator, KL term and loss it works with."""

import math

import pytest
import torch
from sessions import (
    count_good,
    experience_of,
    fresh_state,
    gradients,
    load_session,
    optimize,
    rollout_of,
    save_session,
    session_of,
    small_config,
    weights_of,
)

from ppocli.config.algorithm import kl_estimator, kl_in, whitens_advantages
from ppocli.errors import CheckpointError
from ppocli.ppo.advantages import ESTIMATORS
from ppocli.tasks.ppo.experience import to_experience, update_moments
from ppocli.tasks.ppo.figures import optimize_figures

CRITIC_FREE = [name for name, entry in ESTIMATORS.items() if not entry.needs_critic]


def config(folder, advantage, **keys):
    return small_config(folder, ppo__advantage=advantage, **{"ppo__n": 4, **keys})


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_with_learning_rate_zero_every_ratio_is_one(tmp_path, advantage):
    cfg = config(tmp_path, advantage, ppo__optimizer__lr=0.0, ppo__chunk_size=5)
    with session_of(cfg) as session:
        result = optimize(session, experience_of(session))
    assert result.updates == 4 * 2
    assert result.terms["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert result.terms["max_log_ratio"] <= 1e-5
    assert abs(result.terms["kl"]) <= 1e-6


@pytest.mark.parametrize("advantage", ESTIMATORS)
@pytest.mark.parametrize("kl", ["reward", "loss"])
def test_the_gradient_does_not_depend_on_the_micro_batch(tmp_path, advantage, kl):
    found = []
    for micro in (None, 3):
        cfg = config(tmp_path, advantage, ppo__kl_in=kl, ppo__micro_batch_size=micro,
                     ppo__mini_batch_size=16, ppo__init_kl_coef=0.5, ppo__dual_clip=2.0,
                     ppo__cliprange_high=0.3, ppo__logprobs_from="decode",
                     ppo__loss_aggregation="seq-mean-token-sum-norm")
        with session_of(cfg) as session:
            experience = experience_of(session)
            optimize(session, experience)  # away from the reference
            found.append((*gradients(session, experience), session))
    (whole, terms, session), (grads, other, _) = found
    assert max(g.abs().max() for g in whole.values()) > 1e-4
    for name, grad in whole.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-2, atol=2e-5)
    assert other["policy"] == pytest.approx(terms["policy"], rel=1e-3, abs=1e-5)
    assert (terms["kl"] != 0) == (kl == "loss")
    assert (terms["value"] != 0) == (advantage == "gae")
    assert session.cfg.ppo.n == 4


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_a_rollout_and_its_advantages_do_not_depend_on_how_it_is_cut(tmp_path, advantage):
    found = []
    for chunk in (None, 3):
        with session_of(config(tmp_path, advantage, ppo__chunk_size=chunk)) as session:
            found.append(experience_of(session))
    assert torch.equal(*(part.sequences.action_tokens for part in found))
    torch.testing.assert_close(found[0].advantages, found[1].advantages, rtol=0, atol=1e-4)


def test_samples_of_a_prompt_stand_together_and_differ(tmp_path):
    with session_of(config(tmp_path, "grpo")) as session:
        rollout = rollout_of(session)
        part = session.next_prompts(6, 5)
        single = session_of(small_config(tmp_path))
    prompts = rollout.prompts.indices
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
    assert len(set(prompts[::4])) == 4
    assert rollout.prompts.episodes == list(range(16))
    assert all(len(set(rollout.responses[i:i + 4])) > 1 for i in range(0, 16, 4))
    assert part.indices == prompts[6:11]
    with single as other:  # the order of prompts is the one without groups, position by position
        assert other.next_prompts(0, 4).indices == prompts[::4]


def test_what_is_left_to_the_estimator(tmp_path):
    def resolved(advantage, **keys):
        ppo = config(tmp_path, advantage, **keys).ppo
        return whitens_advantages(ppo), kl_in(ppo), kl_estimator(ppo)

    assert resolved("gae") == (True, "reward", "k1")
    assert resolved("grpo") == (False, "loss", "k3")
    assert resolved("rloo") == (False, "reward", "k1")
    assert resolved("reinforce_pp") == (True, "reward", "k1")
    assert resolved("grpo", ppo__kl_in="reward") == (False, "reward", "k1")
    assert resolved("gae", ppo__kl_in="loss", ppo__whiten_advantages=False) == (False, "loss", "k3")
    assert resolved("gae", ppo__kl_in="loss", ppo__kl_estimator="k2") == (True, "loss", "k2")


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_group_without_its_invalid_samples_is_the_group(tmp_path, advantage):
    scores = [1.0, 2.0, 6.0, None, None, None, None, 3.0, *[0.5] * 8]
    cfg = config(tmp_path, advantage, reward__on_invalid="skip", ppo__init_kl_coef=0.0)
    with session_of(cfg, reward=lambda outputs, **_: scores[:len(outputs)]) as session:
        experience = experience_of(session)
    found = experience.advantages[:, 0].tolist()
    # three are left of the first prompt: mean 3, deviation sqrt(7); baselines 4, 3.5 and 1.5
    expected = [-3.0, -1.5, 4.5] if advantage == "rloo" else [x / math.sqrt(7) for x in (-2, -1, 3)]
    assert found[:3] == pytest.approx(expected, rel=1e-5)
    assert found[3:] == pytest.approx([0.0] * 9)  # alone in its group; then equal scores


@pytest.mark.parametrize("advantage", CRITIC_FREE)
@pytest.mark.parametrize("source", ["decode", "forward"])
def test_without_a_critic_nothing_of_one_is_built_or_computed(tmp_path, advantage, source):
    with session_of(config(tmp_path, advantage, ppo__logprobs_from=source)) as session:
        experience = experience_of(session)
        result = optimize(session, experience)
        figures = optimize_figures(result, experience, session.cfg.ppo)
        assert session.policy.value_head is None
        assert len(session.trained.optimizer.param_groups) == 1
        names = {name for name, _ in session.policy.named_parameters()}
    assert experience.values is None
    assert experience.returns is None
    assert not any(name.startswith("value") for name in names)
    assert result.terms["value"] == result.terms["value_error"] == 0.0
    assert not {"loss/value_avg", "val/error", "val/var_explained"} & set(figures)
    assert ("loss/kl_avg" in figures) == (advantage == "grpo")


@pytest.mark.parametrize("advantage", CRITIC_FREE)
def test_a_checkpoint_without_a_critic_resumes_bit_for_bit(tmp_path, advantage):
    cfg = config(tmp_path, advantage)
    found = []
    for load in (False, True):
        with session_of(cfg) as session:
            for step in range(int(load), 2):
                if load:
                    load_session(session, tmp_path / "saved")
                state = fresh_state(session)
                rollout = rollout_of(session, start=16 * step)
                optimize(session, to_experience(rollout, state, cfg), step=step,
                         updates=8 * step)
                if not load and step == 0:
                    (tmp_path / "saved").mkdir()
                    save_session(session, tmp_path / "saved")
            found.append(weights_of(session))
    assert not (tmp_path / "saved/value_head.safetensors").exists()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def test_a_critic_and_none_do_not_take_over_from_each_other(tmp_path):
    with session_of(config(tmp_path, "grpo")) as session:
        (tmp_path / "saved").mkdir()
        save_session(session, tmp_path / "saved")
    with (session_of(config(tmp_path, "gae")) as session,
          pytest.raises(CheckpointError, match="value")):
        load_session(session, tmp_path / "saved")


@pytest.mark.long
@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_a_few_updates_raise_the_reward(tmp_path, advantage):
    cfg = config(tmp_path, advantage, ppo__num_rollouts=64, ppo__mini_batch_size=32,
                 ppo__optimizer__lr=5e-3, ppo__init_kl_coef=0.01)
    means = []
    with session_of(cfg, reward=count_good) as session:
        state = fresh_state(session)
        for step in range(5):
            rollout = rollout_of(session, start=64 * step)
            means.append(sum(rollout.scores) / 64)
            state = update_moments(state, rollout, cfg)
            optimize(session, to_experience(rollout, state, cfg))
    assert means[-1] > means[0] + 0.8


@pytest.mark.long
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_a_kl_in_the_loss_holds_the_policy_back(tmp_path, estimator, caplog):
    moved = {}
    for coef in (0.0, 20.0):
        cfg = small_config(tmp_path, ppo__kl_in="loss", ppo__kl_estimator=estimator,
                           ppo__init_kl_coef=coef, ppo__optimizer__lr=3e-3, ppo__vf_coef=0.0)
        with session_of(cfg) as session:
            experience = experience_of(session)
            assert (experience.ref_logprobs is None) == (coef == 0.0)
            before = weights_of(session)
            optimize(session, experience)
            grads = gradients(session, experience)[1]
            moved[coef] = grads["approx_kl_squared"]
            assert any(not torch.equal(t, before[n])
                       for n, t in session.policy.state_dict().items())
    # the gradient of k1 is zero on average
    assert ("k1 is zero on average" in caplog.text) == (estimator == "k1")
    if estimator != "k1":
        assert moved[20.0] < 0.5 * moved[0.0]


def test_charging_the_reward_and_the_loss_are_apart(tmp_path):
    found = {}
    for where in ("reward", "loss"):
        cfg = small_config(tmp_path, ppo__kl_in=where, ppo__kl_estimator="k3",
                           ppo__init_kl_coef=1.0, ppo__whiten_advantages=False, ppo__lam=1.0)
        with session_of(cfg) as session:
            rollout = rollout_of(session)
            rollout.ref_logprobs.sub_(0.5 * rollout.response_mask)
            rollout.kl.add_(1.0 * rollout.response_mask)
            found[where] = to_experience(rollout, fresh_state(session), cfg)
    scores = torch.tensor(rollout.scores)
    lengths = rollout.response_mask.sum(1)
    torch.testing.assert_close(found["loss"].returns[:, 0], scores)
    torch.testing.assert_close(found["reward"].returns[:, 0], scores - lengths, rtol=0, atol=1e-4)
    assert found["loss"].kl_coef == 1.0
    assert found["reward"].kl_coef == 0.0
