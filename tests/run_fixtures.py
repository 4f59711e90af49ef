"""Fixtures of tests that train: a small world of files, a reference run, the command, faults."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import (
    PLANTED,
    Command,
    app_in_process,
    command_in_process,
    make_world,
    run,
    whole_copy,
    words,
)


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
               HF_TOKEN=PLANTED, WANDB_API_KEY=PLANTED)
    assert done.code == 0, done.err
    (shared_world / "stdout").write_text(done.out)
    return shared_world / "runs/reference"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """``ppocli train`` in this process; its effects on the process are undone afterwards."""
    import torch

    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield command_in_process(capsys)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Command:
    """``ppocli export`` in this process."""
    return app_in_process(capsys, "export")


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Arm faults in this process, as ``PPOCLI_FAULTS`` does in another."""
    from ppocli.storage import faults

    def arm(text: str) -> None:
        monkeypatch.setattr(faults, "point", faults.Point(faults.parse(text)))

    return arm
