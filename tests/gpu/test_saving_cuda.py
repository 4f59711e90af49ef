"""What is copied from a GPU for a checkpoint: pinned, whole, and as told."""

import pytest
from sessions import (
    fresh_state,
    optimize,
    rollout_of,
    save_session,
    session_of,
    small_config,
    state_now,
)

from ppocli.estimate.check import estimate
from ppocli.estimate.parts import models_of
from ppocli.tasks.ppo.experience import to_experience, update_moments
from ppocli.tasks.ppo.session import saved_model
from ppocli.tasks.ppo.task import PPOTask
from ppocli.training.background_saving import HostCopies, copied_bytes
from ppocli.training.checkpoint_writing import contents_of, write_contents

pytestmark = pytest.mark.gpu


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("unfrozen", [-1, 1])
def test_a_copy_written_after_more_training_is_the_synchronous_save(tmp_path, unfrozen):
    cfg = small_config(tmp_path, hardware__device="cuda", model__num_layers_unfrozen=unfrozen)
    with session_of(cfg) as session:
        def train(start: int) -> None:
            rollout = rollout_of(session, start=start)
            state = update_moments(fresh_state(session), rollout, cfg)
            optimize(session, to_experience(rollout, state, cfg))

        copies, (once, expected, found) = HostCopies(), (
            tmp_path / name for name in ("once", "expected", "found"))
        for folder in (once, expected, found):
            folder.mkdir()
        train(0)
        contents = contents_of(PPOTask(session), state_now(session))
        size = copied_bytes(contents)
        saved = saved_model(session)
        write_contents(saved, copies.copy(saved, contents, tmp_path), once)
        train(16)
        copy = copies.copy(saved_model(session), contents_of(PPOTask(session), state_now(session)),
                           tmp_path)
        assert all(t.is_pinned() for tensors in copy.files.values() for t in tensors.values())
        save_session(session, expected)
        train(32)
        write_contents(saved_model(session), copy, found)
    assert tree(found) == tree(expected) != tree(once)
    told = estimate(cfg, models_of(cfg), prompt_tokens=8, cuda=True, ranks=1, ranks_on_host=1)
    line, = (line for line in told.lines if line.name == "copy of a checkpoint")
    assert line.device == 0
    assert size == pytest.approx(line.host, rel=0.03)  # counts of steps apart
