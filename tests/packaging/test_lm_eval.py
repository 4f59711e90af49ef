"""An exported model is judged by lm-evaluation-harness as docs/eval.md says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment, ppocli, write_jsonl

EVAL = Path(__file__).parents[2] / "docs" / "eval.md"
ROWS = [{"prompt": "The film was", "choices": [" qxz qxz", " great."], "label": 1},
        {"prompt": "I loved", "choices": [" this film.", " xx zz qq"], "label": 0},
        {"prompt": "I would never", "choices": [" zq zq zq", " watch it again."], "label": 1}]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_local_task_on_an_exported_model(tmp_path):
    pytest.importorskip("lm_eval")
    ppocli("export", "builtin:reviews", "-o", "tamed", cwd=tmp_path, code=0)
    (tmp_path / "tasks").mkdir()
    [task] = re.findall(r"```yaml\n(task: .*?)```", EVAL.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "tasks" / "ending.yaml").write_text(task)
    write_jsonl(tmp_path / "endings.jsonl", ROWS)
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
               "pretrained=./tamed", "--tasks", "ending", "--device", "cpu", "--include_path",
               "tasks", "--output_path", "results"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    [results] = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["ending"]["acc,none"] == 1.0
