"""``--cfg job``: what keys that are left open come to, and what a training would be refused for."""

import pytest
import yaml
from helpers import checked
from test_cli_compose import RUNNABLE, printed, write

from ppocli.config.print_config import FILLED_IN
from ppocli.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "expected"), [
    (["ppo.advantage=grpo", "ppo.n=8"],
     {"kl_in": "loss", "kl_estimator": "k3", "whiten_advantages": False, "cliprange_high": 0.2,
      "importance.level": "none", "micro_batch_size": 32, "value_optimizer.name": None}),
    (["ppo.kl_in=loss", "ppo.cliprange=0.3", "ppo.optimizer.name=sgd", "ppo.mini_batch_size=8",
      "ppo.optimizer.lr=3e-6"],
     {"kl_estimator": "k3+", "whiten_advantages": True, "cliprange_high": 0.3,
      "micro_batch_size": 8, "optimizer.value_lr": 3e-6, "value_optimizer.name": "sgd",
      "value_optimizer.momentum": 0.0, "value_optimizer.betas": None}),
    (["ppo.advantage=rloo", "ppo.n=2"],
     {"kl_in": "reward", "kl_estimator": "k1", "whiten_advantages": False}),
    (["rollout.engine=vllm", "rollout.urls=[http://h:1]", "ppo.value_optimizer.name=adam"],
     {"kl_in": "reward", "importance.level": "token", "value_optimizer.name": "adam",
      "value_optimizer.betas": [0.9, 0.999]})])
def test_what_is_left_open_is_printed_as_what_it_comes_to(words, expected, capsys):
    printed(*RUNNABLE, *words, "generation.temperature=0.7", "--cfg", "job")
    out, err = capsys.readouterr()
    assert err == ""
    printed_config = yaml.safe_load(out)
    for key, value in expected.items():
        node = printed_config["ppo"]
        for part in key.split("."):
            node = node[part]
        assert node == value, key
        line = f"{key.rpartition('.')[2]}:"
        if value is not None and not any(word.startswith(f"ppo.{key}=") for word in words):
            assert any(row.strip().startswith(line) and row.endswith(FILLED_IN)
                       for row in out.splitlines()), key
    assert printed_config["generation"]["eval"]["temperature"] == 0.7
    assert printed_config["model"]["dtype"] == "fp32"
    # and it is a configuration that trains alike
    write("again/train.yaml", out)
    config = checked("-cp", "again").config
    assert config.ppo.advantage == printed_config["ppo"]["advantage"]


@pytest.mark.parametrize(("words", "said"), [
    (["ppo.advantage=grpo"], "ppo.advantage, ppo.n: grpo compares samples"),
    (["model.quantization=4bit", "model.peft.type=lora", "hardware=zero3"], "hardware.zero_stage"),
    (["ppo.mini_batch_size=0"], "ppo.mini_batch_size"), (["ppo.num_steps=null"], "ppo.num_steps"),
    (["reward.fn=null"], "reward.fn")])
def test_what_would_be_refused_is_printed_with_the_refusal(words, said, capsys):
    printed(*RUNNABLE, *words, "--cfg", "job")
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["model"]["path"] == "lm"
    assert err.startswith("ppocli train refuses this: ")
    assert said in err
    with pytest.raises(ConfigError, match=said.split(",")[0]):
        checked(*RUNNABLE, *words)
