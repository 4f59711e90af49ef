"""The estimate of a GPT-2 of 124 million parameters against what its training really takes."""

import ctypes
import gc
import os

import pytest
from helpers import save_lm, write_prompts
from sessions import (
    estimate_of,
    fresh_state,
    idle_context,
    optimize,
    rollout_of,
    session_of,
    set_keys,
    small_config,
)

from ppocli.config.schema import TrainConfig
from ppocli.estimate.check import estimate
from ppocli.estimate.parts import models_of
from ppocli.parallel.backend import open_ranks
from ppocli.parallel.host_memory import resident_mib
from ppocli.parallel.stop import StopFlag
from ppocli.tasks import build_task
from ppocli.tasks.ppo.step import to_experience
from ppocli.tasks.supervised import pass_tokens
from ppocli.training import optimize as phase
from ppocli.training.loop import initial_state
from ppocli.training.task import PythonObjects, TaskSetup

PEAK = "/proc/self/clear_refs"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(
    not os.access(PEAK, os.W_OK), reason="the system doesn't forget a process's peak")]


def peak_mib() -> float:
    """The peak of this process since it was last forgotten."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def test_updates_of_a_real_training_take_what_was_told(tmp_path):
    save_lm(tmp_path / "lm", gain=1.0, n_layer=12, n_embd=768, n_head=12, n_positions=1024,
            vocab_size=50257)
    write_prompts(tmp_path / "prompts.jsonl", ["the film plot actor was is not very"] * 8)
    cfg = small_config(tmp_path, ppo__num_rollouts=8, ppo__mini_batch_size=4, ppo__ppo_epochs=1,
                       generation__max_new_tokens=120, prompts__eval__limit=2,
                       hardware__num_threads=1)
    found = estimate_of(cfg, 8)
    before = resident_mib(os.getpid())
    with session_of(cfg) as session:
        rollout = rollout_of(session)
        assert int(rollout.response_mask.sum()) == 8 * 120  # nothing ended early
        with open(PEAK, "w", encoding="utf-8") as forget:
            forget.write("5")
        optimize(session, to_experience(rollout, fresh_state(session), cfg))
        grown = peak_mib() - before
    assert found.sums.update / 2**20 == pytest.approx(grown, rel=0.15)


@pytest.mark.parametrize("longest", [120, 40])
def test_updates_on_a_data_set_take_what_was_told(tmp_path, longest):
    """Examples of unlike lengths, packed, on a model of 45 million parameters."""
    save_lm(tmp_path / "lm", gain=1.0, n_layer=6, n_embd=512, n_head=8, n_positions=256,
            vocab_size=50257)
    rows = [{"prompt": "the film", "completion": " was very" * (longest // 2 - i % 4 * 4)}
            for i in range(16)]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have freed would be used again
    cfg = set_keys(TrainConfig(), {
        "model.path": str(tmp_path / "lm"), "task.fn": "sft", "hardware.device": "cpu",
        "sft.mini_batch_size": 8, "sft.micro_batch_size": 4, "hardware.num_threads": 1,
        "hardware.gemm": "default"})
    before = resident_mib(os.getpid())
    with open_ranks(cfg) as backend:
        task = build_task(TaskSetup(cfg, backend, PythonObjects(data=rows)))
        prompt, new = pass_tokens(cfg, task.train, 1)
        found = estimate(cfg, models_of(cfg), prompt_tokens=prompt, new_tokens=new, cuda=False,
                         ranks=1, ranks_on_host=1)
        state = initial_state(task)
        grown = []
        for _ in range(2):  # the first makes the optimizer's state
            with open(PEAK, "w", encoding="utf-8") as forget:
                forget.write("5")
            plan = task.plan(state, task.collect(state, idle_context()))
            phase.optimize(task, plan, state, StopFlag())
            grown.append(peak_mib() - before)
    assert found.sums.update / 2**20 == pytest.approx(grown[1], rel=0.2)
