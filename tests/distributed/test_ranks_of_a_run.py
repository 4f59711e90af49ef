"""Whole runs of several processes through the command: results, stops, deaths, and what is left."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ppocli, stable_rows
from ranks import (
    REWARD,
    close_to,
    rows_of,
    wait_for_no_ranks,
)
from runs import assert_tidy, run, spawn, wait_for, words

pytestmark = pytest.mark.timeout(400)


def assert_plain(exported: Path, model: Path) -> None:
    """Two folders hold whole models for transformers alone that say the same within rounding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(exported)("the film was", return_tensors="pt").input_ids
    one, other = (AutoModelForCausalLM.from_pretrained(folder).eval()
                  for folder in (exported, model))
    with torch.no_grad():
        assert torch.allclose(one(ids).logits, other(ids).logits, atol=1e-4)
    shapes = {name: value.shape for name, value in other.state_dict().items()}
    assert {name: value.shape for name, value in one.state_dict().items()} == shapes


def assert_two_come_to_what_one_comes_to(world: Path, hardware: str) -> None:
    """The runs ``one`` and ``two``, left below ``world``."""
    one = run("train", *words("run_name=one"), cwd=world)
    two = run("train", *words("run_name=two", f"hardware={hardware}"), cwd=world)
    assert (one.code, two.code) == (0, 0), two.err
    assert two.out == f"{world / 'runs/two/model'}\n"
    assert close_to(stable_rows(world / "runs/one/metrics.jsonl"),
                    stable_rows(world / "runs/two/metrics.jsonl"))
    assert_tidy(world / "runs/two")
    checkpoint = world / "runs/two/checkpoints/step-000004"
    assert len(list(checkpoint.glob("optimizer-*-of-00002.safetensors"))) == 2


def test_a_run_on_two_processes_comes_to_what_one_comes_to(world):
    assert_two_come_to_what_one_comes_to(world, "zero2")


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero1", "zero2", "zero3", "zero3_offload"])
def test_what_follows_a_training_needs_one_process_whatever_that_had(world, hardware):
    assert_two_come_to_what_one_comes_to(world, hardware)
    judged = ppocli("eval", "runs/two", "--json", cwd=world, code=0)
    summary = json.loads((world / "runs/two/summary.json").read_text())
    found = json.loads(judged.stdout)["figures"]["reward_mean"]
    assert found == pytest.approx(summary["eval_after"]["reward_mean"], abs=1e-4)
    ppocli("export", "runs/two", "--step", "4", "-o", "plain", cwd=world, code=0)
    assert_plain(world / "plain", world / "runs/one/model")
    assert_plain(world / "runs/two/model", world / "runs/one/model")


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero1", "zero2", "zero3"])
def test_sigterm_saves_once_and_the_resume_is_exact(world, hardware):
    (world / "odd.py").write_text(REWARD)
    given = ["reward.fn=odd.py:unlike", f"hardware={hardware}", "ppo.num_steps=6",
             "checkpoint.every_steps=100", "eval.every_steps=2"]
    run("train", *words("run_name=whole", *given), cwd=world, code=0)
    process = spawn("train", *words("run_name=cut", *given), cwd=world,
                    PPOCLI_FAULTS="optimize.minibatch@7:sleep")
    wait_for(lambda: rows_of(world / "runs/cut") >= 3, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "Stopped: stopped by SIGTERM at step" in err
    assert err.count("Stopped:") == 1
    wait_for_no_ranks("cut")
    [checkpoint] = (world / "runs/cut/checkpoints").glob("step-*")
    run("resume", "runs/cut", cwd=world, code=0)
    assert stable_rows(world / "runs/cut/metrics.jsonl") == stable_rows(
        world / "runs/whole/metrics.jsonl")
    one, other = (world / f"runs/{name}/model/model.safetensors" for name in ("whole", "cut"))
    assert one.read_bytes() == other.read_bytes()
    assert checkpoint.name.startswith("step-")


@pytest.mark.slow
def test_scoring_beside_generation_keeps_ranks_in_step(world):
    """With drawn lengths, a sweep at evaluation and the reference's responses: all that ranks
    share out among them."""
    (world / "odd.py").write_text(REWARD)
    more = ("reward.overlap=always", "ppo.chunk_size=2", "generation.length_sampler=[3,6]",
            "generation.eval.top_k=[0,3]", "eval.ref_responses=true", "prompts.eval.repeat=2",
            "tracking.log_rollouts=true", "ppo.num_steps=2")
    one = run("train", *words("run_name=one", *more), cwd=world)
    two = run("train", *words("run_name=two", "hardware=ddp", *more), cwd=world)
    assert (one.code, two.code) == (0, 0), two.err
    left, right = (world / "runs" / name for name in ("one", "two"))
    assert close_to(stable_rows(right / "metrics.jsonl"), stable_rows(left / "metrics.jsonl"))

    def told(folder: Path) -> list[tuple]:
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        return [(row["step"], row["kind"], row["response"], row.get("ref_response"))
                for row in rows if row["step"] < 2]  # by one policy on all processes

    assert told(left) == told(right)
    done = run("train", *words("run_name=bad", "reward.fn=odd.py:broken_on_one_rank",
                               "hardware=ddp", "eval.at_start=false", *more[:2]), cwd=world, code=7)
    assert "rank 1, reward" in done.err
    wait_for_no_ranks("bad")


CONTRADICTIONS = [
    (["hardware.offload_param=true", "hardware.zero_stage=2"], "offload_param needs zero_stage 3"),
    (["hardware.offload_optimizer=true"], "offload_optimizer needs zero_stage 1"),
    (["hardware.num_nodes=2", "run_name=x"], "2 nodes need a place to meet"),
    (["hardware.node_rank=1"], "node_rank 1 must be below num_nodes 1"),
    (["hardware.deepspeed_config=ds.json"], "DeepSpeed is used with zero_stage 1 to 3 only"),
    (["hardware.deepspeed_config=ds.json", "hardware.zero_stage=1"],
     "gradient_accumulation_steps is 4, the settings make it 1"),
    (["hardware.deepspeed_config=none.json", "hardware.zero_stage=1"], "can't be read as JSON")]


@pytest.mark.parametrize(("more", "text"), CONTRADICTIONS)
def test_contradictions_are_told_before_anything_starts(world, command, more, text):
    Path("ds.json").write_text('{"gradient_accumulation_steps": 4}')
    done = command(*words(*more), code=2)
    assert text in done.said
    assert not Path("runs").exists()


def test_python_objects_need_one_process(world):
    code = ("import ppocli\n"
            "try:\n"
            f"    ppocli.train({words('hardware=ddp')!r}, reward_fn=lambda outputs, **_: [0.0])\n"
            "except ppocli_error as error:\n"
            "    print(error.exit_code, error)\n")
    code = "from ppocli.errors import ConfigError as ppocli_error\n" + code
    done = subprocess.run([sys.executable, "-c", code], cwd=world, text=True, capture_output=True,
                          timeout=120, check=False)
    assert done.stdout.startswith("2 Python objects can't be handed to several processes."), \
        done.stderr
