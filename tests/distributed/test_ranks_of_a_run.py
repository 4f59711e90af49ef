"""Whole runs of several processes through the command: results, stops, deaths, and what is left."""

import json
import signal
from pathlib import Path

import pytest
import torch
from helpers import jsonl, read_json, stable_rows
from ranks import REWARD, close_to, rows_of, wait_for_no_ranks
from runs import assert_tidy, copied, last_checkpoint, run, spawn, wait_for, words
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppocli
from ppocli.errors import ConfigError

pytestmark = pytest.mark.timeout(400)


def assert_plain(exported: Path, model: Path) -> None:
    """Two folders hold whole models for transformers alone that say the same within rounding."""
    ids = AutoTokenizer.from_pretrained(exported)("the film was", return_tensors="pt").input_ids
    one, other = (AutoModelForCausalLM.from_pretrained(folder).eval()
                  for folder in (exported, model))
    with torch.no_grad():
        assert torch.allclose(one(ids).logits, other(ids).logits, atol=1e-4)


def assert_two_come_to_what_one_comes_to(world: Path, hardware: str, *more: str) -> None:
    """The runs ``one`` and ``two``, left below ``world``."""
    run("train", *words("run_name=one", *more), cwd=world, code=0)
    temporary = world / "temporary"
    temporary.mkdir()
    # as `accelerate launch --cpu` sets it, without its own words on DeepSpeed
    two = run("train", *words("run_name=two", f"hardware={hardware}", *more), cwd=world, code=0,
              ACCELERATE_USE_CPU="True", TMPDIR=str(temporary))
    # torch's cache stays: a later start finds it
    assert all(path.name.startswith("torchinductor") for path in temporary.iterdir())
    assert two.out == f"{world / 'runs/two/model'}\n"
    assert "Warning" not in two.err
    assert close_to(stable_rows(world / "runs/one/metrics.jsonl"),
                    stable_rows(world / "runs/two/metrics.jsonl"))
    assert_tidy(world / "runs/two")
    assert len(list(last_checkpoint(world / "runs/two").glob(
        "optimizer-*-of-00002.safetensors"))) == 2


def test_a_run_on_two_processes_comes_to_what_one_comes_to(world):
    assert_two_come_to_what_one_comes_to(world, "zero2", "ppo.num_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero3"])
def test_samples_that_wait_are_resumed_with(world, hardware):
    assert_two_come_to_what_one_comes_to(
        world, hardware, "ppo.staleness=2", "ppo.importance.level=sequence",
        "ppo.importance.reject.token_k3=0.5")
    stopped = copied(world / "runs/two", world / "runs/stopped", 1)
    run("resume", str(stopped), cwd=world, code=0)
    assert stable_rows(stopped / "metrics.jsonl") == stable_rows(world / "runs/two/metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero1", "zero2", "zero3", "zero3_offload"])
def test_what_follows_a_training_needs_one_process_whatever_that_had(world, hardware, app):
    assert_two_come_to_what_one_comes_to(world, hardware)
    judged = app("eval", "runs/two", "--json", code=0)
    summary = read_json(world / "runs/two/summary.json")
    found = json.loads(judged.out)["figures"]["reward_mean"]
    assert found == pytest.approx(summary["eval_after"]["reward_mean"], abs=1e-4)
    app("export", "runs/two", "--step", "4", "-o", "plain", code=0)
    assert_plain(world / "plain", world / "runs/one/model")
    assert_plain(world / "runs/two/model", world / "runs/one/model")


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero2"])
def test_a_reference_that_follows_is_the_same_on_two_and_after_a_kill(world, hardware):
    keys = ("model.reference.sync_every=2", "model.reference.sync_alpha=0.5")
    run("train", *words("run_name=one", *keys), cwd=world, code=0)
    run("train", *words("run_name=two", *keys, f"hardware={hardware}"), cwd=world, code=0,
        ACCELERATE_USE_CPU="True")
    rows = [stable_rows(world / f"runs/{name}/metrics.jsonl") for name in ("one", "two")]
    assert close_to(*rows)
    again = copied(world / "runs/two", world / "again/two", last_step=3)
    run("resume", str(again), cwd=world, code=0, ACCELERATE_USE_CPU="True")
    assert stable_rows(again / "metrics.jsonl") == rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero1", "zero2", "zero3"])
def test_sigterm_saves_once_and_the_resume_is_exact(world, hardware):
    (world / "odd.py").write_text(REWARD)
    given = ["reward.fn=odd.py:unlike", f"hardware={hardware}", "ppo.num_steps=6",
             "checkpoint.every_steps=100", "eval.every_steps=2"]
    run("train", *words("run_name=whole", *given), cwd=world, code=0)
    process = spawn("train", *words("run_name=cut", *given), cwd=world,
                    PPOCLI_FAULTS="optimize.minibatch@7:sleep=20")
    wait_for(lambda: rows_of(world / "runs/cut") >= 2, process)  # it sleeps in step 2
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "Stopped: stopped by SIGTERM at step" in err
    assert err.count("Stopped:") == 1
    wait_for_no_ranks(world / "runs/cut")
    [checkpoint] = (world / "runs/cut/checkpoints").glob("step-*")
    run("resume", "runs/cut", cwd=world, code=0)
    assert stable_rows(world / "runs/cut/metrics.jsonl") == stable_rows(
        world / "runs/whole/metrics.jsonl")
    one, other = (world / f"runs/{name}/model/model.safetensors" for name in ("whole", "cut"))
    assert one.read_bytes() == other.read_bytes()
    assert checkpoint.name.startswith("step-")


@pytest.mark.slow
def test_three_ranks_sum_in_one_order_in_every_process(world):
    """DDP lays its buckets out anew after a process's first update, and with them the order that
    three gradients are summed in."""
    run("train", *words("run_name=three", "hardware=ddp", "hardware.num_processes=3",
                        "ppo.mini_batch_size=12", "ppo.micro_batch_size=2"), cwd=world, code=0)
    again = copied(world / "runs/three", world / "again/three", last_step=2)
    assert "find_unused" not in run("resume", str(again), cwd=world, code=0).said
    assert stable_rows(again / "metrics.jsonl") == stable_rows(world / "runs/three/metrics.jsonl")
    one, other = (path / "model/model.safetensors" for path in (world / "runs/three", again))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_scoring_beside_generation_keeps_ranks_in_step(world):
    """With drawn lengths, a sweep at evaluation and the reference's responses: all that ranks
    share out among them."""
    (world / "odd.py").write_text(REWARD)
    more = ("reward.overlap=always", "ppo.chunk_size=2", "generation.length_sampler=[3,6]",
            "generation.eval.top_k=[0,3]", "eval.ref_responses=true", "prompts.eval.repeat=2",
            "tracking.log_rollouts=true", "ppo.num_steps=2")
    run("train", *words("run_name=one", *more), cwd=world, code=0)
    run("train", *words("run_name=two", "hardware=ddp", *more), cwd=world, code=0)
    left, right = (world / "runs" / name for name in ("one", "two"))
    assert close_to(stable_rows(right / "metrics.jsonl"), stable_rows(left / "metrics.jsonl"))

    def told(folder: Path) -> list[tuple]:
        return [(row["step"], row["kind"], row["response"], row.get("ref_response"))
                for row in jsonl(folder / "samples.jsonl")
                if row["step"] < 2]  # by one policy on all processes

    assert told(left) == told(right)
    done = run("train", *words("run_name=bad", "reward.fn=odd.py:broken_on_one_rank",
                               "hardware=ddp", "eval.at_start=false", *more[:2]), cwd=world, code=7)
    assert "rank 1, reward" in done.err
    wait_for_no_ranks(world / "runs/bad")


@pytest.mark.parametrize(("more", "text"), [
    (["hardware.offload_param=true", "hardware.zero_stage=2"], "hardware.offload_param, "),
    (["hardware.offload_optimizer=true"], "hardware.offload_optimizer, "),
    (["hardware.num_nodes=2"], "torchrun --nnodes=2 --nproc-per-node=1"),
    (["hardware.node_rank=1"], "torchrun or srun starts the processes of several machines"),
    (["hardware.deepspeed_config=ds.json"], "hardware.deepspeed_config, hardware.zero_stage"),
    (["hardware.deepspeed_config=none.json", "hardware.zero_stage=1"], "can't be read as JSON")])
def test_contradictions_are_told_before_anything_starts(world, command, more, text):
    assert text in command(*words(*more), code=2).said
    assert not Path("runs").exists()


def test_python_objects_need_one_process(world):
    with pytest.raises(ConfigError, match="objects can't be handed to several processes"):
        ppocli.train(words("hardware=ddp"), reward_fn=lambda outputs, **_: [0.0])
