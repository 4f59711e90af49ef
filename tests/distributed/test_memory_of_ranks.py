"""Memory runs out on one of several ranks: all go on with half the rows; or, in a pass of all
ranks, end with the words to go on with half the rows, or with numbers where one row is too much."""

import pytest
from helpers import read_json, save_lm, stable_rows
from ranks import close_to, errors_in, wait_for_no_ranks
from runs import assert_tidy, make_world, run, words
from sessions import estimate_of

from ppocli.config.config_yaml import read_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = "ppo.num_steps=3"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Rows of one process that has memory enough."""
    folder = make_world(tmp_path_factory.mktemp("alone"))
    run("train", *words("run_name=alone", STEPS), cwd=folder, code=0)
    return stable_rows(folder / "runs/alone/metrics.jsonl")


SHORT = [
    # decoding waits for nobody
    ("rollout.token>2#1:oom", "ddp", "rank 1, rollout of 5 rows at once"),
    ("scoring.forward>2#1:oom", "zero1", "rank 1, scoring of 4 rows at once")]


@pytest.mark.parametrize(("fault", "hardware", "text"), SHORT)
def test_all_go_on_with_half_the_rows(fault, hardware, text, world, alone):
    done = run("train", *words("run_name=r", f"hardware={hardware}", STEPS), cwd=world,
               PPOCLI_FAULTS=fault, code=0)
    [warning] = [line for line in done.err.splitlines() if "out of memory" in line]
    assert f"{text}: out of memory; going on with 2" in warning
    assert "Traceback" not in done.err
    folder = world / "runs/r"
    assert warning.removeprefix("warning: ") in (folder / "ppocli.log").read_text()
    assert close_to(stable_rows(folder / "metrics.jsonl"), alone)
    assert read_config(folder / "config.yaml").ppo.micro_batch_size == 4
    assert_tidy(folder)


TOGETHER = [
    # gradients wait for all ranks: three rows a rank of each minibatch
    ("optimize.forward>1@6+#1:oom", ["hardware=ddp"], "rank 1, step 2, optimize: out of memory "
     "with 3 rows a pass (last healthy: step 1 in ", "ppo.micro_batch_size=1"),
    # before there is a checkpoint; passes gather weights
    ("rollout.token>2#1:oom", ["hardware=zero3", "hardware.gather_for_generation=false"],
     "rank 1, step 1, rollout: out of memory with 5 rows a pass", "ppo.chunk_size=2")]


@pytest.mark.parametrize(("fault", "hardware", "text", "smaller"), TOGETHER)
def test_in_a_pass_of_all_ranks_the_run_ends_with_the_words_to_go_on(fault, hardware, text, smaller,
                                                                     world, alone):
    done = run("train", *words("run_name=r", *hardware, STEPS), cwd=world, PPOCLI_FAULTS=fault,
               code=8)
    [message] = errors_in(done.err)
    assert text in message
    assert f"{smaller} " in done.err.rpartition("fix:")[2]
    assert "Traceback" not in done.err
    wait_for_no_ranks(world / "runs/r")
    run("train", *words("run_name=r", *hardware, STEPS, smaller, "resume=auto"), cwd=world, code=0)
    assert close_to(stable_rows(world / "runs/r/metrics.jsonl"), alone)


RESIDENT = """
import os
from pathlib import Path

import psutil

# imported before any model is loaded
Path(f"before-{os.environ.get('RANK')}").write_text(str(psutil.Process().memory_info().rss / 2**20))


def plain(outputs, **columns):
    return [float(len(text)) for text in outputs]
"""


@pytest.mark.parametrize("hardware", ["ddp", "zero3"])
def test_ranks_take_what_was_estimated(world, hardware):
    """A GPT-2 of 45 million parameters, whose peak is the system's word on rank 0."""
    save_lm(world / "lm", gain=1.0, n_layer=6, n_embd=512, n_head=8, n_positions=1024,
            vocab_size=50257)
    (world / "rewards.py").write_text(RESIDENT)
    # two updates: the second has all of the optimizer's state
    run("train", *words("run_name=r", f"hardware={hardware}", "ppo.num_steps=1",
                        "ppo.ppo_epochs=1", "ppo.num_rollouts=8", "ppo.mini_batch_size=4",
                        "eval.at_start=false"), cwd=world, code=0)
    needed = estimate_of(read_config(world / "runs/r/config.yaml"), 8, ranks=2)
    before = float((world / "before-0").read_text())
    summary = read_json(world / "runs/r/summary.json")
    estimated = max(needed.rollout, needed.update) / 2**20
    assert estimated + before == pytest.approx(summary["peak_memory_mib"], rel=0.25)
