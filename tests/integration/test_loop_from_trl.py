"""Loops and objects as TRL's classic PPOTrainer (up to 0.11) took them."""

from pathlib import Path

import pytest
import torch
from helpers import refused
from runs import WORDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppocli import PPOTrainer
from ppocli.errors import ConfigError

TEXTS = ["the film", "i saw", "this plot was", "it"]
CONFIG = {"ppo": {"num_rollouts": 4, "mini_batch_size": 2, "num_steps": 3, "total_episodes": None},
          "hardware": {"device": "cpu", "num_threads": 1, "gemm": "default"}, "run_name": "trl"}


@pytest.fixture
def tokenizer(shared_world: Path):
    return AutoTokenizer.from_pretrained(shared_world / "lm")


def test_a_loop_of_trl_runs_as_it_stands(shared_world, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(shared_world / "lm")
    ref_model = AutoModelForCausalLM.from_pretrained(shared_world / "lm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ppo_trainer = PPOTrainer({**CONFIG, "output_dir": str(tmp_path)}, model, ref_model, tokenizer)
    generation_kwargs = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True,
                         "pad_token_id": tokenizer.eos_token_id, "max_new_tokens": 8}
    query_tensors = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in TEXTS]
    for way in ("batched", "one by one"):
        if way == "batched":
            response_tensors = ppo_trainer.generate(
                query_tensors, return_prompt=False, batch_size=2, length_sampler=lambda: 6,
                **generation_kwargs)
            assert max(map(len, response_tensors)) == 6
        else:
            response_tensors = []
            for query in query_tensors:
                query_response = ppo_trainer.generate(query, **generation_kwargs).squeeze()
                assert torch.equal(query_response[:len(query)], query)
                response_tensors.append(query_response[len(query):])
        rewards = [torch.tensor(float(len(text))) for text in
                   tokenizer.batch_decode(response_tensors)]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log(stats)
    assert ppo_trainer.model is model
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    saved = ppo_trainer.save_checkpoint()
    ppo_trainer.close()
    run = saved.parents[1]
    with PPOTrainer([f"resume={run}"]) as trainer:
        for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        trainer.step(trainer.generate(TEXTS), [1.0, 0.0, 0.0, 1.0])


MASKED = ["ppo.ppo_epochs=1", "ppo.num_steps=2", "ppo.num_rollouts=3", "ppo.mini_batch_size=3",
          "ppo.micro_batch_size=2", "ppo.optimizer.name=sgd", "ppo.optimizer.lr=0.3",
          "ppo.gamma=0.9", "ppo.lam=0.8", "ppo.init_kl_coef=0.3", "ppo.kl_in=reward",
          "ppo.step_kl=null",
          "ppo.vf_coef=0.5", "ppo.max_grad_norm=null", "run_name=masked"]
QUERIES = [[4, 9], [12], [7, 8, 9]]
RESPONSES = [[4, 9, 6, 11, 5, 1], [12, 5, 20], [30, 4, 5, 6]]
MASKS = [[1, 0, 0, 1, 1, 0], [0, 1, 1], [1, 1, 0, 1]]
SCORES = [1.0, -1.5, 2.0]


def loss_of_trl(policy, reference) -> tuple[torch.Tensor, float]:
    """TRL 0.11's loss at the first update, where ratio and clipping do nothing, and its KL:
    ``compute_rewards`` and ``loss`` of trl/trainer/ppo_trainer.py, written anew."""
    rows = []
    for query, response, kept, score in zip(QUERIES, RESPONSES, MASKS, SCORES, strict=True):
        ids, mask = torch.tensor([query + response]), torch.tensor(kept).float()
        said = slice(len(query) - 1, -1)
        out = policy.lm(ids, output_hidden_states=True)
        chosen = torch.tensor(response)[:, None]
        logprobs, ref = (torch.log_softmax(logits[0, said], -1).gather(1, chosen)[:, 0]
                         for logits in (out.logits, reference(ids).logits.detach()))
        vpreds = policy.value_head(out.hidden_states[-1])[0, said]
        rewards = -0.3 * (logprobs.detach() - ref)
        rewards[mask.nonzero()[-1]] += score
        values, rewards, last, advantages = vpreds.detach() * mask, rewards * mask, 0.0, []
        for t in reversed(range(len(mask))):
            following = values[t + 1] if t + 1 < len(mask) else 0.0
            last = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.8 * last
            advantages.insert(0, last)
        advantages = torch.stack(advantages)
        kl = float(((logprobs.detach() - ref) * mask).sum())
        rows.append((logprobs, vpreds, advantages, advantages + values, mask.bool(), kl))
    logprobs, vpreds, advantages, returns = (
        torch.cat([row[i][row[4]] for row in rows]) for i in range(4))
    whitened = (advantages - advantages.mean()) / advantages.std(unbiased=False)
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = -(whitened * ratio).mean() + 0.5 * 0.5 * (vpreds - returns).square().mean()
    return loss, sum(row[5] for row in rows) / 3


def test_response_masks_leave_tokens_out_as_in_trl(shared_world, tmp_path):
    """The whole update against TRL's formulas, once the policy has left its reference and values
    are not 0 any more; a mask leaves tokens out at the start, in the middle and at the end."""
    reference = AutoModelForCausalLM.from_pretrained(shared_world / "lm").eval()
    with PPOTrainer([f"model.path={shared_world / 'lm'}", *WORDS, *MASKED,
                     f"output_dir={tmp_path}"]) as trainer:
        trainer.step(QUERIES, RESPONSES, SCORES)
        policy = trainer._session.policy
        loss, kl = loss_of_trl(policy, reference)
        names, parameters = zip(*policy.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        expected = {name: (p - 0.3 * g).detach() for name, p, g in
                    zip(names, parameters, gradients, strict=True)}
        with pytest.raises(ConfigError, match="has 5 values; its response has 6"):
            trainer.step(QUERIES, RESPONSES, SCORES, [MASKS[0][1:], *MASKS[1:]])
        with pytest.raises(ConfigError, match="keeps no token"):
            trainer.step(QUERIES, RESPONSES, SCORES, [[0] * 6, *MASKS[1:]])
        stats = trainer.step(QUERIES, RESPONSES, SCORES, [torch.tensor(mask) for mask in MASKS])
        assert abs(kl) > 1e-3
        assert stats["objective/kl"] == pytest.approx(kl, rel=1e-4)
        assert stats["rollout/response_tokens_mean"] == (3 + 2 + 3) / 3
        for name, parameter in policy.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("arguments", "said"), [
    ({"max_length": 20}, "max_length"), ({"batch_size": 0}, "batch_size"),
    ({"max_new_tokens": 64}, "new tokens leave no room")])
def test_generation_arguments_are_checked(arguments, said, idle):
    with refused(ConfigError, said):
        idle.generate([[4, 9]], **arguments)


def test_objects_that_do_not_fit_are_refused(shared_world, tokenizer, tmp_path):
    with refused(ConfigError, "no language model"):
        PPOTrainer({**CONFIG, "output_dir": str(tmp_path)}, torch.nn.Linear(2, 2),
                   tokenizer=tokenizer)
    assert not (tmp_path / "trl").exists()
