"""``ppocli sft`` from the command line: the run, what it keeps, resumption, what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers import WORDS, jsonl, save_lm, stable_rows
from runs import assert_equal_runs, copied, resumed, rewrite, run, whole_copy

KEYS = ("model.path=lm", "data.path=data.jsonl", "data.val=val.jsonl", "sft.mini_batch_size=4",
        "sft.epochs=2", "sft.optimizer.lr=1e-2", "sft.scheduler.name=cosine",
        "sft.scheduler.warmup_updates=1", "sft.neftune=5", "sft.eval_samples=2",
        "eval.every_steps=1", "checkpoint.every_steps=1", "checkpoint.keep_last=100",
        "generation.max_new_tokens=6", "hardware.device=cpu", "hardware.num_threads=1",
        "hardware.gemm=default")


def rows(count: int, start: int = 0) -> str:
    """Rows of prompt and completion of unlike lengths."""
    return "".join(json.dumps({
        "prompt": " ".join(WORDS[i % 7:i % 7 + 2 + i % 3]),
        "completion": " " + " ".join(WORDS[i % 5 + 3:i % 5 + 6 + i % 8])}) + "\n"
        for i in range(start, start + count))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of five steps: ten rows, twice, four at a time."""
    folder = tmp_path_factory.mktemp("sft")
    save_lm(folder / "lm")
    (folder / "data.jsonl").write_text(rows(10))
    (folder / "val.jsonl").write_text(rows(3, 50))
    run("sft", *KEYS, "run_name=straight", cwd=folder, code=0)
    return folder / "runs/straight"


@pytest.fixture
def world(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with model and data."""
    shutil.copytree(trained.parents[1], tmp_path / "here",
                    ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_a_run_has_the_files_of_any_run(trained):
    found = stable_rows(trained / "metrics.jsonl")
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4, 5]
    assert [row.get("lr") for row in found[1:3]] == [pytest.approx(0.005), pytest.approx(0.01)]
    assert found[-1]["data/epoch"] == 2.0
    assert {"loss/total", "policy/grad_norm", "data/tokens", "eval/loss", "eval/perplexity",
            "eval/tokens", "eval/finished_share"} <= found[-1].keys()
    shown = jsonl(trained / "samples.jsonl")
    assert [(row["step"], row["kind"]) for row in shown[:3]] == [(0, "eval"), (0, "eval"),
                                                                 (1, "eval")]
    losses = {row["step"]: row["eval/loss"] for row in found if row["step"]}
    best = (trained / "checkpoints/best").resolve().name
    assert best == f"step-{min(losses, key=losses.__getitem__):06d}"
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(trained / "model").config.n_layer == 2
    text = (trained / "config.yaml").read_text()
    assert "\nsft:" in text
    assert "\nppo:" not in text
    assert "\nreward" not in text


def test_resuming_at_a_step_equals_the_straight_run(trained, tmp_path):
    stopped = copied(trained, tmp_path / "run", 3)
    resumed(stopped)
    assert_equal_runs(trained, stopped)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [
    "optimize.minibatch@3:kill9", "evaluation.forward@4:term"])
def test_an_end_by_a_signal_then_auto_resume(fault, trained, world, app):
    ended = run("sft", *KEYS, "run_name=r", cwd=world, PPOCLI_FAULTS=fault)
    assert ended.code == (-9 if fault.endswith("kill9") else 143), ended.err
    app("sft", *KEYS, "run_name=r", "resume=auto", code=0)
    assert_equal_runs(trained, world / "runs/r")


@pytest.mark.slow
def test_more_epochs_go_on_and_other_data_are_refused(trained, world, app):
    rewrite(whole_copy(trained, world / "runs/straight"), {str(trained.parents[1]): str(world)})
    app("resume", "runs/straight", "sft.epochs=3", code=0)
    found = stable_rows(world / "runs/straight/metrics.jsonl")
    assert [row["step"] for row in found] == list(range(9))
    assert found[-1]["data/epoch"] == 3.0
    assert found[:5] == stable_rows(trained / "metrics.jsonl")[:5]
    for name, said in (("data", "started with: data."), ("val", "started with: validation data.")):
        old = (world / f"{name}.jsonl").read_text()
        (world / f"{name}.jsonl").write_text(rows(3, 90))
        assert said in app("resume", "runs/straight", "sft.epochs=4", code=5).err
        (world / f"{name}.jsonl").write_text(old)


@pytest.mark.slow
def test_an_evaluation_out_of_memory_halves_its_rows(trained, world, inject, command):
    inject("evaluation.forward>1:oom")
    ended = command("task=sft", *KEYS, "run_name=r", "sft.num_updates=1", "sft.epochs=null", code=0)
    assert "evaluation of 3 rows at once: out of memory; going on with 1" in ended.err
    assert "sft.micro_batch_size=1 starts so" in ended.err
    first, whole = (stable_rows(one / "metrics.jsonl")[0] for one in (world / "runs/r", trained))
    assert first == pytest.approx(whole, rel=1e-5)


def test_validate_shows_the_data_and_the_plan(world, validate):
    done = validate("task=sft", *KEYS, "data.max_length=8", code=0)
    first, *lines = done.out.splitlines()
    assert first.startswith("valid: lm, sft, 10 examples, 5 steps of 4 examples (20 in all), "
                            "device cpu fp32, into runs/")
    assert lines[:2] == ["line 1 of data.jsonl:", "  the a[plot actor was <eos>]"]
    assert any("longer than 8 tokens: cut at the end" in line for line in lines)
    assert any(line.startswith("data.val: 3 examples, ") for line in lines)
    found = json.loads(validate("task=sft", *KEYS, "--json", code=0).out)
    assert found["run"]["rows"] == 10
    assert found["data"][0] == "line 1 of data.jsonl:"
    (world / "bad.jsonl").write_text(rows(2) + '{"prompt": "the film"}\n')
    wrong = validate("task=sft", *KEYS, "data.path=bad.jsonl", code=3)
    assert "Line 3 of bad.jsonl has no column 'completion'" in wrong.err


def test_a_dry_run_finds_the_first_gradient(trained, world, app):
    out = app("sft", "--dry-run", *KEYS, code=0).out
    row = stable_rows(trained / "metrics.jsonl")[1]
    assert re.search(r"^gradient of the first 4 \(\d+ tokens\): .*"
                     rf"total loss {row['loss/total']:.4f}, .*norm {row['policy/grad_norm']:.4f}$",
                     out, re.MULTILINE)
    assert not (world / "runs").exists()


def test_the_estimate_has_no_reference_and_no_value(world, app):
    found = json.loads(app("estimate", "task=sft", *KEYS, "--prompt-tokens", "16", "--json",
                           code=0).out)
    assert [part["name"] for part in found["parts"]] == ["policy"]
    assert found["prompt_tokens"] + found["new_tokens"] - 1 <= 16
    assert found["rows"]["update"] == 4
    assert "sft.micro_batch_size=1" in app("estimate", "task=sft", *KEYS, "sft.mini_batch_size=512",
                                           "--memory", "0.001", code=8).err
