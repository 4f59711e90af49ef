"""Words of the command line: flags told from overrides, text kept text, near names, no secrets; and
a configuration as words, which composes to itself again, and as ``config.yaml``."""

import itertools
import json
from operator import attrgetter
from pathlib import Path

import pytest
from helpers import checked, mostly_slow, refused
from hydra.core.override_parser.overrides_parser import OverridesParser

from ppocli.builtin.names import recipe_files
from ppocli.config.command_words import read_setting, read_words
from ppocli.config.compose import compose, print_composition
from ppocli.config.config_yaml import (
    config_differences,
    config_text,
    parsed,
    quoted,
    read_config,
    unquoted,
    with_absolute_paths,
    with_values,
    words_for,
)
from ppocli.config.keys import schema_keys
from ppocli.config.resume_policy import classify_change
from ppocli.config.schema import TrainConfig
from ppocli.config.secrets import looks_secret
from ppocli.errors import CheckpointError, ConfigError
from ppocli.launch.open_run_folder import changes_on_resume


@pytest.mark.parametrize("text", [
    "with space", "it's", "a\\'b", "C:\\x\\", "x (1)", "a=b", "#1", "Q, {prompt}", "1e5", "true",
    "Review: {prompt}\nA:", "/a/[b]/c", "007"])
def test_text_for_a_text_key_reaches_the_config_unchanged(text):
    word = read_setting(f"model.path={text}")
    assert OverridesParser.create().parse_override(str(word)).value() == text


@pytest.mark.parametrize(("word", "expected"), [
    ("recipe=x", "+recipe=x"), ("+recipe=x", "+recipe=x"), ("seed=3", "seed=3"),
    ("ppo.lam=1e-1", "ppo.lam=1e-1"), ("model.revision=null", "model.revision=null"),
    ("reward.kwargs.n=3", "reward.kwargs.n=3"), ("ppo=null", "~ppo"),
    ("prompts.items=[a,b]", "prompts.items=[a,b]"), ("~ppo", "~ppo"), ("resume=x ü", "resume=x ü")])
def test_other_words_are_left_or_rewritten(word, expected):
    assert str(read_setting(word)) == expected


@pytest.mark.parametrize(("words", "said"), [
    (["--multirn"], "did you mean --multirun?"),
    (["--seed", "3"], "seed=3"),
    (["--cfg", "jb"], "must be one of job, deepspeed"),
    (["--config-dir", "nowhere"], "config folder nowhere does not exist")])
def test_wrong_flags_say_what_is_right(words, said):
    with refused(ConfigError, said):
        read_words(words)


TEXTS = ["", "plain", "o'b", "a\\", "a\\'b", "\\\\''\\", "it's \"it\"\\\\", "a\\\\\n",
         "pr, =${y}.x", "\\${a}", "\\\\${a:b}'", "${a}\\"]


def test_quotes_are_undone():
    parser = OverridesParser.create()
    for text in (*TEXTS, *("".join(parts) for parts in itertools.product("'\\a\"", repeat=4))):
        assert unquoted(quoted(text)) == text
        assert str(parser.parse_override(f"x={quoted(text)}").value()) == text


SECRET = "xyzzy-do-not-show-me"


@pytest.mark.parametrize("key", [
    "hf_token", "reward.kwargs.apiKey", "password", "wandb_key", "+reward.kwargs.authToken"])
def test_keys_named_like_secrets_are_refused_unshown(key):
    with refused(ConfigError, "looks like a secret", key.lstrip("+")) as error:
        read_words([f"{key}={SECRET}"])
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("word", [
    "run_name='${oc.env:HF_TOKEN,none}'", "prompts.items=['${ oc.env :HF_TOKEN}']"])
def test_environment_variables_are_not_read(word, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(ConfigError) as error:
        print_composition(read_words(["+recipe=quickstart", word, "--cfg", "job"]))
    assert SECRET not in str(error.value) + capsys.readouterr().out


def test_a_token_as_a_value_is_refused():
    token = "hf_" + "a1" * 16
    with pytest.raises(ConfigError) as error:
        checked("+recipe=quickstart", f"model.path={token}")
    assert token not in str(error.value)


@pytest.mark.parametrize("text", [
    "run_name: ${{oc.env:HF_TOKEN}}  # {}\n",
    "reward:\n  fns:\n    a:\n      kwargs: {{token: {}}}\n"])
def test_files_are_read_for_secrets_too(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(text.format(SECRET))
    with refused(ConfigError, "recipes/mine.yaml") as error:
        print_composition(read_words(["+recipe=mine", "--cfg", "job"]))
    assert SECRET not in str(error.value) + capsys.readouterr().out


def test_keys_of_the_schema_and_common_arguments_are_no_secrets():
    assert not [name for name in schema_keys() if looks_secret(name)]
    for name in ("reward.kwargs.keyword", "reward.kwargs.max_tokens", "reward.kwargs.key"):
        assert not looks_secret(name), name


# Configurations as words --------------------------------------------------------------------------

BASE = ["model.path=builtin:reviews", "prompts.path=builtin:reviews-prompts", "ppo.num_steps=2"]


def comes_back(*words):
    config = checked(*words).config
    assert config_differences(config, checked(*words_for(config)).config) == []


@pytest.mark.parametrize("recipe", mostly_slow(
    sorted(recipe_files()), quick=lambda name: name == "hh_sft"))
def test_a_recipe_comes_back(recipe):
    comes_back(f"+recipe={recipe}")


@pytest.mark.parametrize("words", [
    ["reward.fns.one={fn:length,kwargs:{target:3},weight:0.5}", "reward.fns.two={fn:keyword}"],
    ["reward.fn=a.b:c", "reward.kwargs.deep={a:{b:[1,2.5,null,true,'no']}}",
     "reward.kwargs.text='12'", "reward.kwargs.other='it''s: {odd}, [x]'",
     "generation.stop_sequences=['\\n\\n','a,b','it=is','\"']", "model.revision=12e4567",
     "prompts.template='Q: {prompt}\\nA:'", "ppo.optimizer.lr=1e-05", "ppo.max_grad_norm=null",
     "run_name=null", "model.trust_remote_code=false"]])
def test_values_of_every_kind_come_back(words):
    comes_back(*BASE, *words)


# Configurations in config.yaml, and changed -------------------------------------------------------

def composed(*words: str) -> TrainConfig:
    return checked("+recipe=quickstart", *words).config


@pytest.mark.parametrize(("text", "said"), [
    (b"", "holds no configuration"), (b"- 1\n", "holds no configuration"),
    (b"seed: [\n", "can't be read"), (b"seed: x\n", "seed"), (b"ppo:\n  lamm: 1\n", "ppo.lamm"),
    (b"\x00", "can't be read"), (b"run_name: \xff\xfe\n", "can't be read"),
    pytest.param(b"a: " + b"[" * 2000, "can't be read", id="deep")])
def test_damaged_files_are_refused(tmp_path, text, said):
    (tmp_path / "config.yaml").write_bytes(text)
    with refused(CheckpointError, said, str(tmp_path / "config.yaml")):
        read_config(tmp_path / "config.yaml")


def test_user_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lm").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "p.jsonl").write_text("{}")
    config = composed("model.path=lm", "model.tokenizer_path=gpt2", "prompts.path=data/p.jsonl",
                      "prompts.eval.path=./none.txt", "reward.fn=my/rewards.py:score",
                      "reward.kwargs.model=data/p.jsonl", "reward.kwargs.style=a/b",
                      "reward.metric_fn=pkg.mod:f", "task.fn=my/task.py:Mine",
                      "rollout.engine=my/sampler.py:Slow")
    config.rollout.python, config.env.tools = "./venv/bin/python", ["tools.py:look"]
    config.env.kwargs = {"files": ["./a.txt", "and/or", 1], "deep": [{"in": {"it": "~/b"}}]}
    result = with_absolute_paths(config)
    wanted = {
        "model.path": f"{tmp_path}/lm", "model.tokenizer_path": "gpt2",
        "prompts.path": f"{tmp_path}/data/p.jsonl", "prompts.eval.path": f"{tmp_path}/none.txt",
        "output_dir": f"{tmp_path}/runs", "reward.fn": f"{tmp_path}/my/rewards.py:score",
        "reward.metric_fn": "pkg.mod:f", "task.fn": f"{tmp_path}/my/task.py:Mine",
        "rollout.engine": f"{tmp_path}/my/sampler.py:Slow",
        "rollout.python": f"{tmp_path}/venv/bin/python", "env.tools": [f"{tmp_path}/tools.py:look"],
        "env.kwargs": {"files": [f"{tmp_path}/a.txt", "and/or", 1],
                       "deep": [{"in": {"it": str(Path.home() / "b")}}]}}
    assert {key: attrgetter(key)(result) for key in wanted} == wanted
    assert result.reward.kwargs.items() >= {
        "model": f"{tmp_path}/data/p.jsonl", "style": "a/b"}.items()
    plain = composed()
    assert with_absolute_paths(plain).model.path == plain.model.path
    assert with_absolute_paths(plain).rollout.engine == plain.rollout.engine


def test_models_in_a_runs_folder_are_found_where_it_is_now(tmp_path):
    """Those that were given as Python objects; the folder was renamed."""
    place = tmp_path / "now/start/model"
    place.mkdir(parents=True)
    started = with_values(composed(), {"model.path": "/then/start/model",
                                       "model.tokenizer_path": "/other/start/tokenizer"})
    text = config_text(started)
    (tmp_path / "now/config.yaml").write_text(text)
    (tmp_path / "now/run.json").write_text(json.dumps({"config": text}))
    now = read_config(tmp_path / "now/config.yaml")
    assert (now.model.path, now.model.tokenizer_path) == (str(place), "/other/start/tokenizer")
    assert changes_on_resume(tmp_path / "now", now) == []
    assert compose(read_words([f"resume={tmp_path}/now"])).config.model.path == str(place)


def test_a_text_that_looks_like_something_else_stays_a_text(tmp_path):
    for text in ("1e3", "12e4567", "-1.5e3", "+1_0E-2", "1.0e+2", ".5e+1", "1:30", "1_000", "null",
                 "0x1f", "${a}", "a ${b} it", r"\\${oc.env:HOME}"):
        given = with_values(TrainConfig(), {"model.revision": text,
                                            "reward.kwargs": {"a": [text, 1e3]}})
        (tmp_path / "config.yaml").write_text(config_text(given))
        assert read_config(tmp_path / "config.yaml") == given


def test_a_resumed_run_has_the_name_and_place_of_its_folder(tmp_path):
    run = tmp_path / "runs/mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config_text(composed()))
    for words in (["run_name=other"], [f"output_dir={tmp_path}"], ["output_dir=else", "seed=1"]):
        with pytest.raises(ConfigError, match="its own folder"):
            compose(read_words([f"resume={run}", *words]))
    compose(read_words([f"resume={run}", "run_name=mine", f"output_dir={tmp_path}/runs/../runs"]))
    compose(read_words([f"resume={run}", "run_name=null"]))


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


@pytest.mark.parametrize(("written", "kl_in", "lam", "baseline"), [
    ("ppo: {n: 4}", "reward", 0.95, False), ("ppo: {advantage: grpo}", "loss", 0.95, True),
    ("ppo: {step_kl: 0.5}", None, 1.0, False),
    ("ppo: {step_kl: 0.5, group_baseline: true}", None, 1.0, True)])
def test_a_run_of_before_keeps_its_defaults(written, kl_in, lam, baseline):
    ppo = parsed(written).ppo
    assert (ppo.kl_in, ppo.lam, ppo.group_baseline) == (kl_in, lam, baseline)
