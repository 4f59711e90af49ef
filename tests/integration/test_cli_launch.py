"""Run folders and worker processes: who gets which folder, and what a failed start leaves."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import checked, refused

from ppocli.config.compose import Checked, Composed
from ppocli.config.config_yaml import read_config
from ppocli.config.schema import TrainConfig
from ppocli.errors import CheckpointError, DiskError, RewardError
from ppocli.launch.launch import Caller, launch
from ppocli.launch.local_ranks import RunOutcome
from ppocli.launch.open_run_folder import open_folder
from ppocli.runs.run_folder import lock, write_config

BAD_REWARD = ["+recipe=quickstart", "reward.fn=../fails.py:score", "reward.kwargs={}", "~reward"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "fails.py").write_text("import no_such_module\n\ndef score(): ...\n")


def config(*words: str) -> TrainConfig:
    return checked(*BAD_REWARD, *words).config


def typed(chosen: TrainConfig, run: Path | None = None) -> Checked:
    """As if its words had named the reward."""
    return Checked(Composed(chosen, resume_from=run, typed=frozenset({str(chosen.reward.fn)})))


def begin(chosen: TrainConfig, run: Path | None = None, **caller) -> RunOutcome:
    return launch(typed(chosen, run), Caller(**caller))


def run_folder(name: str, *words: str) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    write_config(replace(config(*words), run_name=name, output_dir=str(folder.parent.absolute())),
                 folder / "config.yaml")
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    return folder


def test_a_bad_reward_leaves_nothing():
    with refused(RewardError, "no_such_module"):
        begin(config("output_dir=deep/er"))
    assert os.listdir() == []


def test_a_folder_that_holds_something_is_refused_with_both_remedies():
    Path("runs/x").mkdir(parents=True)
    with pytest.raises(RewardError):  # an empty one is taken
        begin(config("run_name=x"))
    Path("runs/x").mkdir(parents=True, exist_ok=True)
    Path("runs/x/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError) as error:
        begin(config("run_name=x"))
    assert "ppocli resume" not in str(error.value)  # it is no run
    assert "another run_name" in str(error.value)
    assert os.listdir("runs/x") == ["notes.txt"]


def test_runs_of_one_second_get_folders_of_their_own():
    """The names are taken before any worker starts."""
    seen: list[Path] = []

    def take() -> None:
        with open_folder(typed(chosen), None, lambda text: None) as opened:
            seen.append(opened.run_dir)
            (opened.run_dir / "metrics.jsonl").touch()

    chosen = config()
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 4
    assert all(read_config(folder / "config.yaml").run_name == folder.name for folder in seen)


@pytest.mark.parametrize("words", [["output_dir=file/below"], ["run_name=" + "n" * 300]])
def test_places_that_cannot_be_written(words):
    Path("file").write_text("x")
    with pytest.raises(DiskError) as error:
        begin(config(*words))
    assert error.value.exit_code == 6
    assert sorted(os.listdir()) == ["file"]


def test_auto_starts_afresh_or_goes_on():
    said: list[str] = []
    with pytest.raises(RewardError):
        begin(config("resume=auto", "run_name=r"), say=said.append)
    assert said == [f"resume=auto: there is no run in {Path('runs/r').absolute()} yet, "
                    "starting afresh",
                    f"{Path('runs/r').absolute()}: starting from builtin:reviews"]
    run_folder("r")
    with refused(CheckpointError, "seed: 0 -> 8"):
        begin(config("resume=auto", "run_name=r", "seed=8"))


def test_the_config_of_a_running_run_is_not_changed():
    run = run_folder("r")
    changed = read_config(run / "config.yaml")
    changed.ppo.total_episodes = 9
    with lock(run), refused(CheckpointError, str(os.getpid())):
        begin(changed, run)
    assert read_config(run / "config.yaml").ppo.total_episodes != 9
