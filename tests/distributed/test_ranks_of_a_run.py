"""Whole runs of several processes through the command: results, stops, deaths, and what is left."""

import signal
from pathlib import Path

import pytest
from helpers import jsonl, stable_rows
from ranks import REWARD, close_to, rows_of, wait_for_no_ranks
from runs import (
    RM_WORDS,
    assert_tidy,
    copied,
    last_checkpoint,
    run,
    spawn,
    wait_for,
    words,
    write_pairs,
)

import ppocli
from ppocli.errors import ConfigError

pytestmark = pytest.mark.timeout(400)


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


SFT_WORDS = ("model.path=lm", "data.path=pairs.jsonl", "data.columns.completion=chosen",
             "data.val=0.25", "sft.epochs=1", "sft.mini_batch_size=5", "sft.micro_batch_size=2",
             "sft.neftune=5", "sft.eval_samples=3", "generation.max_new_tokens=6",
             "hardware.device=cpu", "hardware.num_threads=1", "hardware.gemm=default")


@pytest.mark.slow
@pytest.mark.parametrize(("task", "given"), [
    ("sft", SFT_WORDS), ("reward-model", (*RM_WORDS, "hardware.gemm=default"))])
@pytest.mark.parametrize("hardware", ["ddp", "zero3"])
def test_trainings_on_data_give_the_numbers_of_one_process(world, task, given, hardware):
    write_pairs(world)
    run(task, *given, "run_name=one", cwd=world, code=0)
    run(task, *given, "run_name=two", f"hardware={hardware}", cwd=world, code=0,
        ACCELERATE_USE_CPU="True")
    assert close_to(*(stable_rows(world / f"runs/{name}/metrics.jsonl") for name in ("one", "two")))


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
@pytest.mark.parametrize("hardware", ["ddp", "zero3"])
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
def test_scoring_beside_generation_keeps_ranks_in_step(world):
    """With drawn lengths and repeated evaluation prompts: all that ranks share out among them."""
    more = ("reward.overlap=always", "ppo.chunk_size=2", "generation.length_sampler=[3,6]",
            "prompts.eval.repeat=2", "tracking.log_rollouts=true", "ppo.num_steps=2")
    run("train", *words("run_name=one", *more), cwd=world, code=0)
    run("train", *words("run_name=two", "hardware=ddp", *more), cwd=world, code=0)
    left, right = (world / "runs" / name for name in ("one", "two"))
    assert close_to(stable_rows(right / "metrics.jsonl"), stable_rows(left / "metrics.jsonl"))

    def told(folder: Path) -> list[tuple]:
        return [(row["step"], row["kind"], row["response"])
                for row in jsonl(folder / "samples.jsonl")
                if row["step"] < 2]  # by one policy on all processes

    assert told(left) == told(right)


@pytest.mark.parametrize(("more", "text"), [
    (["hardware.offload_param=true", "hardware.zero_stage=2"], "hardware.offload_param, "),
    (["hardware.num_nodes=2"], "torchrun --nnodes=2 --nproc-per-node=1"),
    (["hardware.deepspeed_config=none.json", "hardware.zero_stage=1"], "can't be read as JSON")])
def test_contradictions_are_told_before_anything_starts(world, command, more, text):
    assert text in command(*words(*more), code=2).said
    assert not Path("runs").exists()


def test_python_objects_need_one_process(world):
    with pytest.raises(ConfigError, match="objects can't be handed to several processes"):
        ppocli.train(words("hardware=ddp"), reward_fn=lambda outputs, **_: [0.0])
