"""One error from what several ranks reported, and what was observed of them."""

import signal

import pytest

from ppocli.config.schema import HardwareConfig, TrainConfig
from ppocli.distributed.ranks import RankOutcome
from ppocli.launch.local_ranks import LocalRanks, Start, _go_on, conclude

TRACE = "Traceback (most recent call last):\n  ...\n"
PHASES = {0: "step 3, rollout", 1: "step 3, optimize"}


def local(**more) -> LocalRanks:
    return LocalRanks(HardwareConfig(num_processes=2, timeout_seconds=8), **more)


def end(ranks: LocalRanks, outcomes: list[RankOutcome]) -> tuple[int, str]:
    error = conclude(ranks, outcomes, PHASES, "resume")
    return (0, "") if error is None else (error.exit_code, str(error))


def lost(rank: int, at: float = 5.0) -> RankOutcome:
    return RankOutcome(rank, 1, "RuntimeError: gloo says so\nand more", TRACE, at,
                       PHASES.get(rank, ""), lost=True)


def test_the_first_error_that_a_rank_reports_is_the_error_of_the_run():
    outcomes = [lost(0, 1.0), RankOutcome(1, 7, "rank 1, reward: no", "", 2.0),
                RankOutcome(0, 8, "too late", "", 3.0)]
    assert end(local(failed={0: 1, 1: 7}), outcomes) == (7, "rank 1, reward: no")


def test_how_to_go_on_with_this_run(tmp_path):
    start = Start(tmp_path / "my run", TrainConfig())
    assert _go_on(start).endswith("with 'run_name=my run' resume=auto")
    (start.run_dir / "checkpoints/step-000001").mkdir(parents=True)
    assert _go_on(start).endswith(f"the last checkpoint: ppocli resume '{start.run_dir}'")


@pytest.mark.parametrize(("code", "message"), [(0, ""), (143, "stopped by SIGTERM")])
def test_an_end_without_an_error(code, message):
    assert end(local(), [RankOutcome(rank, code, message) for rank in (0, 1)]) == (code, message)


KILLED = "killed by SIGKILL (exit -9): probably out of memory; the other ranks were ended."
HUNG = "no answer within 8 seconds (hardware.timeout_seconds); all ranks were ended."


@pytest.mark.parametrize(("more", "outcomes", "text"), [
    *((more, [lost(0)], f"rank 1, step 3, optimize: {text}") for text, more in (
        (KILLED, {"failed": {1: -9}}), (KILLED, {"failed": {0: 1, 1: -9}}),
        ("ended with code 3 without an error message", {"failed": {1: 3, 0: 1}}),
        ("killed by SIGSEGV", {"failed": {1: -signal.SIGSEGV, 0: 1}}),
        (HUNG, {"failed": {0: 1, 1: -9}, "hung": {1}}))),
    ({"failed": {0: 1, 1: 1}}, [lost(1, 1.0), lost(0, 2.0)],
     "rank 1, step 3, optimize; rank 0, step 3, rollout: no answer of each other within 8 seconds"),
    ({"agent_error": "RendezvousTimeoutError: no"}, [], "The ranks of this machine did not meet "
     "within 8 seconds")])
def test_a_silent_rank_is_named_not_those_that_waited_for_it(more, outcomes, text, capsys):
    code, message = end(local(**more), outcomes)
    assert code == 1
    assert message.startswith(text)
    assert capsys.readouterr().err == ""


def test_an_unexpected_error_keeps_its_traceback_and_comes_before_its_consequences(capsys):
    cause = RankOutcome(1, 1, "KeyError: 'x'", TRACE, 9.0, "step 3, optimize")
    assert end(local(failed={0: 1, 1: 1}), [lost(0), cause]) == (
        1, "rank 1, step 3, optimize: KeyError: 'x'")
    assert capsys.readouterr().err == TRACE
