"""A user's own model, prompts and reward, from a folder of their own, through the command."""


import pytest
from helpers import jsonl, read_json
from runs import STEPS, last_checkpoint, scalars


def test_the_last_line_is_the_model_and_everything_is_there(reference, shared_world):
    out = (shared_world / "stdout").read_text()
    assert out.splitlines()[-1] == str(reference / "model")
    assert f"step {STEPS}/{STEPS}" in out
    assert "before and after" in out
    assert "ppocli resume" in out
    names = {path.name for path in reference.iterdir()}
    assert names - {".lock"} == {"config.yaml", "run.json", "metrics.jsonl", "samples.jsonl",
                                 "summary.json", "events", "ppocli.log", "checkpoints", "model",
                                 "env.json"}
    assert [row["step"] for row in jsonl(reference / "metrics.jsonl")] == list(range(STEPS + 1))
    assert "\x1b" not in out


def test_the_model_is_the_trained_policy_and_loads_without_ppocli(reference, shared_world):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    batch = AutoTokenizer.from_pretrained(reference / "model")("the film was", return_tensors="pt")
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(**batch).logits for folder in
                  (reference / "model", last_checkpoint(reference) / "policy", shared_world / "lm")]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])


def test_metrics_samples_and_events_agree(reference):
    rows = {row["step"]: row for row in jsonl(reference / "metrics.jsonl")}
    shown = {(tag, step): value for tag, step, value in scalars(reference)}
    assert shown[("reward/mean", 2)] == pytest.approx(rows[2]["reward/mean"])
    samples = jsonl(reference / "samples.jsonl")
    rollouts = [row for row in samples if row["kind"] == "rollout"]
    assert [row["episode"] for row in rollouts] == list(range(12 * STEPS))
    for step in range(1, STEPS + 1):
        scores = [row["score"] for row in rollouts if row["step"] == step]
        assert rows[step]["reward/mean"] == pytest.approx(sum(scores) / 12)
    evaluated = sorted({row["step"] for row in samples if row["kind"] == "eval"})
    assert evaluated == [0, 2, 4]
    counts = [len(row["response"].split()) for row in samples if row["kind"] == "eval"
             and row["step"] == 4]
    assert rows[4]["eval/metrics/words"] == pytest.approx(sum(counts) / len(counts))
    summary = read_json(reference / "summary.json")
    assert summary["status"] == "finished"
    assert summary["eval_before"]["reward_mean"] == pytest.approx(rows[0]["eval/reward_mean"])
    assert summary["eval_after"]["reward_mean"] == pytest.approx(rows[4]["eval/reward_mean"])


@pytest.mark.long
def test_epochs_are_passes_over_the_prompts_and_a_resume_may_add_some(world, command, app):
    (world / "prompts.txt").write_text("the film\ni saw\nit was\n")
    (world / "own.py").write_text("def score(outputs, **_):\n    return [0.0] * len(outputs)\n")
    words = ("model.path=lm", "prompts.path=prompts.txt", "reward.fn=own.py:score", "ppo.epochs=2",
             "ppo.n=2", "ppo.num_rollouts=8", "ppo.mini_batch_size=8", "hardware.device=cpu",
             "generation.max_new_tokens=4", "eval.every_steps=null", "run_name=r")
    command(*words, code=0)
    command(*words[:3], "ppo.epochs=3", *words[4:], "resume=auto", code=0)
    rows = [row for row in jsonl(world / "runs/r/metrics.jsonl") if row["step"]]
    assert [row["episode"] for row in rows] == [8, 12, 18]  # 3 prompts, 2 samples of each
    assert app("runs", "list", code=0).out.split("\n")[1].split()[2] == "3/3"
