"""What ranks hold under DeepSpeed, tensor by tensor, against what was told of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import save_lm
from ranks import run_job
from sessions import set_keys, small_config

from ppocli.config.schema import TrainConfig
from ppocli.estimate.check import estimate
from ppocli.estimate.parts import models_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("held_bytes.py")
BUCKET = 100_000
"""elements; DeepSpeed's default is far more than this model has"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_hold_what_was_told(tmp_path, stage):
    save_lm(tmp_path / "lm", "gpt2", n_embd=128, n_layer=4, n_head=4)
    small_config(tmp_path)
    zero = {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage, **zero}}))
    keys = {"model.path": str(tmp_path / "lm"), "prompts.path": str(tmp_path / "prompts.jsonl"),
            "ppo.num_steps": 2, "ppo.num_rollouts": 8, "ppo.mini_batch_size": 4,
            "ppo.ppo_epochs": 1, "generation.max_new_tokens": 4, "hardware.device": "cpu",
            "hardware.num_processes": 2, "hardware.num_threads": 1, "hardware.zero_stage": stage,
            "hardware.deepspeed_config": str(tmp_path / "ds.json")}
    found = run_job(tmp_path, f"zero{stage}", keys, world=2, script=SCRIPT, timeout=600)["held"]
    cfg = set_keys(TrainConfig(), keys)
    told = estimate(cfg, models_of(cfg), prompt_tokens=4, cuda=False, ranks=2, ranks_on_host=2)
    sizes = {line.name: line.device for line in told.lines}
    always = sum(sizes.get(name, 0) for name in (
        "weights", "weights DeepSpeed steps on", "reference", "optimizer state"))
    # stage 3 keeps the room for gradients, and the bucket
    after = always + (sizes["gradients"] + 4 * BUCKET if stage == 3 else 0)
    for stepping, afterwards in found.tolist():
        assert afterwards == pytest.approx(after, rel=0.01)
        assert stepping == pytest.approx(
            always + sizes["gradients"] + 4 * BUCKET, rel=0.15), (stage, sizes)
