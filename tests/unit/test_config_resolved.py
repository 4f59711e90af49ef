"""A configuration that is written down as ``config.yaml`` comes back, and changed."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from helpers import checked

from ppocli.config.keys import schema_keys
from ppocli.config.resolved import (
    NEXT_CONFIG_FILE,
    classify_change,
    config_differences,
    read_config,
    with_absolute_paths,
)
from ppocli.config.schema import TrainConfig
from ppocli.errors import CheckpointError
from ppocli.runs.record import Change, accept_settings, read_changes
from ppocli.storage.run_folder import write_config


def composed(*words: str) -> TrainConfig:
    return checked("+recipe=quickstart", *words).config


def test_what_is_written_is_read_back_equal(tmp_path):
    config = composed("reward.kwargs.deep={a:[1,{b:null}]}", "prompts.template='Ä: {prompt}\nB'",
                      "generation.stop_sequences=['\n','a b']", "ppo.optimizer.lr=1e-7")
    write_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_keys_keep_the_order_of_the_schema(tmp_path):
    write_config(composed(), tmp_path / "config.yaml")
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert list(written) == list(asdict(TrainConfig()))
    assert list(written["ppo"]) == list(asdict(TrainConfig())["ppo"])


@pytest.mark.parametrize(("text", "said"), [
    ("", "holds no configuration"), ("- 1\n", "holds no configuration"),
    ("seed: [\n", "can't be read"), ("seed: x\n", "seed"), ("ppo:\n  lamm: 1\n", "ppo.lamm"),
    ("\x00", "can't be read")])
def test_damaged_files_are_refused(tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError) as error:
        read_config(tmp_path / "config.yaml")
    assert said in str(error.value)
    assert str(tmp_path / "config.yaml") in str(error.value)


def test_not_utf8_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"run_name: \xff\xfe\n")
    with pytest.raises(CheckpointError):
        read_config(tmp_path / "config.yaml")


def test_user_paths_become_absolute(tmp_path):
    (tmp_path / "lm").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "p.jsonl").write_text("{}")
    config = composed("model.path=lm", "model.tokenizer_path=gpt2", "prompts.path=data/p.jsonl",
                      "prompts.eval.path=./none.txt", "reward.fn=my/rewards.py:score",
                      "reward.kwargs.model=data/p.jsonl", "reward.kwargs.style=a/b",
                      "reward.metric_fn=pkg.mod:f")
    result = with_absolute_paths(config, tmp_path)
    assert result.model.path == str(tmp_path / "lm")
    assert result.model.tokenizer_path == "gpt2"
    assert result.prompts.path == str(tmp_path / "data" / "p.jsonl")
    assert result.prompts.eval.path == str(tmp_path / "none.txt")
    assert result.output_dir == str(tmp_path / "runs")
    assert result.reward.fn == f"{tmp_path}/my/rewards.py:score"
    assert result.reward.metric_fn == "pkg.mod:f"
    assert result.reward.kwargs["model"] == str(tmp_path / "data" / "p.jsonl")
    assert result.reward.kwargs["style"] == "a/b"
    assert composed().model.path == with_absolute_paths(composed(), tmp_path).model.path


def test_differences_are_listed_key_by_key():
    old = composed()
    new = composed("seed=3", "ppo.optimizer.lr=1e-6", "reward.kwargs.label=NEGATIVE",
                   "reward.kwargs.batch_size=3")
    new = replace(new, run_name="other", output_dir="elsewhere", resume="auto")
    assert config_differences(old, new) == [
        ("seed", 0, 3), ("reward.kwargs.label", "POSITIVE", "NEGATIVE"),
        ("ppo.optimizer.lr", old.ppo.optimizer.lr, 1e-6), ("reward.kwargs.batch_size", None, 3)]
    assert config_differences(old, old) == []


def test_an_emptied_mapping_shows_its_keys():
    old = composed()
    new = replace(old, reward=replace(old.reward, kwargs={}))
    assert [key for key, _, _ in config_differences(old, new)] == [
        "reward.kwargs.model", "reward.kwargs.label"]


def test_changes_are_classed():
    expected = {
        "harmless": ["ppo.total_episodes", "ppo.num_steps", "eval.every_steps", "run_name",
                     "checkpoint.keep_last", "tracking.log_rollouts", "ppo.micro_batch_size"],
        "refused": ["model.path", "model.tokenizer_path", "model.num_layers_unfrozen", "seed",
                    "ppo.optimizer.name", "hardware.precision", "prompts.path",
                    "prompts.eval.path"],
        "accepted": ["ppo.optimizer.lr", "ppo.init_kl_coef", "generation.temperature",
                     "reward.fn", "reward.kwargs.x", "hardware.device"]}
    for kind, names in expected.items():
        assert {name: classify_change(name) for name in names} == dict.fromkeys(names, kind)
    for name in schema_keys():
        assert classify_change(name) in expected


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
