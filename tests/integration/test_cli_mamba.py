"""A policy that ppocli's own loop can't step, through the commands: trained, gone on with, judged,
asked."""

import json
from pathlib import Path

import torch
from helpers import jsonl, save_lm
from runs import assert_equal_runs, run, words


def test_a_mamba_is_trained_gone_on_with_judged_and_asked(world: Path):
    from transformers import AutoModelForCausalLM

    save_lm(world / "mamba", "mamba")
    given = ("model.path=./mamba", "ppo.num_rollouts=6")
    done = run("train", *words(*given, "run_name=whole"), cwd=world)
    assert done.code == 0, done.err
    assert done.said.count("ppocli's own loop can't step MambaForCausalLM") == 1
    start, first, _ = jsonl(world / "runs/whole/metrics.jsonl")[:3]
    assert abs(start["eval/kl_mean"]) < 1e-4
    assert abs(first["objective/kl"]) < 1e-4
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict()
                     for folder in (world / "mamba", world / "runs/whole/model"))
    assert not torch.equal(before["backbone.layers.0.mixer.x_proj.weight"],
                           after["backbone.layers.0.mixer.x_proj.weight"])

    assert run("train", *words(*given, "run_name=cut", "ppo.num_steps=2"), cwd=world).code == 0
    done = run("resume", "runs/cut", "ppo.num_steps=4", cwd=world)
    assert done.code == 0, done.err
    assert_equal_runs(world / "runs/whole", world / "runs/cut")

    done = run("eval", "runs/whole", cwd=world)
    assert done.code == 0, done.err
    judged = json.loads((world / "runs/whole/eval/step-000004/eval.json").read_text())
    ended = json.loads((world / "runs/whole/summary.json").read_text())["eval_after"]
    for name in ("reward_mean", "kl_mean", "response_tokens_mean"):
        assert abs(judged["figures"][name] - ended[name]) < 1e-4
    done = run("generate", "runs/whole/model", "--prompt", "the film", "--prompt", "i saw it",
               "--max-new-tokens", "5", cwd=world)
    assert done.code == 0, done.err
    assert "own loop can't step" in done.err
