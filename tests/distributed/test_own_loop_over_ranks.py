"""A loop of one's own on several processes: each has its own queries, and all make one update."""

from pathlib import Path

import pytest
import torch
from helpers import jsonl
from ranks import largest_difference, run_job
from runs import WORDS, make_world

SCRIPT = Path(__file__).with_name("own_loop.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_ranks_with_queries_of_their_own_make_the_step_of_one_process(tmp_path):
    lm = make_world(tmp_path / "world") / "lm"
    words = [f"model.path={lm}", f"prompts.path={lm.parent / 'prompts.jsonl'}", *WORDS,
             "ppo.num_rollouts=5", "ppo.num_steps=3", "ppo.mini_batch_size=3",
             "ppo.micro_batch_size=2", "ppo.kl_controller=adaptive", "reward.scale=running",
             "ppo.optimizer.name=sgd", "ppo.optimizer.lr=1e-2", "ppo.step_kl=null"]
    one, many = (run_job(
        tmp_path, name, {"words": [*words, f"output_dir={tmp_path / name}"]}, world=world,
        script=SCRIPT) for name, world in (("one", 1), ("many", 2)))
    for name in ("own", "dealt", "given"):
        torch.testing.assert_close(many[f"figures/{name}"], one[f"figures/{name}"], rtol=1e-6,
                                   atol=1e-6)
    assert largest_difference(one, many, "weight/") < 1e-6
    rows = jsonl(tmp_path / "many/loop/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]  # of rank 0 alone
