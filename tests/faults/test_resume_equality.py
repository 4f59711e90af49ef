"""A run that was stopped and went on equals the run that was not, bit for bit."""

import random
import time

import pytest
from runs import STEPS, assert_equal_runs, copied, resumed, run, spawn, words


@pytest.mark.parametrize("step", [
    1, 3, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, STEPS) if k != 3)])
def test_resuming_at_a_step_equals_the_straight_run(step, reference, tmp_path):
    stopped = copied(reference, tmp_path / "run", step)
    resumed(stopped)
    assert_equal_runs(reference, stopped)


def test_resuming_twice_equals_the_straight_run(reference, tmp_path):
    """What the first resumption saved is as good as what the straight run saved."""
    stopped = copied(reference, tmp_path / "a", 1)
    resumed(stopped)
    again = copied(stopped, tmp_path / "b", 2)
    resumed(again)
    assert_equal_runs(reference, again)


CRITIC = "model.value.kind={} model.value.num_layers_unfrozen=1"


@pytest.mark.parametrize("keys", [
    CRITIC.format("branch"), CRITIC.format("model"), "model.num_layers_unfrozen=1"],
    ids=["branch", "critic", "shared"])
def test_each_kind_of_model_resumes_exactly(keys, command, world):
    command(*words("run_name=straight", "model.reference.kind=auto", *keys.split()), code=0)
    stopped = copied(world / "runs/straight", world / "runs/stopped", 1)
    resumed(stopped)
    assert_equal_runs(world / "runs/straight", stopped)


KILLS = ["save.before_rename@2:kill9", "rollout.token@70:kill9"]
MORE_KILLS = [
    "save.open@1:kill9", "save.open@9:kill9", "save.open@25:kill9", "save.before_manifest@1:kill9",
    "save.before_manifest@3:kill9", "save.before_rename@1:kill9", "save.after_rename@1:kill9",
    "save.after_rename@4:kill9", "prune.before@1:kill9", "prune.before@3:kill9",
    "rollout.token@1:kill9", "score.before@7:kill9", "score.after@8:kill9",
    "optimize.minibatch@1:kill9", "optimize.minibatch@9:kill9", "export.before_rename@1:kill9"]


@pytest.mark.parametrize("fault", [
    *KILLS, *(pytest.param(fault, marks=pytest.mark.slow) for fault in MORE_KILLS)])
def test_kill9_at_a_point_then_resume(fault, command, reference, world):
    killed = run("train", *words("run_name=r", stateful=True), cwd=world, PPOCLI_FAULTS=fault)
    assert killed.code == -9, killed.err
    command(*words("run_name=r", "resume=auto", stateful=True), code=0)
    assert_equal_runs(reference, world / "runs/r")


@pytest.mark.parametrize("seed", [
    0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_kill9_at_random_moments_then_resume(seed, reference, world):
    """Up to three kills of the process group, each at a random moment of what is left to do."""
    draw = random.Random(seed)
    train = ["train", *words("run_name=r", "resume=auto", stateful=True)]
    began = time.monotonic()
    for _ in range(1 + seed % 3):
        process = spawn(*train, cwd=world)
        started = world / "runs/r/metrics.jsonl"
        rows = started.stat().st_size if started.exists() else 0
        while process.poll() is None and time.monotonic() - began < 200 and not (
                started.exists() and started.stat().st_size != rows):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.5))
        process.kill()
        process.communicate()
    run(*train, cwd=world, code=0)
    assert_equal_runs(reference, world / "runs/r")
