"""Without DeepSpeed one process trains, and ZeRO is refused with the line to type."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_one_process_needs_no_deepspeed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    train = [sys.executable, "-m", "ppocli", "train", "+recipe=quickstart", "ppo.num_steps=1",
             "ppo.num_rollouts=16", "ppo.mini_batch_size=16", "prompts.eval.limit=4"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*train, *more], cwd=tmp_path, text=True, capture_output=True,
                              check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)})

    done = run()
    assert done.returncode == 0, done.stderr
    refused = run("hardware.zero_stage=2")
    assert refused.returncode == 2
    assert "hardware.zero_stage" in refused.stderr
    assert "pip install deepspeed" in refused.stderr
