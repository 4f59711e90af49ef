"""A loop of one's own on several processes: each has queries of its own, and all make one update."""

from pathlib import Path

import pytest
from helpers import jsonl
from ranks import largest_difference, run_job
from runs import WORDS, make_world

SCRIPT = Path(__file__).with_name("own_loop.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_their_own_queries_make_the_step_of_one_process(tmp_path, world):
    lm = make_world(tmp_path / "world") / "lm"
    words = [f"model.path={lm}", f"prompts.path={lm.parent / 'prompts.jsonl'}", *WORDS,
             "ppo.num_rollouts=5", "ppo.num_steps=3", "ppo.mini_batch_size=3", "ppo.micro_batch_size=2",
             "ppo.kl_controller=adaptive", "reward.scale=running"]
    found = []
    for name, ranks in (("one", 1), ("many", world)):
        words_of = [*words, f"output_dir={tmp_path / name}"]
        found.append(run_job(tmp_path, name, {"words": words_of}, world=ranks, script=SCRIPT))
    for prefix in ("figures/", "weight/"):
        assert largest_difference(*found, prefix) < 1e-6
    rows, others = (jsonl(tmp_path / name / "loop/metrics.jsonl") for name in ("one", "many"))
    assert [row["step"] for row in others] == [1, 2, 3] == [row["step"] for row in rows]
