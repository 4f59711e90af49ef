"""A run that was stopped and goes on: it equals the run that was not, bit for bit; of changes, what
is taken over, what is refused, what is kept."""

import random
import time
from pathlib import Path

import pytest
import torch
from helpers import jsonl, read_json, save_lm, write_prompts
from runs import assert_equal_runs, copied, resumed, run, spawn, words
from safetensors.torch import load_file

from ppocli.config.config_yaml import read_config
from ppocli.rewards.scoring import Reward
from ppocli.runs.record import read_changes, read_run
from ppocli.runs.target import find_target


def test_resuming_at_a_step_equals_the_straight_run(reference, tmp_path):
    stopped = copied(reference, tmp_path / "run", 3)
    resumed(stopped)
    assert_equal_runs(reference, stopped)


def test_links_that_a_kill_left_behind_mislead_nobody(reference, here):
    """A kill between the rename of step 4, the best, and its links; and in the middle of files."""
    killed = copied(reference, here / "runs/r", 4)
    for name in ("best", "latest"):
        (killed / "checkpoints" / name).unlink()
        (killed / "checkpoints" / name).symlink_to("step-000002")
    for place in (".", "events", "checkpoints", "nonfinite-dump"):
        (killed / place).mkdir(exist_ok=True)
        (killed / place / ".tmp-0123456789abcdef").write_text("half")
    assert find_target("r", say=print, best=True).step == 4
    resumed(killed)
    for name in ("best", "latest"):
        assert (killed / "checkpoints" / name).resolve().name == "step-000004"
    assert_equal_runs(reference, killed)


CRITIC = "model.value.kind={} model.value.num_layers_unfrozen=1"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    CRITIC.format("model"), CRITIC.format("branch"), "model.num_layers_unfrozen=1",
    "model.value.kind=adapter model.peft.type=lora model.peft.r=4 "
    "model.peft.target_modules=all-linear"], ids=["critic", "branch", "shared", "value adapter"])
def test_each_kind_of_model_resumes_exactly(keys, command, world):
    command(*words("run_name=straight", "model.reference.kind=auto", *keys.split()), code=0)
    stopped = copied(world / "runs/straight", world / "runs/stopped", 1)
    resumed(stopped)
    assert_equal_runs(world / "runs/straight", stopped)


@pytest.mark.slow
def test_the_end_of_value_pretraining_is_kept_and_resumed_from_exactly(command, world):
    """It ends with the first step, as any explained variance is enough; its checkpoint stays beside
    the only one that keep_last leaves, with the policy as it was."""
    done = command(*words("run_name=straight", "ppo.value_pretrain_steps=3", "eval.every_steps=4",
                          "ppo.value_pretrain_until=-1e9", "checkpoint.keep_last=1",
                          "ppo.critic_epochs=1"), code=0)
    straight, stopped = world / "runs/straight", world / "runs/stopped"
    assert "value pretraining ends with step 1: " in done.said
    kept = sorted(path.name for path in (straight / "checkpoints").glob("step-*"))
    assert kept == ["step-000001", "step-000004"]
    before = load_file(world / "lm/model.safetensors")
    for name, same in zip(kept, (True, False), strict=True):
        after = load_file(straight / "checkpoints" / name / "policy/model.safetensors")
        assert all(torch.equal(before[key], after[key]) for key in before) == same
    resumed(copied(straight, stopped, 1))
    assert_equal_runs(straight, stopped)


@pytest.mark.slow
def test_a_killed_run_still_has_the_samples_that_wait(command, world):
    """Killed in step 3, after the checkpoint of step 2, which holds those of steps 3 and 4."""
    more = ["ppo.staleness=2", "ppo.importance.level=token", "ppo.importance.reject.seq_mean_k3=1"]
    command(*words("run_name=straight", *more, stateful=True), code=0)
    given = words("run_name=killed", *more, stateful=True)
    run("train", *given, cwd=world, PPOCLI_FAULTS="optimize.minibatch@9:kill9", code=-9)
    saved = load_file(world / "runs/killed/checkpoints/step-000002/task_state.safetensors")
    assert saved["waiting/logprobs"].shape[0] == saved["waiting/tokens"].shape[0] == 24
    command(*given, "resume=auto", code=0)
    assert_equal_runs(world / "runs/straight", world / "runs/killed")


KILLS = ["rollout.token@70:kill9"]
MORE_KILLS = [
    "export.before_rename@1:kill9", "save.open@9:kill9", "save.before_manifest@1:kill9",
    "save.before_rename@2:kill9", "save.after_rename@1:kill9", "prune.before@1:kill9",
    "score.after@8:kill9", "optimize.minibatch@9:kill9"]


@pytest.mark.parametrize("fault", [
    *KILLS, *(pytest.param(fault, marks=pytest.mark.slow) for fault in MORE_KILLS)])
def test_kill9_at_a_point_then_resume(fault, command, reference, world):
    killed = run("train", *words("run_name=r", stateful=True), cwd=world, PPOCLI_FAULTS=fault)
    assert killed.code == -9, killed.err
    command(*words("run_name=r", "resume=auto", stateful=True), code=0)
    assert_equal_runs(reference, world / "runs/r")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
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


@pytest.fixture
def stopped(reference, world) -> Path:
    """A run stopped after step 2 of the reference run, in a world of its own."""
    return copied(reference, world / "runs/r", 2)


def test_harmless_changes_are_listed_hold_from_here_on_and_become_the_runs_own(command, stopped):
    ended = command(f"resume={stopped}", "ppo.init_kl_coef=0.7", "ppo.num_steps=3",
                    "eval.every_steps=1", "ppo.optimizer.lr=2e-3", code=0)
    for change in ("ppo.num_steps: 4 -> 3", "eval.every_steps: 2 -> 1",
                   "ppo.optimizer.lr: 0.001 -> 0.002 (from here on"):
        assert f"changed on resume: {change}" in ended.err
        assert f"changed on resume: {change}" not in ended.out
        assert f"changed on resume: {change}" in (stopped / "ppocli.log").read_text()
    rows = jsonl(stopped / "metrics.jsonl")
    assert rows[2]["objective/kl_coef"] < 0.2
    assert rows[3]["objective/kl_coef"] == 0.7
    assert rows[3]["eval/reward_mean"] is not None
    assert len(rows) == 4
    assert read_config(stopped / "config.yaml").ppo.optimizer.lr == 2e-3
    changes = read_changes(stopped)
    assert len(changes) == 4
    assert {"step": 2, "key": "ppo.optimizer.lr", "before": "0.001", "after": "0.002"} in changes
    summary = read_json(stopped / "summary.json")
    assert read_json(stopped / "run.json")["run_id"] == summary["run_id"]
    assert not (stopped / "config.next.yaml").exists()


@pytest.mark.slow
def test_steps_of_another_size_end_where_they_were_planned_to(command, stopped, monkeypatch):
    """All samples that were planned are made, in steps of the new size."""
    change = ["ppo.num_rollouts=18", "ppo.num_steps=null", "ppo.total_episodes=48"]
    sizes = [12, 12, 18, 6]
    told, score = {}, Reward.score

    def noting(self, request):
        step, total, passes = request.progress
        told[step] = (total, passes)
        return score(self, request)

    monkeypatch.setattr(Reward, "score", noting)
    ended = command(f"resume={stopped}", *change, "eval.every_steps=null", code=0)
    prompts = len(Path("prompts.jsonl").read_text().splitlines())
    for step in range(2, len(sizes)):
        assert told[step] == (len(sizes), sum(sizes[:step]) / prompts)
    episodes = [row["episode"] for row in jsonl(stopped / "metrics.jsonl")]
    assert episodes == [sum(sizes[:n]) for n in range(len(episodes))]
    assert len(episodes) == len(sizes) + 1
    assert f"step {len(sizes)}/{len(sizes)} " in ended.out
    record = read_run(stopped)
    assert (record.step, record.total_steps) == (len(sizes), len(sizes))


def test_prompts_and_a_reference_that_have_changed_are_noticed(command, world):
    command(*words("run_name=r", "ppo.num_steps=1", "eval.at_start=false"), code=0)
    write_prompts(world / "prompts.jsonl", ["it"])
    save_lm(world / "lm", seed=5)
    ended = command(f"resume={world / 'runs/r'}", "ppo.num_steps=2", code=5)
    for what in ("Not what the run was started with: ", "prompts, evaluation prompts",
                 "reference model"):
        assert what in ended.said


def test_a_finished_run_that_goes_on_keeps_its_model_under_its_step(command, finished):
    first = (finished / "model/model.safetensors").read_bytes()
    command(f"resume={finished}", "ppo.num_steps=5", code=0)
    assert (finished / "model-step-000004/model.safetensors").read_bytes() == first
    assert (finished / "model/model.safetensors").read_bytes() != first
    assert read_json(finished / "summary.json")["steps"] == 5


def test_best_is_forgotten_when_another_figure_is_asked_for(command, stopped):
    command(f"resume={stopped}", "checkpoint.metric=metrics/words", "ppo.num_steps=3", code=0)
    best = read_json(stopped / "summary.json")["best"]
    assert (best["name"], best["step"]) == ("metrics/words", 3)
