"""The benchmarks' arithmetic, the section that they write, and one run of the smallest kind."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, no package

from compare import Outcome, Spread, ratio  # noqa: E402
from systems import Places, Process, measure  # noqa: E402
from workloads import WORKLOADS  # noqa: E402


def process(*wall: float) -> Process:
    return Process(list(wall), [1.0] * len(wall), [100.0], 32.0, 500.0, None, 9.0, {})


def test_ratios_are_taken_round_by_round_from_median_iterations():
    slow = Outcome([process(4.0, 4.0, 100.0), process(9.0, 9.0, 9.0), process(5.0, 5.0, 5.0)])
    fast = Outcome([process(2.0, 2.0, 2.0), process(3.0, 3.0, 50.0), process(1.0, 1.0, 1.0)])
    assert ratio(slow, fast, "wall") == Spread(3.0, 2.0, 5.0)
    assert str(Spread(2.345, 2.0, 123.4)) == "2.35 (2 to 123)"
    assert str(Spread.of([1.5])) == "1.5"


@pytest.mark.slow
def test_ours_is_measured_as_a_whole_run(tmp_path):
    work = replace(WORKLOADS["tiny"], batch=4, mini_batch=2, new_tokens=4, epochs=1, warmup=0,
                   iterations=2)
    took = measure("ours", work, Places(tmp_path, tmp_path, {}), threads=1, seed=0)
    assert len(took.wall) == len(took.processor) == 2
    assert took.tokens == 4
    assert 0 < sum(took.wall) < took.seconds
    assert took.peak_mib >= max(took.resident) - 1 > 50
    # the optimize phases of the first two steps lie between the three rewards
    for kind, whole in (("time", took.wall), ("cpu", took.processor)):
        inside = took.phases[f"{kind}/optimize"]
        assert len(inside) == 3
        assert 0 < sum(inside[:2]) < sum(whole)
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.slow
def test_the_frontier_is_drawn_from_kept_runs_without_making_them_again(tmp_path):
    kept = tmp_path / "kept/randomwalks"
    for number, (coef, seed) in enumerate((coef, seed) for coef in (0.2, 0.1) for seed in (1, 2)):
        run = kept / f"seed-{seed}/runs/at-{coef}"
        run.mkdir(parents=True)
        after = {"reward_mean": 0.9 + number / 100, "kl_mean": 1.0 + number,
                 "response_tokens_mean": 6}
        (run / "summary.json").write_text(json.dumps({
            "eval_before": {"response_tokens_mean": 8}, "eval_after": after}))
    for seed, reward in ((1, 0.75), (2, 0.85)):  # each seed has a reward model of its own
        told = kept / f"seed-{seed}/best-of-n/eval.json"
        told.parent.mkdir()
        told.write_text(json.dumps({"frontier": {"points": [
            {"n": 1, "kl": 0.0, "reward": 0.25}, {"n": 4, "kl": 0.636, "reward": reward}]}}))
    page, picture = tmp_path / "page.md", tmp_path / "frontier.svg"
    page.write_text("before\n<!-- frontier: begin -->\n<!-- frontier: end -->\nafter\n")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/frontier.py", "randomwalks", "--keep", "kept",
         "--coefs", "0.2", "0.1", "--seeds", "1", "2", "--out", page, "--svg", picture],
        cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| training, coefficient 0.2 | 1.50 (1.00 to 2.00) | 0.905 (0.900 to 0.910) | "
        "0.75 (0.75 to 0.75) |",
        "| training, coefficient 0.1 | 3.50 (3.00 to 4.00) | 0.925 (0.920 to 0.930) | "
        "0.75 (0.75 to 0.75) |",
        "| best of 4 | 0.64 | 0.800 |  |"]
    assert page.read_text().endswith("after\n")
    assert "randomwalks: reward over KL" in picture.read_text()
