"""A reward model that several processes train is the one that one process trains."""

import pytest
import torch
from helpers import stable_rows
from ranks import close_to
from runs import RM_WORDS, run, write_pairs
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("peft", [(), ("model.peft.type=lora", "model.peft.r=4")])
def test_two_ranks_come_to_what_one_comes_to(world, hardware, peft):
    write_pairs(world)
    run("reward-model", *RM_WORDS, *peft, "run_name=one", cwd=world, code=0)
    run("reward-model", *RM_WORDS, *peft, "run_name=two", f"hardware={hardware}", cwd=world, code=0,
        ACCELERATE_USE_CPU="True")
    assert close_to(stable_rows(world / "runs/one/metrics.jsonl"),
                    stable_rows(world / "runs/two/metrics.jsonl"))
    one, two = (load_file(world / f"runs/{name}/model/model.safetensors")
                for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-5)
