"""Adapters under DDP and ZeRO 1 to 3: the update of one process, and checkpoints that go on."""

from __future__ import annotations

import pytest
import torch
from ranks import (
    ONE_UPDATE,
    assert_same_update,
    config_below,
    largest_difference,
    run_job,
    under,
)
from safetensors.torch import load_file

LORA = {"type": "lora", "r": 4, "target_modules": ["c_attn", "c_fc"]}
PREFIX = {"type": "prefix", "num_virtual_tokens": 3}
PROMPT = {"type": "prompt", "num_virtual_tokens": 3}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    return config_below(tmp_path_factory.mktemp("ranks"), ONE_UPDATE)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("peft", "stage"), [
    (LORA, 3), slow(LORA, 0), slow(LORA, 1), slow(LORA, 2), slow(PREFIX, 0), slow(PREFIX, 3),
    slow(PROMPT, 0), slow(PROMPT, 3)])
def test_one_update_is_the_same_on_two_ranks(config, tmp_path, peft, stage):
    settings = {**config, "model.peft": peft, "ppo.optimizer.name": "sgd"}
    alone = run_job(tmp_path, "alone", settings, world=1)
    many = run_job(tmp_path, "many", {**settings, **under(stage, tmp_path)}, world=2)
    assert_same_update(alone, many)
    trained = {name for name in alone if name.startswith("weight/lm.")}
    assert trained
    assert all("lora_" in name or "prompt_encoder" in name for name in trained)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("peft", "stage"), [
    slow(LORA, 3), slow(LORA, 0), slow(LORA, 1), slow(LORA, 2), slow(PREFIX, 3)])
def test_a_checkpoint_goes_on_exactly(config, tmp_path, peft, stage):
    settings = {**config, "model.peft": peft, **under(stage, tmp_path)}
    folder = tmp_path / "saved"
    straight = run_job(tmp_path, "straight", settings, f"save={folder}", world=2)
    resumed = run_job(tmp_path, "resumed", settings, f"load={folder}", world=2)
    for prefix in ("weight/", "state/"):
        assert largest_difference(straight, resumed, prefix) == 0.0
    saved = load_file(folder / "policy" / "adapter_model.safetensors")
    assert all(bool(tensor.any()) and torch.isfinite(tensor).all() for tensor in saved.values())
