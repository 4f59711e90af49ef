"""TRL's SFTTrainer and RewardTrainer (1.12) on a file of rows, in its order and in fp32.

Started in the environment ``experimental`` as ``python run_trl_supervised.py JOB.json``; what the
job holds says ``supervised.Job``. The option ``padding_free`` lays the rows of a pass end to end
without padding; ``checkpointing`` computes activations again in the backward pass, as is TRL's
default.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def train(job: Any) -> dict[str, Any]:
    """Train as the job says and save the weights; returns what each step said and took."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(job.threads)
    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        """Notes each step's loss and what it took, logging included."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.wall, self.processor = time.perf_counter(), time.process_time()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                wall, processor = time.perf_counter(), time.process_time()
                steps.append({"loss": logs["loss"], "grad_norm": logs["grad_norm"],
                              "wall": wall - self.wall, "processor": processor - self.processor})
                self.wall, self.processor = wall, processor

    padding_free = "padding_free" in job.options
    same: dict[str, Any] = {
        "output_dir": str(Path(job.out) / "trl"), "max_steps": job.steps,
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.batch // job.micro_batch,
        "learning_rate": job.lr, "adam_beta1": job.betas[0], "adam_beta2": job.betas[1],
        "adam_epsilon": job.eps, "weight_decay": 0.0, "lr_scheduler_type": job.scheduler,
        "max_grad_norm": job.max_grad_norm, "bf16": False, "use_cpu": True, "seed": job.seed,
        "gradient_checkpointing": "checkpointing" in job.options,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "logging_first_step": True,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "max_length": None if padding_free else job.max_length}
    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    lines = Path(job.rows).read_text(encoding="utf-8").splitlines()
    given: dict[str, Any] = {
        "processing_class": tokenizer, "callbacks": [Clock()],
        "train_dataset": Dataset.from_list([json.loads(line) for line in lines])}
    if job.task == "sft":
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
        trainer = SFTTrainer(model, SFTConfig(**same, padding_free=padding_free), **given)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(
            job.model, num_labels=1, dtype=torch.float32)
        config = RewardConfig(**same, center_rewards_coefficient=job.center_coef)
        trainer = RewardTrainer(model, config, **given)
    trainer.train()
    trainer.model.save_pretrained(Path(job.out) / "model")
    return {"steps": steps}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    told = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    found = train(told)
    (Path(told.out) / "peer.json").write_text(json.dumps(found), encoding="utf-8")
