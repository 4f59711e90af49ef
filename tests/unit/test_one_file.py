"""The lesson's PPO in one file of plain torch is the oracle of the engine's step."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from sessions import (
    fresh_state,
    gradients,
    grads_of,
    optimize,
    rollout_of,
    session_of,
    small_config,
    wake_the_value_head,
)

from ppocli.config.schema import TrainConfig
from ppocli.ppo.step import plan_updates, to_experience

LESSON = Path(__file__).parents[2] / "docs" / "learn" / "ppo_in_one_file.py"


def lesson():
    spec = importlib.util.spec_from_file_location("ppo_in_one_file", LESSON)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trunk_of(gpt2):
    """A GPT-2's states of padded rows, as the lesson's own trunk gives them."""
    def states(ids, mask):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return gpt2.transformer(input_ids=ids, attention_mask=mask.long(),
                                position_ids=positions).last_hidden_state

    module = torch.nn.Module()
    module.forward, module.gpt2 = states, gpt2
    return module


def padded(rollout):
    """ids and mask [B, T], and which of the tokens from the second on are actions, [B, T-1]."""
    prompts, responses = rollout.prompts, rollout.response_tokens
    ids = torch.cat([prompts.tokens, responses], 1)
    mask = torch.cat([prompts.mask, rollout.response_mask], 1)
    actions = torch.cat([torch.zeros_like(prompts.mask), rollout.response_mask], 1)
    return ids, mask, actions[:, 1:]


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_engine_agrees_with_the_one_file_of_the_lesson(tmp_path, kl_in):
    one_file = lesson()
    cfg: TrainConfig = small_config(
        tmp_path, ppo__kl_in=kl_in, ppo__kl_estimator="k3" if kl_in == "loss" else "k1",
        ppo__init_kl_coef=0.3, ppo__ppo_epochs=1, ppo__cliprange_value=0.2, ppo__vf_coef=0.1,
        ppo__optimizer__eps=1e-3, ppo__max_grad_norm=1.0, ppo__num_rollouts=16,
        ppo__mini_batch_size=8, hardware__gemm="default")
    settings = one_file.Settings(gamma=cfg.ppo.gamma, lam=cfg.ppo.lam, clip=0.2, vf_coef=0.1,
                                 kl_coef=0.3, kl_in_loss=kl_in == "loss")
    with session_of(cfg) as session:
        reference = copy.deepcopy(session.policy)
        wake_the_value_head(session)
        for i, p in enumerate(session.policy.lm.parameters()):  # so that there is a KL
            noise = torch.Generator().manual_seed(i)
            p.data.add_(0.02 * torch.randn(p.shape, generator=noise))
        model, reference = (one_file.ActorCritic(trunk_of(policy.lm.eval()), policy.lm.lm_head,
                                                 policy.value_head)
                            for policy in (copy.deepcopy(session.policy), reference))
        rollout = rollout_of(session)
        lengths = rollout.response_mask.sum(1)
        assert lengths.min() < lengths.max()
        experience = to_experience(rollout, fresh_state(session), session.cfg)
        batch = one_file.prepare(model, reference, *padded(rollout),
                                 torch.tensor(rollout.scores), settings)
        kl = (batch["old_logprobs"] - batch["ref_logprobs"])[batch["response"]]
        assert kl.abs().max() > 0.01

        grads, terms = gradients(session, experience)
        loss = one_file.ppo_loss(model, batch, settings)
        loss.backward()
        assert terms["total"] == pytest.approx(float(loss.detach()), abs=1e-6)
        assert_same(grads, grads_of(model))

        plan = plan_updates(session, experience, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
        session.trained.clear()
        optimize(session, experience)
        for group in plan.groups[:2]:
            one_file.update(model, optimizer, {name: x[group.rows] for name, x in batch.items()},
                            settings)
        assert len(plan.groups) == 2
        assert_same(dict(session.policy.named_parameters()), dict(model.named_parameters()))


def assert_same(engine, plain):
    """Tensors of the policy by its names, and those of the lesson's model by its own."""
    def name(text):
        return text.replace("trunk.gpt2.", "lm.").replace("head.weight", "lm.lm_head.weight") \
            if not text.startswith("value_head") else text

    plain = {name(key): value for key, value in plain.items()}
    assert set(engine) <= set(plain)
    for key, value in engine.items():
        torch.testing.assert_close(value, plain[key], rtol=0, atol=1e-6, msg=key)


@pytest.mark.slow
def test_the_lesson_learns(capsys):
    lesson().main(steps=12, digits=6, new_tokens=4)
    rewards = [float(line.split("reward")[1].split()[0])
               for line in capsys.readouterr().out.splitlines()]
    assert rewards[-1] > rewards[0] + 0.2
