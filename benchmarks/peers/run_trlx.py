"""trlX's AcceleratePPOTrainer (archived January 2024), from a checkout named by ``TRLX_SRC``.

With all layers trained its reference is a second model; with some of them frozen, a branch of the
policy's top layers ("hydra"). What it imports but never calls here (ray, wandb, deepspeed,
torchtyping) are empty modules.
"""

import contextlib
import importlib.machinery
import os
import sys
import tempfile
import types
from typing import Any

from job import on_gpu, prompt_texts, reward_of, run

NEVER = 10**9


def stand_in(name: str, **attributes: Any) -> None:
    """Put an empty module in place of one that is imported and never called."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    for key, value in attributes.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)


def prepare_imports() -> None:
    """Let trlX be imported without what it doesn't call."""
    import accelerate  # noqa: F401  (it looks for deepspeed itself, and must find none)
    import torch
    import transformers

    transformers.logging.set_verbosity_error()

    class TensorType:
        def __class_getitem__(cls, _: Any) -> type:
            return torch.Tensor

    stand_in("ray", is_initialized=lambda: False)
    stand_in("ray.air")
    stand_in("ray.air.session")
    stand_in("wandb")
    stand_in("deepspeed")
    stand_in("deepspeed.zero", GatheredParameters=lambda *_, **__: contextlib.nullcontext())
    stand_in("torchtyping", TensorType=TensorType)
    sys.path.insert(0, os.environ["TRLX_SRC"])


def configuration(job: Any) -> Any:
    """The job in trlX's words."""
    import transformers
    from trlx.data.configs import (
        ModelConfig,
        OptimizerConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainConfig,
        TRLConfig,
    )
    from trlx.models.modeling_ppo import PPOConfig

    # newer transformers pick an attention that its branch of top layers can't call
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) > (4, 35)
    return TRLConfig(
        train=TrainConfig(
            seq_length=job.longest_prompt + job.new_tokens, epochs=NEVER, total_steps=NEVER,
            batch_size=job.mini_batch, checkpoint_interval=NEVER, eval_interval=NEVER,
            pipeline="PromptPipeline", trainer="AcceleratePPOTrainer", tracker=None,
            checkpoint_dir=tempfile.mkdtemp(), save_best=False, seed=job.seed),
        model=ModelConfig(model_path=job.model_for_trlx, num_layers_unfrozen=job.layers_unfrozen,
                          model_extra_configs={"attn_implementation": "eager"} if newer else {}),
        tokenizer=TokenizerConfig(tokenizer_path=job.tokenizer, padding_side="left"),
        optimizer=OptimizerConfig(name="adamw", kwargs={
            "lr": job.lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        scheduler=SchedulerConfig(name="cosine_annealing",
                                  kwargs={"T_max": NEVER, "eta_min": job.lr}),
        method=PPOConfig(
            name="PPOConfig", num_rollouts=job.batch, chunk_size=job.batch, ppo_epochs=job.epochs,
            init_kl_coef=job.kl_coef, target=None, horizon=10000, gamma=job.gamma, lam=job.lam,
            cliprange=job.clip, cliprange_value=job.clip_value, vf_coef=job.vf_coef,
            scale_reward=None, ref_mean=None, ref_std=None, cliprange_reward=1e9,
            gen_kwargs={"max_new_tokens": job.new_tokens, "min_new_tokens": job.min_new_tokens,
                        "top_k": 0, "top_p": 1.0, "do_sample": True}))


def train(job: Any) -> None:
    if job.precision == "bf16":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if not on_gpu(job):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    prepare_imports()
    from trlx.pipeline.offline_pipeline import PromptPipeline
    from trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
    from trlx.utils import logging, set_seed

    logging.set_verbosity(logging.ERROR)
    set_seed(job.seed)
    reward = reward_of(job)
    trainer = AcceleratePPOTrainer(
        configuration(job), metric_fn=None, stop_sequences=[],
        reward_fn=lambda samples, prompts, outputs, **_: reward(outputs))
    prompts = PromptPipeline(prompt_texts(job), job.longest_prompt, trainer.tokenizer,
                             add_special_tokens=False)
    trainer.add_prompt_pipeline(prompts)
    trainer.add_eval_pipeline(prompts)
    trainer.evaluate = dict  # none of the others evaluates either
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.learn()


run(train)
