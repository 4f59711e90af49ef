"""``ppocli reward-model`` as a command: a whole run, what it leaves, and what takes it up."""

from pathlib import Path

import pytest
from helpers import jsonl, read_json, write_prompts
from runs import RM_WORDS, assert_equal_runs, run, write_pairs


@pytest.fixture
def pairs(world: Path) -> Path:
    """The world with pairs in it."""
    return write_pairs(world)


def test_a_run_trains_evaluates_saves_and_is_taken_up_as_a_model(pairs, command, export):
    done = command("task=reward_model", *RM_WORDS, "run_name=rm", code=0)
    assert done.out.splitlines()[-1] == str(pairs / "runs/rm/model")
    rows = jsonl(pairs / "runs/rm/metrics.jsonl")
    assert [row["step"] for row in rows if "loss/total" in row] == [1, 2, 3, 4, 5]
    summary = read_json(pairs / "runs/rm/summary.json")
    config = read_json(pairs / "runs/rm/model/config.json")
    assert summary["eval_after"]["accuracy"] > summary["eval_after"]["accuracy_stderr"]
    assert (config["score_mean"], config["score_std"]) == (
        summary["score_mean"], summary["score_std"])
    assert summary["best"]["name"] == "accuracy"
    export("runs/rm", "-o", "shared", code=0)
    assert "AutoModelForSequenceClassification.from_pretrained" in Path(
        "shared/README.md").read_text()
    write_prompts(pairs / "prompts.jsonl")
    command("model.path=lm", "prompts.path=prompts.jsonl", "reward.fn=reward_model",
            "reward.kwargs.model=runs/rm", "reward.scale=ref", "model.value.kind=model",
            "model.value.path=runs/rm", "ppo.num_steps=1", "ppo.num_rollouts=4",
            "ppo.mini_batch_size=4", "generation.max_new_tokens=4", "hardware.device=cpu",
            "run_name=ppo", code=0)
    kept = (pairs / "runs/ppo/config.yaml").read_text()
    assert kept.count(f"{pairs}/runs/rm") == 2  # from wherever it goes on


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(pairs):
    run("reward-model", *RM_WORDS, "run_name=whole", cwd=pairs, code=0)
    run("reward-model", *RM_WORDS, "run_name=cut", cwd=pairs, code=-9,
        PPOCLI_FAULTS="optimize.minibatch@4:kill9")
    run("resume", "runs/cut", cwd=pairs, code=0)
    assert_equal_runs(pairs / "runs/whole", pairs / "runs/cut")
    assert (pairs / "runs/whole/model/model.safetensors").read_bytes() == (
        pairs / "runs/cut/model/model.safetensors").read_bytes()
