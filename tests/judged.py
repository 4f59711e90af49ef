"""Evaluations for tests: a run with two rewards and a metric, the command, and its results."""

from functools import partial
from pathlib import Path

import pytest
from helpers import read_json
from runs import Command, whole_copy, words

RUN = "runs/trained"
NAME = "step-000004"
BEGUN = ["--against", "base", "--name", "x"]
"""an evaluation of two models: 16 samples each, in chunks of 5"""


@pytest.fixture(scope="session")
def judged_run(shared_world: Path) -> Path:
    """The folder of a finished run with two rewards and a metric, apart from a Hub and a GPU."""
    from ppocli.cli.output import code_of
    from ppocli.cli.train import run_words

    given = [word for word in words() if not word.startswith("reward.fn=")]
    given = [f"{word.partition('=')[0]}={shared_world / word.partition('=')[2]}"
             if word.startswith(("model.path", "prompts.path")) else word for word in given]
    rewards = shared_world / "rewards.py"
    code = code_of(lambda: run_words([
        *given, f"reward.fns.good.fn={rewards}:plain", "reward.fns.short.fn=length",
        "reward.fns.short.kwargs.target=4", "reward.fns.short.weight=0.5",
        f"reward.metric_fn={rewards}:measure", "prompts.eval.limit=8", "prompts.eval.repeat=2",
        "run_name=trained", f"output_dir={shared_world / 'made'}"]))
    assert code == 0
    return shared_world / "made/trained"


@pytest.fixture
def place(judged_run: Path, world: Path) -> Path:
    """The current folder, with a copy of the run in it."""
    (world / "runs").mkdir()
    whole_copy(judged_run, world / RUN)
    return world


@pytest.fixture(scope="session")
def uninterrupted(judged_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of :data:`BEGUN`."""
    import ppocli

    return ppocli.evaluate(judged_run, against="base", name="x",
                           output=tmp_path_factory.mktemp("whole")).folder


@pytest.fixture
def evaluate(app: Command) -> Command:
    return partial(app, "eval")


def result(folder: Path) -> dict:
    """What an evaluation came to."""
    return read_json(folder / "eval.json")
