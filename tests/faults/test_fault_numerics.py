"""Numbers that go wrong: non-finite updates, odd lengths, clocks that jump, pruning that fails."""

from pathlib import Path

import torch
from helpers import jsonl, read_json
from runs import words
from safetensors.torch import load_file, save_file


def finite_checkpoints(run_dir: Path) -> list[str]:
    """Names of the steps on the disk, each of whose tensors is finite."""
    for path in (run_dir / "checkpoints").rglob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()), name
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def test_many_non_finite_updates_stop_the_run_with_the_last_healthy_step(command, inject, world):
    inject("optimize.minibatch@7+:nan")  # the last two of the second step
    ended = command(*words("run_name=r"), code=4)
    folder = world / "runs/r"
    assert "3 updates in a row had a non-finite loss or gradient (step 3)" in ended.err
    assert f"last healthy: step 2 in {folder}/checkpoints/step-000002" in ended.err
    assert "lower ppo.optimizer.lr" in ended.err
    assert finite_checkpoints(folder) == ["step-000001", "step-000002"]
    assert read_json(folder / "summary.json")["status"] == "failed"
    assert not (folder / "model").exists()
    dump = folder / "nonfinite-dump/step-000003"
    assert str(dump) in ended.err
    assert [row["episode"] for row in jsonl(dump / "samples.jsonl")] == list(range(24, 36))


def test_a_learning_rate_that_blows_up_never_saves_a_broken_policy(command, world):
    ended = command(*words("run_name=r", "ppo.optimizer.lr=1e38", "ppo.max_grad_norm=null",
                           "ppo.ratio_threshold=null", "ppo.optimizer.name=sgd"), code=4)
    assert "non-finite" in ended.err
    finite_checkpoints(world / "runs/r")


def push_eos(lm: Path, logit: float) -> None:
    """Make the model give its EOS this logit and all other tokens 0, whatever it reads."""
    tensors = load_file(lm / "model.safetensors")
    tensors["transformer.ln_f.weight"].zero_()
    tensors["transformer.ln_f.bias"].zero_()
    tensors["transformer.ln_f.bias"][0] = 1.0
    tensors["transformer.wte.weight"][:, 0] = 0.0
    tensors["transformer.wte.weight"][1, 0] = logit
    save_file(tensors, lm / "model.safetensors", metadata={"format": "pt"})


def test_responses_that_never_end_stay_finite_and_are_told(command, world):
    push_eos(world / "lm", -100.0)
    assert "Every response ran to the full 8 tokens for 3 steps" in command(
        *words("run_name=r", "ppo.optimizer.lr=1e-6"), code=0).err
    for row in jsonl(world / "runs/r/metrics.jsonl")[1:]:
        assert row["rollout/response_tokens_mean"] == 8.0
        # of returns without any spread nothing can be explained
        assert {name for name, value in row.items() if value is None} <= {"val/var_explained"}
    assert "NaN" not in (world / "runs/r/samples.jsonl").read_text()
