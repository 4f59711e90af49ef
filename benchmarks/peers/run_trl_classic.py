"""TRL's classic PPOTrainer (0.11): a value head on the policy, and a frozen copy."""

from typing import Any

from job import on_gpu, prompt_texts, reward_of, run


def train(job: Any) -> None:
    import torch
    from transformers import AutoTokenizer
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    model, reference = (AutoModelForCausalLMWithValueHead.from_pretrained(
        job.model, torch_dtype=torch.float32, summary_dropout_prob=0.0) for _ in range(2))
    accelerator: dict[str, Any] = {} if on_gpu(job) else {"cpu": True}
    if job.precision == "bf16":  # autocast over fp32 weights, as for every peer
        accelerator["mixed_precision"] = "bf16"
    trainer = PPOTrainer(PPOConfig(
        learning_rate=job.lr, batch_size=job.batch, mini_batch_size=job.mini_batch,
        gradient_accumulation_steps=1, ppo_epochs=job.epochs, init_kl_coef=job.kl_coef,
        adap_kl_ctrl=False, gamma=job.gamma, lam=job.lam, cliprange=job.clip,
        cliprange_value=job.clip_value, vf_coef=job.vf_coef, seed=job.seed,
        accelerator_kwargs=accelerator), model, reference, tokenizer)
    device = trainer.accelerator.device
    queries = [torch.tensor(row, device=device)
               for row in tokenizer(prompt_texts(job))["input_ids"]]
    reward = reward_of(job)
    while True:
        # its own default generates 4 responses at a time
        responses = trainer.generate(
            queries, batch_size=job.batch, return_prompt=False, do_sample=True, top_k=0, top_p=1.0,
            temperature=1.0, min_new_tokens=job.min_new_tokens, max_new_tokens=job.new_tokens,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        trainer.step(queries, responses, [torch.tensor(one) for one in reward(texts)])


run(train)
