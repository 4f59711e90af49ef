"""Parts of a run whose memory is told beforehand: what each holds, and what can't be told."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import model_config
from sessions import set_keys

from ppocli.config.schema import OptimizerConfig, TrainConfig
from ppocli.estimate.check import check_memory, estimate
from ppocli.estimate.memory import disk_of
from ppocli.estimate.parts import Part, models_of, parts_of, state_sizes


def config_of(**keys) -> TrainConfig:
    """Of a model that is nowhere, unless its configuration is given too."""
    return set_keys(TrainConfig(), {"model.path": "x", **{
        key.replace("__", "."): value for key, value in keys.items()}})


def parts_by_kind(cfg: TrainConfig, config) -> dict[str, Part]:
    parts, unknown = parts_of(cfg, models_of(cfg, config))
    assert not unknown
    return {part.kind: part for part in parts}


def test_an_adapter_trains_fp32_on_a_base_that_is_not():
    layers, width = 3, 32
    config = model_config("llama", num_hidden_layers=layers, hidden_size=width)
    parts = parts_by_kind(config_of(model__peft={"type": "lora", "r": 4, "target_modules": [
        "q_proj"]}, hardware__precision="bf16"), config)
    adapter = layers * 2 * 4 * width  # A and B of each layer's query projection
    policy = parts["policy"]
    assert (policy.trained, policy.state, policy.cast) == (adapter, 8 * adapter, adapter)
    assert policy.size == 2 * (policy.parameters - adapter) + 4 * adapter
    assert "reference" not in parts  # the adapter switched off
    disk = disk_of(TrainConfig(), tuple(parts.values()))
    assert disk.model == 4 * adapter


def test_a_quantized_base_takes_less():
    width, inner, layers, words = 32, 48, 3, 37
    config = model_config("llama", num_hidden_layers=layers)
    keys = {"model__peft": {"type": "lora", "r": 4, "target_modules": ["q_proj"]},
            "hardware__precision": "bf16"}
    plain = parts_by_kind(config_of(**keys), config)["policy"].size
    # queries and output, keys and values of one head of two, and the three of the MLP
    linear = layers * (2 * width**2 + 2 * width * width // 2 + 3 * width * inner)
    found = parts_by_kind(config_of(**keys, model__quantization="8bit"), config)["policy"].size
    assert found == plain - 2 * linear + linear
    assert words * width == config.vocab_size * config.hidden_size
    found = parts_by_kind(config_of(**keys, model__quantization="4bit"), config)["policy"].size
    # half a byte, of 64 numbers a scale of a byte, of 64 * 256 one of four
    assert found == pytest.approx(plain - 2 * linear + linear * (1 / 2 + 1 / 64 + 1 / 4096),
                                  abs=layers * 7)


@pytest.mark.parametrize(("keys", "shape", "size"), [
    ({"name": "adamw"}, (10, 30), 8 * 300), ({"name": "sgd"}, (10, 30), 0),
    ({"name": "sgd", "momentum": 0.9}, (10, 30), 4 * 300),
    ({"name": "adafactor"}, (10, 30), 4 * (10 + 30)), ({"name": "adafactor"}, (30,), 4 * 30),
    ({"name": "adamw_8bit"}, (100, 30), 8 * 3000),  # too small for 8 bits
    # 6000 numbers in two times 8 bits; 24 blocks of 256 with a scale each
    ({"name": "adamw_8bit"}, (200, 30), 2 * 6000 + 2 * 4 * 24)])
def test_each_optimizer_keeps_what_it_keeps(keys, shape, size):
    assert sum(state_sizes(OptimizerConfig(**keys), torch.Size(shape))) == size


def test_a_classifier_among_the_rewards_is_a_part_and_a_function_is_unknown():
    cfg = config_of(model__path="builtin:reviews", reward__fns={
        "mood": {"fn": "classifier", "kwargs": {"model": "builtin:reviews-sentiment"}},
        "own": {"fn": "my_rewards:score"}, "brief": {"fn": "length"}})
    parts, unknown = parts_of(cfg, models_of(cfg))
    assert [(p.name, p.parameters, p.trained) for p in parts if p.kind == "reward"] == [
        ("reward builtin:reviews-sentiment", 360_002, 0)]
    assert unknown == {"reward my_rewards:score": "your function"}


def test_what_can_not_be_told_is_said(tmp_path, caplog):
    config = model_config("gpt2")
    cfg = config_of(model__reference__path=str(tmp_path / "nowhere"))
    found = estimate(cfg, models_of(cfg, config), prompt_tokens=20, cuda=False, ranks=1,
                     ranks_on_host=1)
    assert list(found.unknown) == ["reference"]
    assert "nowhere" in found.unknown["reference"]
    with caplog.at_level(logging.INFO, "ppocli"):
        check_memory(cfg, config, prompt_tokens=20, device=torch.device("cpu"), ranks=1,
                     ranks_on_host=1)
    assert len(caplog.records) == 1
    assert "left out: reference (" in caplog.text
    caplog.clear()
    bad = set_keys(cfg, {"model.peft": {"type": "lora", "target_modules": ["nothing"]}})
    with caplog.at_level(logging.INFO, "ppocli"):
        check_memory(bad, config, prompt_tokens=20, device=torch.device("cpu"), ranks=1,
                     ranks_on_host=1)
    assert len(caplog.records) == 1
    assert "can't be told beforehand: The adapter does not fit" in caplog.text


def test_a_small_model_is_not_worth_a_word_and_the_check_can_be_off(caplog):
    config = model_config("gpt2")
    cfg = set_keys(TrainConfig(), {"model.path": "x"})
    with caplog.at_level(logging.INFO, "ppocli"):
        check_memory(cfg, config, prompt_tokens=20, device=torch.device("cpu"), ranks=1,
                     ranks_on_host=1)
        off = set_keys(cfg, {"hardware.memory_check": "off"})
        check_memory(off, None, prompt_tokens=20, device=torch.device("cpu"), ranks=1,
                     ranks_on_host=1)
    assert not caplog.records
