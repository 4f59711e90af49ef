"""``model.value.path`` names a PPO run: its value function is where this one starts."""

from pathlib import Path

import pytest
from runs import words
from safetensors.torch import load_file

TRUNK, HEAD = "value_trunk.safetensors", "value_head.safetensors"
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


@pytest.mark.parametrize("kind", [
    ("model.value.kind=model",), *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
        ("model.value.kind=head",),
        ("model.value.kind=branch", "model.value.num_layers_unfrozen=1")))])
def test_a_critic_starts_as_another_run_s(command, world, kind):
    command(*words("run_name=first", *kind, "ppo.num_steps=2"), code=0)
    done = command(*words("run_name=second", *kind, *STILL, "model.value.path=runs/first"), code=0)
    assert "values start as those of" in done.said
    first, second = world / "runs/first", world / "runs/second"
    assert_close(critic_at(second, 1), critic_at(first, 2))
    assert any(value.any() for value in critic_at(first, 2).values())
    # a step that is named, and a critic that has come from a third run
    command(*words("run_name=third", *kind, *STILL,
                        "model.value.path=runs/first/checkpoints/step-000001"), code=0)
    assert_close(critic_at(world / "runs/third", 1), critic_at(first, 1))
    command(*words("run_name=fourth", *kind, *STILL, "model.value.path=runs/third"), code=0)
    assert_close(critic_at(world / "runs/fourth", 1), critic_at(first, 1))


def test_a_run_without_that_critic_is_refused_before_anything_is_loaded(command, world):
    command(*words("run_name=none", "ppo.advantage=rloo", "ppo.n=2", "ppo.num_steps=1"), code=0)
    command(*words("run_name=head", "ppo.num_steps=1"), code=0)
    (world / "notes").mkdir()
    for given, code, told in (
            (("runs/none",), 3, "has no checkpoint with a value function"),
            (("runs/head", "model.value.kind=model"), 3, "its kind is head"),
            (("notes",), 3, "it is no run of PPO"),
            (("elsewhere",), 2, "name a run's folder"),
            (("runs/head/checkpoints/step-000009",), 2, "name a run's folder")):
        path, *more = given
        done = command(*words("run_name=new", f"model.value.path={path}", *more), code=code)
        assert told in done.err
        assert "model.value.path" in done.err
        assert "Traceback" not in done.err
        assert not (world / "runs/new").exists()


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(command, world):
    command(*words("run_name=first", "ppo.num_steps=2"), code=0)
    newest = world / "runs/first/checkpoints/step-000002" / HEAD
    newest.write_bytes(newest.read_bytes()[:-1])
    command(*words("run_name=second", *STILL, "model.value.path=runs/first"), code=0)
    assert_close(critic_at(world / "runs/second", 1), critic_at(world / "runs/first", 1))
