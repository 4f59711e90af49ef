"""Run folders that an earlier version has left go on as they would have there.

``tests/fixtures/earlier`` holds runs of version 0.1.0 (commit d564fb4), each with its checkpoint of
step 2 and the rows of all its steps: a run with all state there is, a LoRA, a shared trunk, and two
ranks under ZeRO 2. Their last rows are what has to come out.
"""

import shutil
from pathlib import Path

import pytest
from helpers import VOLATILE, jsonl, mostly_slow, stable_rows
from runs import last_checkpoint

EARLIER = Path(__file__).parent.parent / "fixtures/earlier"


@pytest.fixture
def stopped(kind: str, tmp_path: Path) -> Path:
    """The run as it lay there when it was stopped after step 2."""
    world, run_dir = tmp_path / "world", tmp_path / "runs" / kind
    shutil.copytree(EARLIER / "world", world)
    shutil.copytree(EARLIER / kind, run_dir)
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("@WORLD@", str(world))
                      .replace("@RUNS@", str(run_dir.parent)))
    return run_dir


@pytest.mark.parametrize("kind", mostly_slow(
    ["stateful", "lora", "shared", "zero2"], quick=lambda kind: kind == "stateful"))
def test_a_run_of_an_earlier_version_goes_on_to_the_same_end(kind, stopped, app, monkeypatch):
    expected = [{name: value for name, value in row.items() if not name.startswith(VOLATILE)}
                for row in jsonl(EARLIER / kind / "metrics.jsonl")]
    # it carries no signature of whoever started it
    monkeypatch.chdir(stopped.parent)
    app("resume", stopped, "--trust", code=0)
    found = stable_rows(stopped / "metrics.jsonl")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert list(row) == list(wanted)
        # the same to the last digit on the processor that they were made on
        assert row == pytest.approx(wanted, rel=1e-3, abs=1e-5, nan_ok=True)
    names = {path.name for path in last_checkpoint(stopped).iterdir()}
    assert names == {path.name for path in (EARLIER / kind / "checkpoints/step-000002").iterdir()}
