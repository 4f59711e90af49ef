"""What must hold of the engine whichever kind of model it trains: adapters, critics with layers of
their own or none, encoder-decoders; and whichever advantage estimator it works with."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import mostly_slow, save_lm
from sessions import (
    count_letters,
    experience_of,
    fresh_state,
    gradients,
    load_session,
    optimize,
    rollout_of,
    save_session,
    session_of,
    small_config,
    wake_the_value_head,
    weights_of,
)

from ppocli.config.schema import TrainConfig
from ppocli.config.tasks import kl_coef, kl_term, whitens_advantages
from ppocli.ppo.advantages import ESTIMATORS
from ppocli.ppo.step import to_experience


def peft(**fields: Any) -> dict[str, Any]:
    return {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8, **fields}}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("gpt2", peft()), "lora on llama": ("llama", peft()),
    "dora": ("gpt2", peft(use_dora=True)),
    "branch": ("gpt2", {"model__value__kind": "branch", "model__value__num_layers_unfrozen": 1}),
    "critic": ("gpt2", {"model__value__kind": "model"}), "t5": ("t5", {}), "bart": ("bart", {})}
CRITIC_FREE = [name for name, entry in ESTIMATORS.items() if not entry.needs_critic]
KINDS |= {name: ("gpt2", {"ppo__advantage": name, "ppo__n": 4}) for name in CRITIC_FREE}
KINDS |= {name: (name, {}) for name in ("gpt2", "gpt_neox", "llama", "qwen2")}
QUICK = ("lora", "branch", "critic", "t5", "grpo")
FEW = ["lora", "branch", "critic", "t5", "bart"]


def config(folder: Path, kind: str, **over: Any) -> TrainConfig:
    shape, keys = KINDS[kind]
    if not (folder / "lm").exists():
        save_lm(folder / "lm", shape, gain=1.5)
    return small_config(folder, **{"ppo__chunk_size": 5, **keys, **over})


@pytest.mark.parametrize("kind", mostly_slow(KINDS, quick=lambda kind: kind in QUICK))
def test_with_learning_rate_zero_every_ratio_is_one_and_no_value_moves(tmp_path, kind):
    with session_of(config(tmp_path, kind, ppo__optimizer__lr=0.0), reward=count_letters
                    ) as session:
        experience = experience_of(session)
        lengths = experience.sequences.mask.sum(1)
        assert lengths.min() < lengths.max()
        result = optimize(session, experience)
    assert result.updates == 4 * 2
    assert result.terms["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert result.terms["max_log_ratio"] <= 1e-5
    assert abs(result.terms["approx_kl"]) <= 1e-6
    assert result.terms["value_clipfrac"] == 0


@pytest.mark.parametrize(("kind", "keys"), mostly_slow(
    FEW, [{"ppo__micro_batch_size": 3}, {"model__gradient_checkpointing": True}],
    quick=lambda kind, keys: (kind == "t5" and "ppo__micro_batch_size" in keys) or (
        kind in ("lora", "branch") and "ppo__micro_batch_size" not in keys)))
def test_micro_batches_and_checkpointed_layers_change_no_gradient(tmp_path, kind, keys):
    found = []
    for more in ({}, keys):
        cfg = config(tmp_path, kind, ppo__mini_batch_size=16, **more)
        with session_of(cfg, reward=count_letters) as session:
            wake_the_value_head(session)
            experience = experience_of(session)
            session.policy.train(cfg.model.gradient_checkpointing)
            found.append(gradients(session, experience)[0])
    whole, other = found
    below = {"branch": "value_trunk.", "critic": "value_trunk.", "t5": ".encoder.",
             "bart": ".encoder."}.get(kind, "lm.")
    assert any(below in name and grad.abs().max() > 0 for name, grad in whole.items())
    for name, grad in whole.items():
        torch.testing.assert_close(other[name], grad, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("kind", mostly_slow(
    ["lora", "dora", *CRITIC_FREE], quick=lambda kind: kind == "lora"))
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path, kind):
    def train(session) -> None:
        optimize(session, experience_of(session))

    cfg = config(tmp_path, kind, ppo__optimizer__lr=0.01)
    with session_of(cfg) as session:
        train(session)
        save_session(session, tmp_path / "saved")
        train(session)
        straight = weights_of(session)
    with session_of(replace(cfg, seed=1)) as session:  # another initial adapter
        session.cfg.seed = cfg.seed
        load_session(session, tmp_path / "saved")
        train(session)
        for name, tensor in weights_of(session).items():
            assert torch.equal(tensor, straight[name]), name


@pytest.mark.parametrize(("kind", "over"), [
    ("gpt_neox", {}), ("marian", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("mixtral", {"num_key_value_heads": 1, "num_local_experts": 2}), ("pegasus", {})))])
def test_a_checkpoint_that_transformers_writes_in_its_own_way_is_read(tmp_path, kind, over):
    """Under names of earlier versions, or without positions that are computed (Marian); these
    don't train, also where they are written (Pegasus)."""
    save_lm(tmp_path / "lm", kind, **over)
    cfg = small_config(tmp_path, ppo__optimizer__lr=0.01)
    with session_of(cfg) as session:
        optimize(session, experience_of(session))
        learnt = session.trained.optimizer.state
        assert all(p in learnt for p in session.policy.lm.parameters() if p.requires_grad)
        save_session(session, tmp_path / "saved")
        straight = weights_of(session)
    with session_of(cfg) as session:
        load_session(session, tmp_path / "saved")
        for name, tensor in weights_of(session).items():
            assert torch.equal(tensor, straight[name]), name


# Whichever advantage estimator, KL term and loss it works with ------------------------------------

def grouped(folder, advantage, **keys):
    """Four samples of each prompt."""
    return small_config(folder, ppo__advantage=advantage, **{"ppo__n": 4, **keys})


@pytest.mark.parametrize(("advantage", "kl"), mostly_slow(
    ESTIMATORS, ["reward", "loss"],
    quick=lambda advantage, kl: (advantage, kl) in (("gae", "reward"), ("grpo", "loss"))))
def test_the_gradient_does_not_depend_on_the_micro_batch(tmp_path, advantage, kl):
    cfg = grouped(tmp_path, advantage, ppo__kl_in=kl, ppo__mini_batch_size=16,
                  ppo__init_kl_coef=0.5, ppo__dual_clip=2.0, ppo__cliprange_high=0.3,
                  ppo__logprobs_from="decode", ppo__loss_aggregation="seq-mean-token-sum-norm")
    found = []
    with session_of(cfg) as session:
        experience = experience_of(session)
        optimize(session, experience)  # away from the reference
        for cfg.ppo.micro_batch_size in (None, 3):
            session.policy.zero_grad()
            found.append(gradients(session, experience))
    (whole, terms), (grads, other) = found
    assert max(g.abs().max() for g in whole.values()) > 1e-4
    for name, grad in whole.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-2, atol=2e-5)
    assert other["policy"] == pytest.approx(terms["policy"], rel=1e-3, abs=1e-5)
    assert (terms["kl"] != 0) == (kl == "loss")
    assert (terms["value"] != 0) == (advantage == "gae")


def test_what_is_left_to_the_estimator(tmp_path):
    def resolved(advantage, **keys):
        ppo = grouped(tmp_path, advantage, ppo__init_kl_coef=None, **{"ppo__kl_in": None} | keys
                      ).ppo
        return whitens_advantages(ppo), *kl_term(ppo), kl_coef(ppo)

    assert resolved("gae") == (True, "loss", "k3+", 0.2)
    assert resolved("grpo") == (False, "loss", "k3", 0.05)
    assert resolved("rloo") == (False, "reward", "k1", 0.05)
    assert resolved("reinforce_pp") == (True, "reward", "k1", 0.05)
    assert resolved("grpo", ppo__kl_in="reward") == (False, "reward", "k1", 0.05)
    assert resolved("gae", ppo__kl_in="reward") == (True, "reward", "k1", 0.05)
    assert resolved("gae", ppo__whiten_advantages=False) == (False, "loss", "k3+", 0.05)
    assert resolved("gae", ppo__kl_estimator="k2") == (True, "loss", "k2", 0.2)
    for estimate in ("k1", "abs", "full"):  # what holds nothing in the loss, or costs most there
        assert resolved("gae", ppo__kl_estimator=estimate) == (True, "reward", estimate, 0.05)


def test_a_group_without_its_invalid_samples_is_the_group(tmp_path):
    scores = [1.0, 2.0, 6.0, None, None, None, None, 3.0, *[0.5] * 8]
    cfg = grouped(tmp_path, "grpo", reward__on_invalid="skip", ppo__init_kl_coef=0.0)
    with session_of(cfg, reward=lambda outputs, **_: scores[:len(outputs)]) as session:
        experience = experience_of(session)
    found = experience.advantages[:, 0].tolist()
    # three are left of the first prompt: mean 3, deviation sqrt(7)
    assert found[:3] == pytest.approx([x / math.sqrt(7) for x in (-2, -1, 3)], rel=1e-5)
    assert found[3:] == pytest.approx([0.0] * 9)  # alone in its group; then equal scores


REFERENCES = {"copy": {}, "offloaded": {"model__reference__offload": True},
              "shared": {"model__num_layers_unfrozen": 1}, "adapter": KINDS["lora"][1]}


@pytest.mark.parametrize("kind", mostly_slow(
    REFERENCES, quick=lambda kind: kind in ("shared", "offloaded")))
def test_the_full_kl_in_the_loss_has_the_gradient_of_its_definition(tmp_path, kind):
    """Of both models' own logits in float64, in micro-batches and with an invalid sample."""
    cfg = small_config(tmp_path, ppo__kl_in="loss", ppo__kl_estimator="full", ppo__vf_coef=0.0,
                       ppo__init_kl_coef=2.0, ppo__micro_batch_size=3, generation__temperature=0.7,
                       ppo__optimizer__lr=0.05, **REFERENCES[kind])
    with session_of(cfg) as session:
        equal = gradients(session, without_advantages(experience_of(session)))
        assert equal[1]["kl"] == 0.0
        assert not any(grad.any() for grad in equal[0].values())
        optimize(session, experience_of(session))
        rollout = rollout_of(session, start=16)
        rollout.valid[2] = False
        experience = without_advantages(to_experience(rollout, fresh_state(session), cfg))
        grads, terms = gradients(session, experience)
        policy = copy.deepcopy(session.policy.lm).double()
        with session.reference.view(session.policy.lm) as view:
            reference = copy.deepcopy(view).double()
        total, tokens = 0.0, 0
        for row in range(len(rollout)):
            mask = rollout.response_mask[row]
            prompt = rollout.prompts.tokens[row][rollout.prompts.mask[row]]
            ids = torch.cat([prompt, rollout.response_tokens[row][mask]])[None]
            if row != 2:
                log_p, log_q = (torch.log_softmax(lm(ids).logits[0, len(prompt) - 1:-1] / 0.7, -1)
                                for lm in (policy, reference))
                total = total + (log_p.exp() * (log_p - log_q.detach())).sum()
                tokens += int(mask.sum())
        (2.0 * total / tokens).backward()
        assert terms["kl"] == pytest.approx(total.item() / tokens, rel=1e-4)
        wanted = {f"lm.{name}": p.grad for name, p in policy.named_parameters()
                  if p.grad is not None and p.requires_grad}
        assert wanted.keys() == {name for name in grads if name.startswith("lm.")}
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name].double(), grad, rtol=1e-3, atol=1e-5)


def without_advantages(experience):
    return replace(experience, advantages=torch.zeros_like(experience.advantages))


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
    assert found["loss"].options.kl_coef == 1.0
    assert found["reward"].options.kl_coef == 0.0
