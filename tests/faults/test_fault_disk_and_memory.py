"""A disk that is full, and memory that runs out in one process: what is said, that nothing older is
lost, and that numbers stay."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import environment, jsonl, read_json, stable_rows
from runs import Command, assert_equal_runs, last_checkpoint, make_world, resumed, run, words
from safetensors.torch import load_file


@pytest.mark.parametrize("fault", [
    "save.open@22+:enospc", *(pytest.param(fault, marks=pytest.mark.slow) for fault in (
        "save.before_manifest@2+:enospc", "save.before_rename@2+:enospc"))])
def test_a_disk_that_refuses_a_save_keeps_the_older_and_goes_on_later(
        fault, command, inject, reference, world):
    inject(fault)
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
    (1_000_000, 0, "warning: Disk space is short: this run needs "), (10**9, 0, "")])
def test_the_disk_is_looked_at_before_weights_are_loaded(
        free, code, said, command, monkeypatch, world):
    monkeypatch.setattr("ppocli.models.memory_check.free_bytes", lambda folder: free)
    ended = command(*words("run_name=r", "ppo.num_steps=1"), code=code)
    assert said in ended.err
    assert ("Disk space" in ended.err) == (free == 1_000_000)
    assert (world / "runs/r").exists() == (code == 0)
    if code:
        assert "hardware.memory_check=warn" in ended.err
        command(*words("run_name=r", "ppo.num_steps=1", "hardware.memory_check=warn"), code=0)
        return
    sizes = re.findall(r"needs (\d+) kB for each checkpoint and (\d+) kB", ended.err)
    if sizes:  # what was foretold is what is there
        for told, name in zip(sizes[0], ("checkpoints/step-000001", "model"), strict=True):
            there = sum(part.stat().st_size for part in (world / "runs/r" / name).rglob("*")
                        if part.is_file())
            assert float(told) * 1000 == pytest.approx(there, rel=0.2)


TMPFS = """\
mount -t tmpfs -o size={size}k tmpfs runs || exit 77
{python} -m ppocli train {words}
code=$?
cp -a runs kept
exit $code
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [60, 300, 700, 1200, 1600])
def test_a_disk_that_really_is_full(size, command, reference, world):
    (world / "runs").mkdir()
    # which foresees it, and goes on all the same
    script = TMPFS.format(size=size, python=sys.executable, words=" ".join(
        words("run_name=r", "hardware.memory_check=warn", stateful=True)))
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], cwd=world, text=True,
                          env=environment(), capture_output=True, timeout=200, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no private mounts for ordinary users here")
    assert done.returncode == 6, (done.returncode, done.stderr)
    assert "Disk full writing" in done.stderr
    assert "Traceback" not in done.stderr
    kept = world / "kept/r"
    if not kept.exists():  # not even the start fitted
        assert list((world / "kept").iterdir()) == []
        return
    assert not list(kept.rglob(".staging*"))
    (world / "runs").rmdir()
    (world / "kept").rename(world / "runs")
    command(*words("run_name=r", "hardware.memory_check=warn", "resume=auto", stateful=True),
            code=0)
    assert_equal_runs(reference, world / "runs/r")


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


@pytest.mark.parametrize(("fault", "said", "figure"), [
    # chunks of 5, 5 and 2 samples, from the second one on no more than two at once
    ("rollout.token>2@30+:oom", ["rollout of 5 rows at once: out of memory; going on with 2 "
                                 "(ppo.chunk_size=2 starts so)"], {"rollout": 2.0}),
    # evaluation, 4 prompts, comes first
    pytest.param("rollout.token>1:oom", [
        "evaluation of 4 rows at once: out of memory; going on with 2",
        "evaluation of 2 rows at once: out of memory; going on with 1",
        "rollout of 5 rows at once: out of memory; going on with 2",
        "rollout of 2 rows at once: out of memory; going on with 1"],
     {"rollout": 1.0, "evaluation": 1.0}, marks=pytest.mark.slow),
    pytest.param("scoring.forward>2@3+:oom", [
        "scoring of 4 rows at once: out of memory; going on with 2 "
        "(ppo.micro_batch_size=2 starts so)"], {"scoring": 2.0}, marks=pytest.mark.slow),
    ("optimize.backward>1:oom", ["optimize of 4 rows at once: out of memory; going on with 2",
                                 "optimize of 2 rows at once: out of memory; going on with 1"],
     {"optimize": 1.0})])
def test_what_does_not_fit_is_made_anew_with_half_the_rows(fault, said, figure, command: Command,
                                                           inject, world, plenty):
    inject(fault)
    ended = command(*words("run_name=r", *WORDS), code=0)
    # an evaluation's passes are phases of their own
    found = [line for line in ended.err.splitlines()
             if line.removeprefix("warning: ").partition(" of ")[0] in figure
             and "scoring of the evaluation" not in line]
    assert len(found) == len(said), found
    for line, text in zip(found, said, strict=True):
        assert text in line
    assert_same_up_to_rounding(world / "runs/r", plenty)
    if "optimize" not in fault:
        assert weights(world / "runs/r").keys() == weights(plenty).keys()
        assert all(torch.equal(tensor, weights(plenty)[name])
                   for name, tensor in weights(world / "runs/r").items())
    last = jsonl(world / "runs/r/metrics.jsonl")[-1]
    for phase, rows in figure.items():
        assert last[f"memory/rows/{phase}"] == rows
    assert "out of memory" in (world / "runs/r/ppocli.log").read_text()


@pytest.mark.parametrize("fault", [
    pytest.param("rollout.token>0@40+:oom", marks=pytest.mark.slow), "optimize.forward>0@9+:oom"])
def test_where_one_row_is_too_much_the_run_stops_with_numbers(fault, command, inject, world):
    inject(fault)
    ended = command(*words("run_name=r", *WORDS), code=8)
    assert (f"{fault.partition('.')[0]} of 1 row at once: out of memory, and a pass can't be "
            "smaller: its longest sample has ") in ended.err
    assert "MiB, and " in ended.err
    assert read_json(world / "runs/r/summary.json")["status"] == "failed"
    if "optimize" in fault:  # between two steps: what was saved before stands
        assert last_checkpoint(world / "runs/r").name == "step-000001"
    inject("")
    assert command(f"resume={world / 'runs/r'}").code == 0
