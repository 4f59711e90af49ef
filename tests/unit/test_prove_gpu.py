"""``make prove-gpu``, rehearsed on the simulated accelerator: all parts, each reported, and what is
finished isn't run again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import environment
from warm import begin, served_by

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("ppo.total_episodes=12", "ppo.num_rollouts=4", "ppo.mini_batch_size=4", "ppo.ppo_epochs=1",
         "prompts.eval.limit=2", "prompts.eval.repeat=1", "eval.every_steps=null",
         "generation.max_new_tokens=4", "reward.kwargs.device=cpu")


def prove(build: Path, *words: str) -> tuple[dict[str, Any], str, str]:
    """The figures, the table and the lines of progress of a call."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/prove_gpu.py"), f"--build={build}",
         "--rehearse=cuda", "--workload=gsm8k-rehearsal", "--threads=1", "--peak-tflops=1",
         f"--ppocli={sys.executable} {ROOT / 'tests/accelerator/command.py'}",
         "--quickstart", *SMALL, *words], capture_output=True, text=True, check=False,
        env=environment(**served_by()))
    found = json.loads((build / "prove.json").read_text())
    assert done.returncode == any(part["status"] not in ("done", "not here")
                                  for part in found["parts"].values()), done.stderr
    return found["parts"], done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_all_parts_run_are_reported_and_not_repeated(tmp_path: Path):
    begin([str(ROOT / "benchmarks/fixtures.py"), "qwen-tiny", str(tmp_path / "fixtures")],
          cwd=tmp_path, env=environment()).communicate()
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n")
    parts, table, said = prove(tmp_path, f"--out={results}")
    assert {name: part["status"] for name, part in parts.items()} == {
        "tests": "not here", "quickstart-fp32": "done", "quickstart-bf16": "not here",
        "gsm8k": "done", "resume": "done", "trl": "not here"}, said
    trained, shaped, resumed = (parts[name]["figures"] for name in (
        "quickstart-fp32", "gsm8k", "resume"))
    assert trained["steps"] == 3
    assert 4 <= shaped["response tokens"] <= 12
    assert shaped["tokens/s"] == pytest.approx(
        8 * (shaped["prompt tokens"] + shaped["response tokens"]) / shaped["seconds a step"])
    assert shaped["MFU"] == shaped["TFLOP/s"]  # of a peak of 1 TFLOP/s
    assert shaped["MFU"]["optimize"] > 0
    assert resumed["equal"]
    assert resumed["rows"] == 4
    assert 1 <= resumed["killed after step"] < 3
    assert "1476 tokens/s, 66.3 s a step: another machine" in table
    assert table.strip() in results.read_text()
    again, _, said = prove(tmp_path)
    assert again == parts
    assert "0 parts" in said
