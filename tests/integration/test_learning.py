"""That it learns: a short run in the quick suite, the whole promise of one seed in the slow one."""

import json
from pathlib import Path

import pytest
from helpers import jsonl, ppocli


def train(folder: Path, *words: str) -> Path:
    ppocli("train", *words, "run_name=r", cwd=folder, timeout=280, code=0)
    return folder / "runs/r"


def test_a_part_of_the_quickstart_raises_the_reward(tmp_path):
    run = train(tmp_path, "+recipe=quickstart", "ppo.total_episodes=896", "prompts.eval.repeat=2")
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["eval_before"], summary["eval_after"]
    assert before["reward_mean"] <= 0.6
    assert after["reward_mean"] >= before["reward_mean"] + 0.2
    assert before["kl_mean"] == pytest.approx(0.0, abs=1e-4)
    assert 0.1 < after["kl_mean"] < 6.0
    kl = [row["objective/kl"] for row in jsonl(run / "metrics.jsonl") if "objective/kl" in row]
    assert kl[0] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_keeps_its_promise(tmp_path):
    run = train(tmp_path, "+recipe=quickstart", "seed=7")
    after = json.loads((run / "summary.json").read_text())["eval_after"]
    assert after["reward_mean"] >= 0.92
    assert after["kl_mean"] <= 6.0
