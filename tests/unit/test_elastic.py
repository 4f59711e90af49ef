"""One message out of what several ranks said, and what was seen of them."""

import signal

import pytest

from ppocli.config.schema import HardwareConfig, TrainConfig
from ppocli.distributed.launchers import RankOutcome
from ppocli.launch.elastic import Job, _go_on, conclude

TRACE = "Traceback (most recent call last):\n  ...\n"
PHASES = {0: "step 3, rollout", 1: "step 3, optimize", 2: "", 3: ""}


def job(**more) -> Job:
    return Job(HardwareConfig(num_processes=2, timeout_seconds=8), **more)


def lost(rank: int, at: float = 5.0) -> RankOutcome:
    return RankOutcome(rank, 1, "RuntimeError: gloo says so\nand more", TRACE, at, PHASES[rank],
                       lost=True)


def test_what_a_rank_expected_is_told_as_it_is_and_the_earliest_first():
    outcomes = [lost(0, 1.0), RankOutcome(1, 7, "rank 1, reward: no", "", 2.0),
                RankOutcome(0, 8, "too late", "", 3.0)]
    assert conclude(job(failed={0: 1, 1: 7}), outcomes, PHASES) == (
        7, "Error: rank 1, reward: no\n")


def test_the_way_on_is_told_in_words_for_this_run(tmp_path):
    run = tmp_path / "my run"
    assert _go_on(TrainConfig(), run).endswith("with 'run_name=my run' resume=auto\n")
    (run / "checkpoints/step-000001").mkdir(parents=True)
    assert _go_on(TrainConfig(), run).endswith(f"the last checkpoint: ppocli resume '{run}'\n")


@pytest.mark.parametrize(("code", "message", "said"), [
    (0, "", ""), (143, "stopped by SIGTERM", "Stopped: stopped by SIGTERM\n")])
def test_an_end_without_an_error(code, message, said):
    outcomes = [RankOutcome(rank, code, message, "", 2.0) for rank in (0, 1)]
    assert conclude(job(), outcomes, PHASES) == (code, said)


KILLED = "killed by SIGKILL (exit -9): probably out of memory"
HUNG = "no answer within 8 seconds (hardware.timeout_seconds); all ranks were ended.\n"


@pytest.mark.parametrize(("more", "outcomes", "text"), [
    *((more, [lost(0)], f"Error: rank 1, step 3, optimize: {text}") for text, more in (
        (KILLED, {"failed": {1: -9}}), (KILLED, {"failed": {0: 1, 1: -9}}),
        ("ended with code 3 and said nothing", {"failed": {1: 3, 0: 1}}),
        ("killed by SIGSEGV", {"failed": {1: -signal.SIGSEGV, 0: 1}}),
        (HUNG, {"failed": {0: 1, 1: -9}, "hung": [1]}))),
    ({"failed": {0: 1, 1: 1}}, [lost(1, 1.0), lost(0, 2.0)],
     "Error: rank 1, step 3, optimize; rank 0, step 3, rollout: no answer of each other within 8 "
     "seconds"),
    ({"agent_error": "RendezvousTimeoutError: no"}, [], "Error: The ranks of this machine did not "
     "meet within 8 seconds")])
def test_a_rank_without_a_word_is_named_not_those_that_waited_for_it(more, outcomes, text):
    """On a single machine, which has no other node."""
    code, said = conclude(job(**more), outcomes, PHASES)
    assert code == 1
    assert said.startswith(text)
    assert "Traceback" not in said
    assert "node" not in said


def test_an_unexpected_error_keeps_its_traceback_and_comes_before_its_consequences():
    own = RankOutcome(1, 1, "KeyError: 'x'", TRACE, 9.0, "step 3, optimize")
    assert conclude(job(failed={0: 1, 1: 1}), [lost(0), own], PHASES) == (
        1, f"{TRACE}Error: rank 1, step 3, optimize: KeyError: 'x'\n")


def test_a_broken_connection_to_another_node():
    several = Job(HardwareConfig(num_processes=2, num_nodes=2, timeout_seconds=8), node_rank=1,
                  failed={2: 1, 3: 1})
    said = conclude(several, [lost(3, 1.0), lost(2, 2.0)], PHASES)[1]
    assert said.startswith("Error: rank 3, before its first phase: another rank is gone or gave no "
                           "answer within 8 seconds")
    assert "where: RuntimeError: gloo says so\n" in said


def test_nodes_that_never_met():
    several = Job(HardwareConfig(num_nodes=2, timeout_seconds=8, rdzv_endpoint="h:1"), node_rank=1,
                  agent_error="DistStoreError: timed out")
    code, said = conclude(several, [], PHASES)
    assert code == 1
    assert "node 1: the nodes lost each other, or did not meet within 8 seconds" in said
    assert "hardware.rdzv_endpoint=h:1 (DistStoreError: timed out)" in said
