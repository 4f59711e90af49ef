"""Fixtures of tests that train: a small world of files, a reference run, the command, faults."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import write_jsonl
from runs import PLANTED, WORDS, Command, app_in_process, make_world, run, whole_copy, words

if TYPE_CHECKING:
    from ppocli import PPOTrainer


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts and rewards, shared; tests write elsewhere or copy it."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(shared_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the shared model, prompts and rewards in it."""
    folder = tmp_path / "here"
    shutil.copytree(shared_world, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def finished(reference: Path, here: Path) -> Path:
    """A copy of the reference run below ./runs."""
    return whole_copy(reference, here / "runs/mine")


@pytest.fixture(scope="session")
def reference(shared_world: Path) -> Path:
    """The folder of an uninterrupted run whose every piece of state matters, made by the command.

    ``../../stdout`` keeps what the command printed.
    """
    done = run("train", *words("run_name=reference", stateful=True), cwd=shared_world,
               HF_TOKEN=PLANTED, WANDB_API_KEY=PLANTED, code=0)
    (shared_world / "stdout").write_text(done.out)
    return shared_world / "runs/reference"


@pytest.fixture
def app(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Any command, in this process; its effects on the process are undone afterwards."""
    import torch

    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield app_in_process(capsys)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def command(app: Command) -> Command:
    """``ppocli train`` in this process."""
    return partial(app, "train")


@pytest.fixture
def export(app: Command) -> Command:
    return partial(app, "export")


@pytest.fixture
def validate(app: Command) -> Command:
    return partial(app, "validate")


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Arm faults in this process, as ``PPOCLI_FAULTS`` does in another."""
    from ppocli.runs import faults

    def arm(text: str) -> None:
        monkeypatch.setattr(faults, "point", faults.Point(faults.parse(text)))

    return arm


@pytest.fixture(scope="module")
def idle(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PPOTrainer]:
    """A trainer that makes no step."""
    from ppocli import PPOTrainer

    runs = tmp_path_factory.mktemp("idle")
    with PPOTrainer([f"model.path={shared_world / 'lm'}", *WORDS, f"output_dir={runs}"]) as trainer:
        yield trainer


@pytest.fixture(scope="session")
def data_runs(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/sft`` and, trained from its model, ``runs/rm``, each evaluated twice,
    and their data."""
    import ppocli

    folder = tmp_path_factory.mktemp("data_runs")
    texts = [{"prompt": "the film was", "completion": f" {end} ."} for end in ("good", "bad", "ok")]
    pairs = [{"prompt": f"the {thing} was", "chosen": " good .", "rejected": " bad ."}
             for thing in ("film", "plot", "actor")]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        write_jsonl(folder / f"{name}.jsonl", 4 * rows)
    shared = [f"output_dir={folder / 'runs'}", "data.val=0.25", "eval.every_steps=2",
              "hardware.device=cpu"]
    sft = ppocli.sft([*shared, "run_name=sft", f"data.path={folder / 'texts.jsonl'}",
                      "sft.num_updates=2", "sft.mini_batch_size=4", "sft.optimizer.lr=1e-2",
                      "sft.eval_samples=2", "generation.max_new_tokens=4"],
                     model_path=shared_world / "lm")
    ppocli.train_reward_model(
        [*shared, "run_name=rm", f"data.path={folder / 'pairs.jsonl'}",
         "reward_model.num_updates=2", "reward_model.mini_batch_size=4",
         "reward_model.optimizer.lr=1e-2"], model_path=sft.model_dir)
    return folder


@pytest.fixture
def beside_data_runs(data_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy as the current folder."""
    shutil.copytree(data_runs, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"
