"""A run that mixes supervised examples into its updates (``ppo.ptx``), by the command."""


import pytest
from helpers import stable_rows, write_jsonl
from runs import assert_equal_runs, copied, make_world, resumed, run, words

PTX = ("ppo.ptx.coef=0.5", "ppo.ptx.data.path=texts.jsonl", "ppo.ptx.mini_batch_size=2",
       "ppo.num_steps=2", "generation.max_new_tokens=5")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps with 2 examples in each of 4 updates a step, out of 5."""
    world = make_world(tmp_path_factory.mktemp("world"))
    write_jsonl(world / "texts.jsonl", (
        {"prompt": "the film", "completion": " good" * n} for n in range(1, 6)))
    run("train", *words(*PTX, "run_name=r"), cwd=world, code=0)
    return world / "runs/r"


@pytest.mark.slow
def test_resuming_at_a_step_equals_the_straight_run(trained, tmp_path):
    assert all(row["loss/ptx"] > 0 for row in stable_rows(trained / "metrics.jsonl") if row["step"])
    stopped = copied(trained, tmp_path / "run", 1)
    resumed(stopped)
    assert_equal_runs(trained, stopped)


@pytest.mark.slow
def test_it_is_checked_beforehand_and_again_on_resume(trained, tmp_path, command, validate,
                                                                monkeypatch):
    world = trained.parents[1]
    monkeypatch.chdir(world)
    told = validate(*words(*PTX), code=0).out
    assert "ppo.ptx.data:\nline 1 of texts.jsonl:\n" in told
    assert "5 examples, 30 tokens, 20 of them trained on" in told
    # the weight may change, the examples may not
    stopped = copied(trained, tmp_path / "run", 1)
    copy = tmp_path / "texts.jsonl"
    copy.write_text((world / "texts.jsonl").read_text().replace("film", "plot"))
    refused = command(f"resume={stopped}", f"ppo.ptx.data.path={copy}", code=5).err
    assert "ppo.ptx.data.path: " in refused
    command(f"resume={stopped}", "ppo.ptx.coef=0", code=0)
    assert "loss/ptx" not in stable_rows(stopped / "metrics.jsonl")[-1]
