"""The benchmarks' arithmetic, the section that they write, and one run of the smallest kind."""

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
