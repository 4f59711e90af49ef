"""``ppocli estimate`` as a user types it, and what a run does that can't fit."""

import json

import pytest
import torch
from helpers import model_config, save_lm, write_prompts
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with ``lm`` (a whole model), ``outline`` (config.json alone) and ``huge``, whose
    config.json promises far more than its weights hold and any machine has."""
    folder = tmp_path_factory.mktemp("place")
    save_lm(folder / "lm")
    model_config("llama", hidden_size=256, num_hidden_layers=3).save_pretrained(folder / "outline")
    save_lm(folder / "huge", "llama")
    model_config("llama", hidden_size=65536, intermediate_size=262144, num_attention_heads=64,
                 num_key_value_heads=64, num_hidden_layers=20).save_pretrained(folder / "huge")
    save_file({"x": torch.zeros(1)}, folder / "huge/model.safetensors", metadata={"format": "pt"})
    write_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture
def typed(place, app, monkeypatch):
    """A command in this process, in :func:`place`."""
    monkeypatch.chdir(place)
    return app


RUN = ("prompts.path=prompts.jsonl", "reward.fn=length", "reward.kwargs.target=4",
       "ppo.num_steps=1", "hardware.device=cpu")


def test_it_tells_what_a_run_takes(typed):
    done = typed("estimate", "model.path=./lm", *RUN, code=0)
    for text in ("./lm on cpu fp32, 1 process", "tokens of prompt (assumed; set it with --prompt",
                 "MiB per process", "optimizer state", "keys and values (KV cache)",
                 "most at once", "per checkpoint"):
        assert text in done.out
    assert done.err == ""


def test_json_of_a_config_alone_and_a_device_that_is_too_small(place, typed):
    words = ("estimate", "model.path=./outline", "hardware=zero2", "hardware.num_processes=4",
             "hardware.device=cuda", "reward.fn=my_rewards:score", "--json")
    done = typed(*words, "--memory", "80", "--prompt-tokens", "11", code=0)
    facts = json.loads(done.out)
    policy, value, _ = facts["parts"]
    width, inner, vocabulary = 256, 48, 37
    # one head of keys and values of two: 128 wide
    layer = 2 * width**2 + 2 * width * 128 + 3 * width * inner + 2 * width
    assert policy["parameters"] == 2 * vocabulary * width + 3 * layer + width
    state = next(line for line in facts["lines"] if line["name"] == "optimizer state")
    assert state["update"] == 8 * (policy["trained"] + value["trained"]) // 4
    assert (facts["prompt_tokens"], facts["prompt_tokens_from"]) == (11, "as given")
    assert facts["fits"] is True
    small = typed(*words, "--memory", "0.01", code=8)
    assert json.loads(small.out)["fits"] is False
    assert list(place.glob("runs*")) == []


def test_what_is_wrong_is_told(typed):
    assert "ppo.gamma" in typed("estimate", "model.path=./lm", "ppo.gamma=2", code=2).err
    typed("estimate", "model.path=./nowhere", code=3)
    typed("estimate", "model.path=./lm", "--memory", "1", "--available", code=2)


def test_a_run_that_can_not_fit_is_refused_before_weights_are_loaded(place, typed):
    done = typed("train", "model.path=./huge", *RUN, "run_name=big", code=8)
    assert "Not enough memory: this run needs about" in done.err
    assert "model.num_layers_unfrozen" in done.err
    assert "hardware.memory_check=warn" in done.err
    assert not (place / "runs/big").exists()
    assert "Memory is short" in typed("train", "model.path=./huge", *RUN, "run_name=big",
                                      "hardware.memory_check=warn", "--dry-run", code=3).err
