"""What is told beforehand against the peak of CUDA's allocator."""

import pytest
import torch
from helpers import save_lm, write_prompts
from sessions import fresh_state, optimize, rollout_of, session_of, small_config

from ppocli.estimate.check import estimate
from ppocli.estimate.parts import models_of
from ppocli.tasks.ppo.experience import to_experience, update_moments

pytestmark = pytest.mark.gpu
SHAPES = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
    "llama": {"num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816,
              "num_attention_heads": 16, "num_key_value_heads": 4,
              "max_position_embeddings": 1024},
}


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize("keys", [
    {}, {"ppo__micro_batch_size": 2}, {"model__gradient_checkpointing": True},
    {"hardware__precision": "bf16"},
    {"hardware__precision": "bf16", "model__gradient_checkpointing": True},
    {"model__num_layers_unfrozen": 4}, {"model__reference__offload": True},
    {"model__peft": {"type": "lora"}, "hardware__precision": "bf16"}])
def test_the_peak_is_within_15_percent(tmp_path, kind, keys):
    save_lm(tmp_path / "lm", kind, gain=1.0, vocab_size=32000, **SHAPES[kind])
    write_prompts(tmp_path / "prompts.jsonl", ["the film plot actor was is not very"] * 16)
    cfg = small_config(tmp_path, hardware__device="cuda", ppo__num_rollouts=16,
                       ppo__mini_batch_size=8, generation__max_new_tokens=200,
                       generation__min_new_tokens=200, **keys)
    found = estimate(cfg, models_of(cfg), prompt_tokens=8, cuda=True, ranks=1, ranks_on_host=1)
    before = torch.cuda.memory_allocated()
    with session_of(cfg) as session:
        rollout = rollout_of(session)
        state = update_moments(fresh_state(session), rollout, cfg)
        torch.cuda.reset_peak_memory_stats()
        optimize(session, to_experience(rollout, state, cfg))
        update = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        rollout_of(session, start=16)  # now with the optimizer's state
        rollouts = torch.cuda.max_memory_allocated() - before
    assert found.sums.update == pytest.approx(update, rel=0.15)
    assert max(found.sums.generate, found.sums.score) == pytest.approx(rollouts, rel=0.15)
