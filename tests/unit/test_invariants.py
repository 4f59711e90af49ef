"""What must hold of the engine whatever the model, the lengths and the way a batch is cut."""

import pytest
import torch
from helpers import mostly_slow, save_lm
from sessions import (
    assert_own_logprobs,
    experience_of,
    gradients,
    optimize,
    rolled,
    rollout_of,
    session_of,
    small_config,
    weights_of,
)

from ppocli.errors import DivergedError
from ppocli.ppo.ppo_task import PPOTask
from ppocli.training.state import TrainState

ARCHITECTURES = ["gpt2", "gpt_neox", "llama", "qwen2"]


@pytest.mark.parametrize("aggregation", [
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_gradient_does_not_depend_on_the_micro_batch(tmp_path, aggregation):
    cfg = small_config(tmp_path, ppo__mini_batch_size=16, ppo__loss_aggregation=aggregation,
                       ppo__ent_coef=0.01, ppo__logprobs_from="decode")
    found = []
    with session_of(cfg) as session:
        experience = experience_of(session)
        for micro, tokens in ((None, None), (1, None), (3, None), (None, 25), (3, 1)):
            cfg.ppo.micro_batch_size, cfg.ppo.micro_batch_tokens = micro, tokens
            session.policy.zero_grad()
            found.append(gradients(session, experience))
    (whole, terms), *others = found
    assert max(g.abs().max() for g in whole.values()) > 1e-3
    for grads, other_terms in others:
        for name, grad in whole.items():
            torch.testing.assert_close(grads[name], grad, rtol=2e-4, atol=2e-6)
        for name in ("total", "policy", "value", "entropy", "ratio"):
            assert other_terms[name] == pytest.approx(terms[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("rollouts", "size", "epochs", "expected"), [
    (7, 4, 2, 4), (3, 3, 5, 5)])
def test_number_of_updates(tmp_path, rollouts, size, epochs, expected):
    cfg = small_config(tmp_path, ppo__num_rollouts=rollouts, ppo__mini_batch_size=size,
                       ppo__ppo_epochs=epochs)
    with session_of(cfg) as session:
        experience = experience_of(session)
        steps = []
        original = session.trained.optimizer.step
        session.trained.optimizer.step = lambda *a, **k: (steps.append(1), original(*a, **k))
        assert optimize(session, experience).updates == expected
        assert len(steps) == expected
        assert PPOTask(session).length.total_updates(TrainState({}, "")) == 2 * expected


def test_in_bf16_the_policy_starts_at_a_reference_kept_in_fp32(tmp_path):
    rollout = rolled(small_config(tmp_path, hardware__precision="bf16", model__dtype="fp32"))
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)


def test_the_mean_of_the_reference_scores_comes_off_dense_rewards_too(tmp_path):
    cfg = small_config(tmp_path, reward__scale="ref", reward__ref_mean=3.0, reward__ref_std=2.0,
                       ppo__init_kl_coef=0.0, ppo__lam=1.0)
    with session_of(cfg, reward=lambda completion_ids, **_: [
            [0.5] * len(ids) for ids in completion_ids]) as session:
        experience = experience_of(session)
    lengths = experience.sequences.mask.sum(1)
    torch.testing.assert_close(experience.returns[:, 0], lengths * 0.25 - 1.5)


@pytest.mark.parametrize(("kind", "source"), mostly_slow(
    ARCHITECTURES, ["decode", "forward"], quick=lambda kind, _: kind in ("gpt2", "llama")))
def test_the_policy_starts_at_the_reference(tmp_path, kind, source):
    save_lm(tmp_path / "lm", kind)
    rollout = rolled(small_config(tmp_path, ppo__logprobs_from=source))
    if source == "forward":
        assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
        assert (rollout.kl == 0).all()
    else:
        assert rollout.kl.abs().max() <= 1e-5
        assert rollout.kl.abs().max() > 0  # the decoding pass is another computation


@pytest.mark.parametrize(("kind", "temperature"), mostly_slow(
    ARCHITECTURES, [1.0, 0.7, 1.8],
    quick=lambda kind, temperature: temperature == 0.7 and kind in ("gpt2", "llama")))
def test_stored_logprobs_are_of_the_sampled_distribution(tmp_path, kind, temperature):
    save_lm(tmp_path / "lm", kind)
    cfg = small_config(tmp_path, generation__temperature=temperature)
    with session_of(cfg) as session:
        assert_own_logprobs(session.policy.lm, rollout_of(session), temperature)


def test_a_ratio_beyond_the_threshold_touches_nothing(tmp_path):
    cfg = small_config(tmp_path, ppo__ratio_threshold=1.5)
    with session_of(cfg) as session:
        experience = experience_of(session)
        optimize(session, experience)
        experience.logprobs.sub_(2.0)  # every ratio is now about e^2
        before = weights_of(session)
        slots = [{k: v.clone() for k, v in s.items()}
                 for s in session.trained.optimizer.state.values()]
        result = optimize(session, experience)
        assert (result.updates, result.skipped) == (0, 8)
        for name, tensor in session.policy.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        for old, new in zip(slots, session.trained.optimizer.state.values(), strict=True):
            assert all(torch.equal(old[k], new[k]) for k in old)


def test_target_kl_ends_the_epochs_before_the_update(tmp_path):
    cfg = small_config(tmp_path, ppo__target_kl=0.01, ppo__optimizer__lr=0.05)
    with session_of(cfg) as session:
        result = optimize(session, experience_of(session))
    assert result.early_stopped
    assert 1 <= result.updates < 8


def test_a_nonfinite_gradient_touches_nothing_and_ends_the_run_when_it_lasts(tmp_path, caplog):
    cfg = small_config(tmp_path, ppo__max_nonfinite=3)
    with session_of(cfg) as session:
        experience = experience_of(session)
        experience.advantages[3, 0] = float("nan")
        before = weights_of(session)
        with pytest.raises(DivergedError, match="3 updates in a row"):
            optimize(session, type(experience)(
                **{n: getattr(experience, n) for n in experience.__slots__}
                | {"advantages": torch.full_like(experience.advantages, float("inf"))}))
        for name, tensor in session.policy.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        assert "is not finite (total, policy, grad_norm); the update is skipped" in caplog.text
        # one bad row spoils only the minibatches it is in: never three in a row here
        result = optimize(session, experience)
    assert result.skipped == 4
    assert result.updates == 4


def test_dropout_of_the_model_is_off(tmp_path):
    save_lm(tmp_path / "lm", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    cfg = small_config(tmp_path, model__gradient_checkpointing=True, ppo__optimizer__lr=0.0)
    with session_of(cfg) as session:
        result = optimize(session, experience_of(session))
        assert session.loaded.export_config.attn_pdrop == 0.5
    assert result.terms["max_log_ratio"] <= 1e-5


@pytest.mark.parametrize("source", ["decode", "auto"])
def test_bf16_keeps_fp32_weights_and_a_ratio_near_one(tmp_path, source):
    cfg = small_config(tmp_path, hardware__precision="bf16", ppo__optimizer__lr=0.0,
                       ppo__logprobs_from=source)
    with session_of(cfg) as session:
        assert session.from_decode == (source == "decode")
        experience = experience_of(session)
        result = optimize(session, experience)
        assert all(p.dtype == torch.float32 for p in session.policy.parameters())
        assert next(session.reference.lm.parameters()).dtype == torch.bfloat16
    assert result.terms["ratio"] == pytest.approx(1.0, abs=0.02)
    assert experience.logprobs.dtype == torch.float32
