"""Value functions with layers of their own: what trains them, what they share, where they start."""

from dataclasses import replace

import peft
import pytest
import torch
from helpers import DECODERS, SPECIAL, WORDS, save_lm
from safetensors.torch import save_file
from sessions import (
    count_letters,
    experience_of,
    gradients,
    optimize,
    refused_session,
    rollout_of,
    session_of,
    small_config,
    wake_the_value_head,
    weights_of,
)
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from ppocli.errors import InputError
from ppocli.models.layout import lay_out
from ppocli.models.loading.load_adapters import peft_names
from ppocli.models.policy import ValueAdapter, ValueBranch, ValueModel
from ppocli.models.trunk import layer_stack, response_hidden

pytestmark = pytest.mark.long

CRITICS = {"branch": {"model__value__kind": "branch", "model__value__num_layers_unfrozen": 1},
           "adapter": {"model__value__kind": "adapter", "model__peft": {
               "type": "lora", "r": 4, "target_modules": "all-linear"}},
           "model": {"model__value__kind": "model"}}
"""those with layers of their own"""


def with_critic(tmp_path, critic, kind="gpt2", **over):
    save_lm(tmp_path / "lm", kind, gain=1.5)
    return small_config(tmp_path, **{**CRITICS.get(critic, {}), **over})


@pytest.mark.parametrize("kind", DECODERS)
def test_branch_and_model_start_with_the_states_of_the_policy(tmp_path, kind):
    for critic, cls in (("branch", ValueBranch), ("adapter", ValueAdapter), ("model", ValueModel)):
        with session_of(with_critic(tmp_path, critic, kind), reward=count_letters) as session:
            assert isinstance(session.policy.value_trunk, cls)
            rollout = rollout_of(session)
            batch = lay_out(rollout.sequences)
            with torch.no_grad():
                hidden, shared = session.policy.trunk(batch)
                own = session.policy.value_trunk(session.policy.lm, batch, shared)
            torch.testing.assert_close(own, hidden, rtol=0, atol=2e-6)


@pytest.mark.parametrize("critic", ["adapter", "model"])
def test_a_critic_with_a_pass_of_its_own_leaves_the_policy_without_a_value_gradient(tmp_path,
                                                                                    critic):
    cfg = with_critic(tmp_path, critic, ppo__vf_coef=0.0)
    with session_of(cfg, reward=count_letters) as session:
        experience = experience_of(session)
        without = gradients(session, experience)[0]
    cfg = with_critic(tmp_path, critic, ppo__vf_coef=1.0)
    with session_of(cfg, reward=count_letters) as session:
        wake_the_value_head(session)
        again = experience_of(session)
        again = replace(again, advantages=experience.advantages)
        with_value = gradients(session, again)[0]
    for name, grad in without.items():
        if name.startswith("lm."):
            torch.testing.assert_close(with_value[name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("critic", ["head", "branch"])
def test_critic_warm_up_trains_the_critic_and_nothing_else(tmp_path, critic):
    cfg = with_critic(tmp_path, critic, ppo__critic_warmup_steps=1, ppo__vf_coef=1.0,
                      ppo__optimizer__lr=0.01)
    with session_of(cfg, reward=count_letters) as session:
        before = weights_of(session)
        own = [name for name in before if name.startswith("value_trunk.")]
        assert all(p.requires_grad for name, p in session.policy.named_parameters() if name in own)
        result = optimize(session, experience_of(session))
        moved = {n for n, p in weights_of(session).items() if not torch.equal(p, before[n])}
        later = experience_of(session)
    assert moved
    assert all(name.startswith("value_head." if critic == "head" else "value_") for name in moved)
    # a head that starts at 0 hands nothing down in the first update only, LoRA's B in the next
    assert len(moved & set(own)) > (0.4 if critic == "adapter" else 0.9) * len(own) - 1
    assert result.terms["value"] > 0
    assert later.values.abs().max() > 1e-3


TOP = {"model__peft": {**CRITICS["adapter"]["model__peft"], "target_modules": ["c_attn", "c_fc"],
                       "layers_to_transform": [1]}}


@pytest.mark.parametrize(("keys", "other"), [
    ({}, {"model__gradient_checkpointing": True}),
    ({**TOP, "hardware__frozen_states_mib": 0}, TOP)], ids=["recomputed", "entered above"])
def test_a_value_adapter_s_gradient_is_the_same_however_its_pass_is_made(tmp_path, keys, other):
    found = []
    for each in (keys, other):
        with session_of(with_critic(tmp_path, "adapter", **{**each, "ppo__vf_coef": 1.0}),
                        reward=count_letters) as session:
            wake_the_value_head(session)
            with torch.no_grad():  # both adapters do something, each its own
                for i, (name, p) in enumerate(session.policy.named_parameters()):
                    if "lora_B" in name:
                        p.normal_(0, 0.05, generator=torch.Generator().manual_seed(i))
            experience = experience_of(session)
            assert (session.policy.split is not None) == (other is TOP)
            found.append(gradients(session, experience)[0])
    assert max(grad.abs().max() for name, grad in found[0].items()
               if name.startswith("value_trunk.")) > 1e-4
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)


def test_a_value_adapter_is_one_of_peft_by_its_exported_names(tmp_path):
    fields = {"r": 4, "target_modules": ["c_attn", "c_fc"], "modules_to_save": ["ln_f"],
              "use_dora": True}
    cfg = with_critic(tmp_path, "adapter", model__peft={"type": "lora", **fields})
    with session_of(cfg, reward=count_letters) as session:
        trunk = session.policy.value_trunk
        with torch.no_grad():
            for i, p in enumerate(trunk.parameters()):
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.05)
            batch = lay_out(rollout_of(session).sequences)
            states = trunk(session.policy.lm, batch, [])
    peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True, **fields).save_pretrained(
        str(tmp_path / "value"))
    save_file(peft_names(trunk.state_dict()), tmp_path / "value/adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "lm").eval()
    lm = peft.PeftModel.from_pretrained(base, str(tmp_path / "value")).base_model.model
    with torch.no_grad():
        torch.testing.assert_close(response_hidden(lm, batch), states, rtol=0, atol=1e-5)


def test_only_the_top_of_a_value_model_trains_if_wanted(tmp_path):
    cfg = with_critic(tmp_path, "model", model__value__num_layers_unfrozen=1)
    with session_of(cfg, reward=count_letters) as session:
        stack = layer_stack(session.policy.value_trunk.lm)
        assert [any(p.requires_grad for p in layer.parameters()) for layer in stack] == [
            False, True]


def other_words(folder):
    """Give a model's folder a tokenizer whose ids mean other words."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"film"', '"FILM"').replace('"plot"', '"film"')
                    .replace('"FILM"', '"plot"'))


UNFIT = {"t5": ("t5", {}), "short": ("gpt2", {"n_positions": 12}), "words": ("gpt2", {}),
         "small": ("llama", {"vocab_size": 20})}


@pytest.mark.parametrize(("role", "name", "message"), [
    ("value", "t5", "is an encoder-decoder"), ("reference", "short", "has 12 positions"),
    ("value", "words", "The tokenizers differ"), ("reference", "small", "embeds only 20"),
    ("value", "bert", "is not causal")])
def test_what_does_not_fit_the_policy_is_refused_before_the_first_pass(
        tmp_path, role, name, message):
    if name in UNFIT:
        kind, over = UNFIT[name]
        save_lm(tmp_path / name, kind, **over)
    if name == "words":
        other_words(tmp_path / name)
    if name == "bert":
        BertModel(BertConfig(
            num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16,
            vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=32)
        ).save_pretrained(tmp_path / name)
    keys = {"reference": {"ppo__kl_estimator": "full"}, "value": CRITICS["model"]}[role]
    cfg = small_config(tmp_path, **keys, **{f"model__{role}__path": str(tmp_path / name)})
    assert refused_session(cfg, InputError, message).where == f"model.{role}.path"


def test_a_branch_that_leaves_no_layer_below_it_is_refused(tmp_path):
    cfg = with_critic(tmp_path, "branch", model__value__num_layers_unfrozen=2)
    refused_session(cfg, InputError, "it needs one below it")


def test_the_critic_s_own_optimizer_and_schedule(tmp_path):
    """Plain SGD at rate 0.5 that warms up over 4 updates, beside an AdamW that moves nothing."""
    cfg = with_critic(
        tmp_path, "model", ppo__optimizer__lr=0.0, ppo__optimizer__value_lr=0.5,
        ppo__value_optimizer__name="sgd", ppo__value_scheduler__warmup_updates=4, ppo__vf_coef=1.0,
        ppo__ppo_epochs=1, ppo__mini_batch_size=16, ppo__max_grad_norm=None)
    with session_of(cfg, reward=count_letters) as session:
        before = {n: p.detach().clone() for n, p in session.policy.named_parameters()}
        experience = experience_of(session)
        grads = gradients(session, experience)[0]
        optimize(session, experience)
        for name, parameter in session.policy.named_parameters():
            if name.startswith("value_"):
                # the first of four warm-up updates runs at a fifth of the rate
                wanted = before[name] - 0.5 / 5 * grads.get(name, torch.zeros(()))
                torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(parameter, before[name])
        slots = [len(state) for state in session.trained.optimizer.state.values() if state]
        assert set(slots) == {3}  # SGD keeps nothing, AdamW a count and two moments
        assert len(slots) == sum(n.startswith("lm.") for n in before)


@pytest.mark.parametrize(("critic", "kind"), [
    ("branch", "gpt2"), pytest.param("model", "llama", marks=pytest.mark.slow),
    pytest.param("model", "t5", marks=pytest.mark.slow)])
def test_frozen_attention_of_the_critic_stays_and_the_rest_learns(tmp_path, critic, kind):
    cfg = with_critic(tmp_path, critic, kind, ppo__vf_coef=1.0, ppo__optimizer__lr=0.01,
                      model__value__freeze_attention=True)
    with session_of(cfg, reward=count_letters) as session:
        before = weights_of(session)
        optimize(session, experience_of(session))
        optimize(session, experience_of(session))
        after = weights_of(session)
        told = {name for name, p in session.policy.named_parameters()
                if name.startswith("value_") and not p.requires_grad}
    words = ("attn.", "self_attn.", "SelfAttention.", "EncDecAttention.")
    frozen = {name for name in after if name.startswith("value_trunk") and
              any(word in name for word in words)}
    assert told == frozen
    assert len(frozen) >= 4
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    moved = {name for name in after
             if name.startswith("value_") and not torch.equal(before[name], after[name])}
    assert any("mlp" in name or "DenseReluDense" in name for name in moved)
    assert not moved & frozen
