"""What kind of model a run trains makes no difference to how exactly it goes on."""

from __future__ import annotations

import pytest
from runs import assert_equal_runs, copied, resumed, words

CRITIC = "model.value.kind={} model.value.num_layers_unfrozen=1"
KINDS = {"branch": CRITIC.format("branch"), "model": CRITIC.format("model"),
         "shared": "model.num_layers_unfrozen=1"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_resumes_exactly(kind, command, world):
    done = command(*words("run_name=straight", "model.reference.kind=auto", *KINDS[kind].split()))
    assert done.code == 0, done.said
    stopped = copied(world / "runs/straight", world / "runs/stopped", 1)
    resumed(stopped)
    assert_equal_runs(world / "runs/straight", stopped)
