"""What run.json notes of settings that were changed on a resume."""

import json
from pathlib import Path

import pytest

from ppocli.config.resolved import NEXT_CONFIG_FILE, read_config
from ppocli.config.schema import TrainConfig
from ppocli.runs.record import Change, accept_settings, read_changes
from ppocli.storage.run_folder import write_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_config(TrainConfig(), tmp_path / "config.yaml")
    (tmp_path / "run.json").write_text('{"run_id": "abc"}')
    return tmp_path


def ask(run: Path, vf_coef: float) -> None:
    config = TrainConfig()
    config.ppo.vf_coef = vf_coef
    write_config(config, run / NEXT_CONFIG_FILE)


def test_changes_are_noted_beside_the_identity(run):
    default = f"{TrainConfig().ppo.vf_coef:g}"
    for value, step in ((0.5, 2), (0.25, 4)):
        ask(run, value)
        accept_settings(run, step)
        assert read_config(run / "config.yaml").ppo.vf_coef == value
    changes = [Change(2, "ppo.vf_coef", default, "0.5"), Change(4, "ppo.vf_coef", "0.5", "0.25")]
    assert read_changes(run) == changes
    assert json.loads((run / "run.json").read_text())["run_id"] == "abc"
    accept_settings(run, 3)
    assert [change.step for change in read_changes(run)] == [2, 3], "it went back behind one"
    accept_settings(run, None)
    assert read_changes(run) == [], "it has started afresh"


def test_an_attempt_that_was_killed_is_noted_once(run):
    ask(run, 0.5)
    before = (run / "config.yaml").read_bytes()
    accept_settings(run, 2)
    (run / "config.yaml").write_bytes(before)
    ask(run, 0.5)
    accept_settings(run, 2)
    assert len(read_changes(run)) == 1


@pytest.mark.parametrize("text", [
    "", "{", "[]", '{"changes": 1}', '{"changes": [1, {"step": "x"}]}', "[" * 100_000])
def test_a_file_that_tells_none_has_none(run, text):
    (run / "run.json").write_text(text)
    assert read_changes(run) == []
    ask(run, 0.5)
    accept_settings(run, 2)
    assert (run / "run.json").read_text() == text, "what is damaged stays as it is"
