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
    count_good,
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
from ppocli.config.tasks import kl_coef, kl_estimator, kl_in, whitens_advantages
from ppocli.errors import CheckpointError
from ppocli.ppo.advantages import ESTIMATORS
from ppocli.ppo.experience import update_moments
from ppocli.ppo.policy_samples import share_of_prompts
from ppocli.ppo.step import to_experience
from ppocli.ppo.step_metrics import optimize_figures


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
VARIANTS = [kind for kind in KINDS if " on llama" in kind or kind in ("dora", "qwen2", "gpt2")]
"""of another one here"""
FEW = ["lora", "branch", "critic", "t5", "bart"]


def config(folder: Path, kind: str, **over: Any) -> TrainConfig:
    shape, keys = KINDS[kind]
    if not (folder / "lm").exists():
        save_lm(folder / "lm", shape, gain=1.5)
    return small_config(folder, **{"ppo__chunk_size": 5, **keys, **over})


@pytest.mark.parametrize("kind", mostly_slow(KINDS, quick=lambda kind: kind not in VARIANTS))
def test_with_learning_rate_zero_every_ratio_is_one_and_no_value_moves(tmp_path, kind):
    with session_of(config(tmp_path, kind, ppo__optimizer__lr=0.0), reward=count_letters
                    ) as session:
        experience = experience_of(session)
        lengths = experience.response_mask.sum(1)
        assert lengths.min() < lengths.max()
        result = optimize(session, experience)
    assert result.updates == 4 * 2
    assert result.terms["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert result.terms["max_log_ratio"] <= 1e-5
    assert abs(result.terms["approx_kl"]) <= 1e-6
    assert result.terms["value_clipfrac"] == 0


@pytest.mark.parametrize("kind", ["lora", "t5"])
def test_the_rollout_does_not_depend_on_chunks_and_micro_batches(tmp_path, kind):
    found = []
    for chunk, micro in ((16, None), (3, 1)):
        cfg = config(tmp_path, kind, ppo__chunk_size=chunk, ppo__micro_batch_size=micro,
                     ppo__logprobs_from="forward")
        with session_of(cfg) as session:
            wake_the_value_head(session)
            found.append(rollout_of(session))
    assert torch.equal(found[0].response_tokens, found[1].response_tokens)
    for name in ("logprobs", "ref_logprobs", "values"):
        one, other = (getattr(rollout, name) for rollout in found)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "keys"), mostly_slow(
    FEW, [{"ppo__micro_batch_size": 3}, {"model__gradient_checkpointing": True}],
    quick=lambda kind, keys: ("ppo__micro_batch_size" in keys) == (kind in ("critic", "t5"))
    and kind in ("lora", "critic", "branch", "t5")))
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
    ["lora", "dora", *CRITIC_FREE], quick=lambda kind: kind in ("lora", CRITIC_FREE[0])))
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
    ("gpt_neox", {}), ("mixtral", {"num_key_value_heads": 1, "num_local_experts": 2}),
    ("marian", {}), ("pegasus", {})])
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
    quick=lambda advantage, kl: kl == ("reward" if advantage == "gae" else "loss")))
def test_the_gradient_does_not_depend_on_the_micro_batch(tmp_path, advantage, kl):
    found = []
    for micro in (None, 3):
        cfg = grouped(tmp_path, advantage, ppo__kl_in=kl, ppo__micro_batch_size=micro,
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


def test_samples_of_a_prompt_stand_together_and_differ(tmp_path):
    with session_of(grouped(tmp_path, "grpo")) as session:
        rollout = rollout_of(session)
        part = share_of_prompts(session, 6, 5)[0]
        single = session_of(small_config(tmp_path))
    prompts = rollout.prompts.texts
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
    assert len(set(prompts[::4])) == 4
    assert rollout.prompts.episodes == list(range(16))
    assert all(len(set(rollout.responses[i:i + 4])) > 1 for i in range(0, 16, 4))
    assert part.texts == prompts[6:11]
    with single as other:  # the order of prompts is the one without groups, position by position
        assert share_of_prompts(other, 0, 4)[0].texts == prompts[::4]


def test_what_is_left_to_the_estimator(tmp_path):
    def resolved(advantage, **keys):
        ppo = grouped(tmp_path, advantage, ppo__init_kl_coef=None, **{"ppo__kl_in": None} | keys
                      ).ppo
        return whitens_advantages(ppo), kl_in(ppo), kl_estimator(ppo), kl_coef(ppo)

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


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_group_without_its_invalid_samples_is_the_group(tmp_path, advantage):
    scores = [1.0, 2.0, 6.0, None, None, None, None, 3.0, *[0.5] * 8]
    cfg = grouped(tmp_path, advantage, reward__on_invalid="skip", ppo__init_kl_coef=0.0)
    with session_of(cfg, reward=lambda outputs, **_: scores[:len(outputs)]) as session:
        experience = experience_of(session)
    found = experience.advantages[:, 0].tolist()
    # three are left of the first prompt: mean 3, deviation sqrt(7); baselines 4, 3.5 and 1.5
    expected = [-3.0, -1.5, 4.5] if advantage == "rloo" else [x / math.sqrt(7) for x in (-2, -1, 3)]
    assert found[:3] == pytest.approx(expected, rel=1e-5)
    assert found[3:] == pytest.approx([0.0] * 9)  # alone in its group; then equal scores


@pytest.mark.parametrize(("advantage", "source"), mostly_slow(
    CRITIC_FREE, ["decode", "forward"], quick=lambda advantage, source: (
        source == ("forward" if advantage == "rloo" else "decode"))))
def test_without_a_critic_nothing_of_one_is_built_or_computed(tmp_path, advantage, source):
    with session_of(grouped(tmp_path, advantage, ppo__logprobs_from=source)) as session:
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


def test_a_critic_and_none_do_not_take_over_from_each_other(tmp_path):
    with session_of(grouped(tmp_path, "grpo")) as session:
        (tmp_path / "saved").mkdir()
        save_session(session, tmp_path / "saved")
    assert not (tmp_path / "saved/value_head.safetensors").exists()
    with (session_of(grouped(tmp_path, "gae")) as session,
          pytest.raises(CheckpointError, match="value")):
        load_session(session, tmp_path / "saved")


@pytest.mark.long
@pytest.mark.parametrize("advantage", mostly_slow(
    ESTIMATORS, quick=lambda advantage: advantage in ("gae", "grpo")))
def test_a_few_updates_raise_the_reward(tmp_path, advantage):
    cfg = grouped(tmp_path, advantage, ppo__num_rollouts=64, ppo__mini_batch_size=32,
                 ppo__optimizer__lr=5e-3, ppo__init_kl_coef=0.01)
    means = []
    with session_of(cfg, reward=count_good) as session:
        state = fresh_state(session)
        for step in range(5):
            rollout = rollout_of(session, start=64 * step)
            means.append(sum(rollout.scores) / 64)
            optimize(session, to_experience(rollout, state, cfg))
            state = update_moments(state, rollout, cfg)
    assert means[-1] > means[0] + 0.8


@pytest.mark.long
@pytest.mark.parametrize("estimator", mostly_slow(
    ["k1", "abs", "k2", "k3"], quick=lambda estimator: estimator == "k3"))
def test_a_kl_in_the_loss_holds_the_policy_back(tmp_path, estimator, caplog):
    moved = {}
    for coef in (0.0, 20.0):
        cfg = small_config(tmp_path, ppo__kl_in="loss", ppo__kl_estimator=estimator,
                           ppo__init_kl_coef=coef, ppo__optimizer__lr=3e-3, ppo__vf_coef=0.0)
        with session_of(cfg) as session:
            experience = experience_of(session)
            assert (experience.extras.ref_logprobs is None) == (coef == 0.0)
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


REFERENCES = {"copy": {}, "offloaded": {"model__reference__offload": True},
              "shared": {"model__num_layers_unfrozen": 1}, "adapter": KINDS["lora"][1]}


@pytest.mark.parametrize("kind", REFERENCES)
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
