"""TRL's experimental PPOTrainer (1.12): policy, reference and a value model of its own.

The option ``value=free`` gives it a value model that costs nothing, which nobody can train with:
the least that the rest of it takes.
"""

import os
import tempfile
from typing import Any

from job import on_gpu, prompt_texts, reward_of, run

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def free_value_model() -> Any:
    """A value model of one linear map over token ids."""
    import torch

    class Trunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 4)

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return hidden(self.linear(input_ids.unsqueeze(-1).float() * 1e-3))

    class Value(torch.nn.Module):
        base_model_prefix = "trunk"

        def __init__(self) -> None:
            super().__init__()
            self.trunk = Trunk()
            self.score = torch.nn.Linear(4, 1)

    return Value()


def hidden(states: Any) -> Any:
    """A trunk's output as the trainer reads it."""
    from types import SimpleNamespace

    return SimpleNamespace(hidden_states=(states,))


def reward_model(job: Any, tokenizer: Any, prompt_width: int) -> Any:
    """The reward function in the shape of a reward model: a trunk, and a head that changes nothing.

    Args:
        prompt_width: of the longest prompt; others are padded on the left.
    """
    import torch

    reward = reward_of(job)

    class Trunk(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
            # padding arrives as token 0, which is a word
            ids = input_ids.masked_fill(~attention_mask.bool(), tokenizer.pad_token_id)
            texts = tokenizer.batch_decode(ids[:, prompt_width:], skip_special_tokens=True)
            scores = torch.tensor(reward(texts), device=input_ids.device)
            return hidden(scores[:, None, None].expand(-1, input_ids.shape[1], 1).clone())

    class Reward(torch.nn.Module):
        base_model_prefix = "trunk"

        def __init__(self) -> None:
            super().__init__()
            self.trunk = Trunk()
            self.score = torch.nn.Identity()

    return Reward()


def train(job: Any) -> None:
    if job.precision == "bf16":  # the trainer makes an Accelerator of its own
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    policy, reference = (AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
                         for _ in range(2))
    value = free_value_model() if job.options.get("value") == "free" else \
        AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=1,
                                                           dtype=torch.float32)
    prompts = tokenizer(prompt_texts(job))["input_ids"]
    rows = Dataset.from_dict({"input_ids": prompts})
    forced = job.min_new_tokens == job.new_tokens
    if not forced:  # what its own configuration has no word for, generate takes from the model's
        policy.generation_config.min_new_tokens = job.min_new_tokens
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(), learning_rate=job.lr, per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=1, num_mini_batches=job.batch // job.mini_batch,
        num_ppo_epochs=job.epochs, total_episodes=job.batch * job.rollouts,
        response_length=job.new_tokens, temperature=1.0,
        local_rollout_forward_batch_size=job.batch, num_sample_generations=0,
        stop_token=None if forced else "eos", kl_coef=job.kl_coef,
        cliprange=job.clip, cliprange_value=job.clip_value, vf_coef=job.vf_coef, gamma=job.gamma,
        lam=job.lam, lr_scheduler_type="constant", bf16=job.precision == "bf16",
        gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True,
        seed=job.seed, use_cpu=not on_gpu(job))
    PPOTrainer(args=config, processing_class=tokenizer, model=policy, ref_model=reference,
               reward_model=reward_model(job, tokenizer, max(map(len, prompts))),
               value_model=value, train_dataset=rows, eval_dataset=rows,
               data_collator=DataCollatorWithPadding(tokenizer)).train()


run(train)
