"""A disk that is full, and memory that runs out in one process: what is said, that nothing older is
lost, and that numbers stay."""

import re
from pathlib import Path

import pytest
import torch
from helpers import jsonl, read_json, stable_rows
from runs import Command, assert_equal_runs, last_checkpoint, make_world, resumed, run, words
from safetensors.torch import load_file


def test_a_disk_that_refuses_a_save_keeps_the_older_and_goes_on_later(
        command, inject, reference, world):
    inject("save.open@22+:enospc")
    ended = command(*words("run_name=r", stateful=True), code=6)
    folder = world / "runs/r"
    assert "Disk full writing step 2 (needs " in ended.err
    assert "Kept step 1." in ended.err
    assert f"ppocli resume {folder}" in ended.err
    assert [path.name for path in sorted((folder / "checkpoints").glob("[!.l.b]*"))] == [
        "step-000001"]
    assert len(jsonl(folder / "metrics.jsonl")) == 3
    assert read_json(folder / "summary.json")["status"] == "failed"
    inject("")
    resumed(folder)
    assert_equal_runs(reference, folder)


@pytest.mark.parametrize(("free", "code", "said"), [
    (50_000, 6, "Error: Not enough disk space: this run needs "),
    (1_000_000, 0, "warning: Disk space is short: this run needs ")])
def test_the_disk_is_looked_at_before_weights_are_loaded(
        free, code, said, command, monkeypatch, world):
    monkeypatch.setattr("ppocli.models.memory_check.free_bytes", lambda folder: free)
    ended = command(*words("run_name=r", "ppo.num_steps=1"), code=code)
    assert said in ended.err
    assert (world / "runs/r").exists() == (code == 0)
    if code:
        assert "hardware.memory_check=warn" in ended.err
        return
    # what was foretold is what is there
    [sizes] = re.findall(r"needs (\d+) kB for each checkpoint and (\d+) kB", ended.err)
    for foretold, name in zip(sizes, ("checkpoints/step-000001", "model"), strict=True):
        there = sum(part.stat().st_size for part in (world / "runs/r" / name).rglob("*")
                    if part.is_file())
        assert float(foretold) * 1000 == pytest.approx(there, rel=0.2)


# logprobs and values are measured by passes of their own
# roots of tiny squares, which Adam divides by, would make much of rounding
WORDS = ("ppo.num_steps=2", "ppo.logprobs_from=forward", "ppo.optimizer.eps=1e-6")


@pytest.fixture(scope="module")
def plenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with memory for all that it asks for."""
    folder = make_world(tmp_path_factory.mktemp("plenty"))
    run("train", *words("run_name=r", *WORDS), cwd=folder, code=0)
    return folder / "runs/r"


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model/model.safetensors")


def assert_same_up_to_rounding(run_dir: Path, other: Path) -> None:
    rows, others = (stable_rows(one / "metrics.jsonl") for one in (run_dir, other))
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row, expected in zip(rows, others, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
    mine, theirs = weights(run_dir), weights(other)
    assert max(float((mine[k] - theirs[k]).abs().max()) for k in theirs) < 1e-4


def test_what_does_not_fit_is_made_anew_with_half_the_rows(command: Command, inject, world, plenty):
    """Chunks of 5, 5 and 2 samples, from the second one on no more than two at once; scoring and
    updates of 4."""
    inject("rollout.token>2@30+:oom,scoring.forward>2@3+:oom,optimize.backward>1:oom")
    ended = command(*words("run_name=r", *WORDS), code=0)
    # an evaluation's passes are phases of their own
    found = [line.removeprefix("warning: ") for line in ended.err.splitlines()
             if "out of memory" in line and "evaluation" not in line]
    expected = ("rollout of 5 rows at once: out of memory; going on with 2 (ppo.chunk_size=2 "
                "starts so)",
                "scoring of 4 rows at once: out of memory; going on with 2",
                "optimize of 4 rows at once: out of memory; going on with 2",
                "optimize of 2 rows at once: out of memory; going on with 1")
    assert len(found) == len(expected), found
    for line, text in zip(found, expected, strict=True):
        assert line.startswith(text)
    assert_same_up_to_rounding(world / "runs/r", plenty)
    last = jsonl(world / "runs/r/metrics.jsonl")[-1]
    for phase, rows in (("rollout", 2.0), ("scoring", 2.0), ("optimize", 1.0)):
        assert last[f"memory/rows/{phase}"] == rows
    assert "out of memory" in (world / "runs/r/ppocli.log").read_text()


def test_where_one_row_is_too_much_the_run_stops_with_numbers(command, inject, world):
    inject("optimize.forward>0@9+:oom")
    ended = command(*words("run_name=r", *WORDS), code=8)
    assert ("optimize of 1 row at once: out of memory, and a pass can't be smaller: its longest "
            "sample has ") in ended.err
    assert "MiB, and " in ended.err
    assert read_json(world / "runs/r/summary.json")["status"] == "failed"
    # between two steps: what was saved before stands
    assert last_checkpoint(world / "runs/r").name == "step-000001"
