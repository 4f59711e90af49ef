"""DeepSpeed files as people write them, against the settings of a run."""

import json
from pathlib import Path

import pytest

from ppocli.builtin.names import shipped_table
from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.schema import HardwareConfig, PPOConfig, TrainConfig
from ppocli.errors import ConfigError

# https://huggingface.co/docs/accelerate/usage_guides/deepspeed: ZeRO 3 with offloading
ACCELERATE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
             "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto"},
    "gradient_accumulation_steps": 1, "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False}
MADE_BY_IT = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}},
              "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}}


def given(folder: Path, file: object | None, **hardware) -> dict:
    """What two ranks with micro-batches of 8 are given."""
    if file is not None:
        path = folder / "ds.json"
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        hardware["deepspeed_config"] = str(path)
    return deepspeed_config(TrainConfig(
        ppo=PPOConfig(mini_batch_size=32, micro_batch_size=8, max_grad_norm=0.5),
        hardware=HardwareConfig(**{"num_processes": 2, "zero_stage": 2, **hardware})))


def test_settings_alone_make_it_whole(tmp_path):
    assert given(tmp_path, None, precision="bf16", offload_optimizer=True, num_nodes=3) == {
        "train_batch_size": 48, "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                              "reduce_bucket_size": 2**24},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9, "fp16": {"enabled": False}, "bf16": {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16",
                           "lower_precision_safe_modules": []}}


def test_accelerates_example_is_filled_in(tmp_path):
    found = given(tmp_path, ACCELERATE, zero_stage=3, offload_optimizer=True, offload_param=True)
    assert "auto" not in json.dumps(found).replace("autocast", "")
    assert (found["train_batch_size"], found["gradient_clipping"]) == (16, 0.5)
    assert found["fp16"] == {**ACCELERATE["fp16"], "enabled": False}
    assert found["zero_optimization"] == {
        name: value for name, value in ACCELERATE["zero_optimization"].items() if value != "auto"
        } | {"reduce_bucket_size": 2**24}
    theirs = {"zero_optimization": {"reduce_bucket_size": 5e7}}
    assert given(tmp_path, theirs)["zero_optimization"]["reduce_bucket_size"] == 5e7


@pytest.mark.parametrize(("file", "hardware", "texts"), [
    ({"train_batch_size": 64}, {}, ["train_batch_size is 64, the settings make it 16"]),
    ({"gradient_clipping": 1.0}, {}, ["gradient_clipping is 1.0"]),
    ({"fp16": {"enabled": True}}, {}, ["fp16.enabled is true"]),
    ({"torch_autocast": {"enabled": False}}, {"precision": "bf16"}, ["torch_autocast.enabled"]),
    ({"zero_optimization": {"stage": 3}}, {}, ["zero_optimization.stage is 3, the settings make"]),
    ({"zero_optimisation": {"stage": 2}}, {}, ["did you mean zero_optimization?"]),
    ({"zero_optimization": {"overlap_com": True}}, {}, ["did you mean overlap_comm?"]),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {},
     ['offload_optimizer.device is "cpu"']),
    ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, {"offload_optimizer": True},
     ['offload_optimizer.device is "none", the settings make it "cpu"']),
    ({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/d"}}, "aio": {}},
     {"zero_stage": 3, "offload_param": True}, ["host memory only"]),
    (MADE_BY_IT, {}, ["optimizer: ppocli makes its own", "scheduler: ppocli makes its own"]),
    ({"train_batch_size": 1, "gradient_clipping": 9, "stage": 2}, {},
     ["3 problems in", "stage: no key of DeepSpeed", "train_batch_size is 1", "is 9"]),
    ("[1]", {}, ["it holds no JSON object"]), ("{", {}, ["can't be read as JSON"])])
def test_files_that_contradict_the_settings(tmp_path, file, hardware, texts):
    with pytest.raises(ConfigError) as raised:
        given(tmp_path, file, **hardware)
    assert all(text in str(raised.value) for text in texts), raised.value
    assert raised.value.where == "hardware.deepspeed_config"


def test_the_command_shows_what_deepspeed_gets(command, world):
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"overlap_comm": True}}))
    words = ["model.path=./lm", "prompts.path=prompts.jsonl", "reward.fn=length",
             "reward.kwargs.target=3", "ppo.num_steps=1", "hardware=zero2"]
    done = command(*words, "hardware.deepspeed_config=ds.json", "--cfg", "deepspeed", code=0)
    shown = json.loads(done.out)
    assert shown["zero_optimization"] == {"overlap_comm": True, "stage": 2,
                                          "reduce_bucket_size": 2**24}
    assert shown["train_batch_size"] == 64
    done = command("--cfg=deepspeed", *words[:-1], code=2)
    assert "hardware.zero_stage is 0" in done.err


@pytest.mark.slow
def test_the_known_keys_are_deepspeeds():
    """Loading DeepSpeed takes seconds, so that its keys are listed in a file."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    given_up = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory",
                "stage3_gather_fp16_weights_on_model_save"}
    assert theirs - given_up == set(shipped_table("library_keys.yaml")["deepspeed_zero"])
