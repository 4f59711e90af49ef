"""Memory runs out on one of several ranks: all go on with half the rows, where they are or from the
last checkpoint, to what they would have come to; and end with numbers where one row is too much."""


import pytest
from helpers import read_json, save_lm, stable_rows
from ranks import close_to, wait_for_no_ranks
from runs import assert_tidy, make_world, run, words
from sessions import estimate_of

from ppocli.config.config_yaml import read_config

pytestmark = [pytest.mark.timeout(400)]
slow = pytest.mark.slow
STEPS = "ppo.num_steps=3"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Rows of one process that has memory enough."""
    folder = make_world(tmp_path_factory.mktemp("alone"))
    run("train", *words("run_name=alone", STEPS), cwd=folder, code=0)
    return stable_rows(folder / "runs/alone/metrics.jsonl")


IN_PLACE = "rank 1, rollout of 5 rows at once: out of memory; going on with 2"
AGAIN = "all ranks start again with ppo.micro_batch_size=1"
SHORT = [
    # decoding waits for nobody, gradients do: three rows a rank of each minibatch
    ("rollout.token>2#1:oom", ["hardware=ddp"], 4, [IN_PLACE]),
    pytest.param("rollout.token>2#1:oom,optimize.forward>1@6+#1:oom", ["hardware=ddp"], 1, [
        IN_PLACE, "rank 1, step 2, optimize: out of memory with 3 rows a pass; last healthy: "
        "step 1 in ", AGAIN], marks=slow),
    # before there is a checkpoint, on two sizes
    pytest.param("optimize.backward>1#0:oom", ["hardware=zero2"], 1, [
        "rank 0, step 1, optimize: out of memory with 3 rows a pass; no checkpoint was saved yet; "
        + AGAIN], marks=slow),
    pytest.param("optimize.forward>1@6+#1:oom", ["hardware=zero3"], 1, [
        "rank 1, step 2, optimize: out of memory with 3 rows a pass; last healthy: step 1", AGAIN],
        marks=slow),
    pytest.param("scoring.forward>2#1:oom", ["hardware=zero1"], 4, [
        "rank 1, scoring of 4 rows at once: out of memory; going on with 2"], marks=slow),
    # passes for scoring gather a reference that is in parts
    pytest.param("scoring.forward>2@3+#1:oom", ["hardware=zero3"], 2, [
        "out of memory with 4 rows a pass", "start again with ppo.micro_batch_size=2"],
        marks=slow),
    pytest.param("rollout.token>2#1:oom", [
        "hardware=zero3", "hardware.gather_for_generation=false"], 4, [
        "rank 1, step 1, rollout: out of memory with 5 rows a pass; no checkpoint was saved yet; "
        "all ranks start again with ppo.chunk_size=2"], marks=slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "hardware", "rows", "said"), SHORT)
def test_all_go_on_with_half_the_rows(fault, hardware, rows, said, world, alone):
    done = run("train", *words("run_name=r", *hardware, STEPS), cwd=world, PPOCLI_FAULTS=fault)
    assert done.code == 0, done.err
    warnings = [line for line in done.err.splitlines() if "out of memory" in line]
    assert all(any(text in line for line in warnings) for text in said), done.err
    assert len([line for line in warnings if "start again" in line]) == (
        "start again" in "".join(said))
    assert "Traceback" not in done.err
    folder = world / "runs/r"
    assert all(line.removeprefix("warning: ") in (folder / "ppocli.log").read_text()
               for line in warnings)
    assert close_to(stable_rows(folder / "metrics.jsonl"), alone)
    assert read_config(folder / "config.yaml").ppo.micro_batch_size == rows
    assert not (folder / "config.next.yaml").exists()
    assert read_json(folder / "summary.json")["status"] == "finished"
    assert_tidy(folder)


@slow
def test_where_one_row_is_too_much_all_end_with_numbers_and_go_on_elsewhere(world, alone):
    done = run("train", *words("run_name=r", "hardware=ddp", STEPS), cwd=world,
               PPOCLI_FAULTS="optimize.forward>0@6+#1:oom", code=8)
    [message] = [line for line in done.err.splitlines() if line.startswith("Error:")]
    assert message.startswith("Error: rank 1, step 2, optimize: out of memory with 1 row a pass, "
                              "and a pass can't be smaller: its longest sample has ")
    assert "MiB, and " in message
    assert "; last healthy: step 1 in " in message
    wait_for_no_ranks(world / "runs/r")
    assert not (world / "runs/r/config.next.yaml").exists()
    assert run("resume", "runs/r", cwd=world).code == 0
    assert close_to(stable_rows(world / "runs/r/metrics.jsonl"), alone)


RESIDENT = """
import os
from pathlib import Path

from ppocli.distributed.host_memory import resident_mib

# imported before any model is loaded
Path(f"before-{os.environ.get('RANK')}").write_text(str(resident_mib(os.getpid())))


def plain(outputs, **columns):
    return [float(len(text)) for text in outputs]
"""


@slow
@pytest.mark.parametrize("hardware", ["ddp", "zero1", "zero2", "zero3"])
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
