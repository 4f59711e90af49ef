"""``model.value.path`` names a PPO run: its value function is where this one starts."""

from pathlib import Path

import pytest
from runs import words
from safetensors.torch import load_file

TRUNK, HEAD = "value_trunk.safetensors", "value_head.safetensors"
ADAPTER = ("model.value.kind=adapter", "model.peft.type=lora", "model.peft.r=4")
STILL = ("ppo.optimizer.lr=1e-12", "ppo.num_steps=1")


def critic_at(run_dir: Path, step: int) -> dict:
    """Its tensors in a checkpoint."""
    return {f"{name}/{key}": value for name in (HEAD, TRUNK)
            if (path := run_dir / f"checkpoints/step-{step:06d}" / name).is_file()
            for key, value in load_file(path).items()}


def assert_close(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert float((value - other[key]).abs().max()) < 1e-9, key


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    ("model.value.kind=model",), ("model.value.kind=head",),
    ("model.value.kind=branch", "model.value.num_layers_unfrozen=1"), ADAPTER])
def test_a_critic_starts_as_another_run_s(command, app, world, kind):
    command(*words("run_name=first", *kind, "ppo.num_steps=2"), code=0)
    done = command(*words("run_name=second", *kind, *STILL, "model.value.path=runs/first"), code=0)
    assert "values start as those of" in done.said
    first, second = world / "runs/first", world / "runs/second"
    assert_close(critic_at(second, 1), critic_at(first, 2))
    assert any(value.any() for value in critic_at(first, 2).values())
    if kind == ("model.value.kind=model",):  # a damaged checkpoint gives way to the one before it
        newest = first / "checkpoints/step-000002" / HEAD
        newest.write_bytes(newest.read_bytes()[:-1])
        command(*words("run_name=third", *kind, *STILL, "model.value.path=runs/first"), code=0)
        assert_close(critic_at(world / "runs/third", 1), critic_at(first, 1))

    if kind == ADAPTER:
        app("export", "runs/first", "--adapter", "-o", "out", code=0)
        for name, path in ("third", "out"), ("fourth", "out/value"):
            command(*words(f"run_name={name}", *kind, *STILL, f"model.value.path={path}"), code=0)
            assert_close(critic_at(world / "runs" / name, 1), critic_at(first, 2))
        done = command(*words("run_name=fifth", *kind, "model.peft.lora_alpha=3",
                              "model.value.path=out"), code=5)
        assert "the policy's 3 on" in done.err


def test_a_run_without_that_critic_is_refused_before_anything_is_loaded(command, world, reference):
    (world / "notes").mkdir()
    for given, code, said in (
            ((str(reference), "model.value.kind=model"), 3, "its kind is head"),
            (("notes",), 3, "it is no run of PPO"), (("elsewhere",), 2, "name a run's folder")):
        path, *more = given
        done = command(*words("run_name=new", f"model.value.path={path}", *more), code=code)
        assert said in done.err
        assert "model.value.path" in done.err
        assert not (world / "runs/new").exists()
