"""Words of the command line: flags told from overrides, text kept text, near names."""

from __future__ import annotations

import itertools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ppocli.config.keys import key_for, schema_keys, schema_sections
from ppocli.config.words import literal, quoted, read_setting, read_words, unquoted
from ppocli.errors import ConfigError
from ppocli.text import did_you_mean, nearest


@pytest.mark.parametrize("text", [
    "plain", "with space", "ü/x", "it's", "ends\\", "a\\'b", "C:\\x\\", "x (1)", "a=b", "~/x", "#1",
    "Q, {prompt}", "{prompt}", "123", "1e5", "true", "inf", "Review: {prompt}\nA:", "/a/[b]/c",
    "8e77653", "007"])
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


def test_flags_between_overrides_are_put_last():
    read = read_words(["seed=1", "--cfg", "job", "ppo.lam=1", "-p", "ppo", "~ppo"])
    assert read.argv() == ["seed=1", "ppo.lam=1", "~ppo", "--cfg", "job", "--package", "ppo"]
    assert read.only_prints
    assert not read.is_sweep


def test_sweeps_are_seen():
    assert read_words(["-m", "seed=1,2"]).is_sweep
    assert read_words(["hydra.mode=MULTIRUN"]).is_sweep


def test_info_takes_its_part_only_when_it_is_one():
    assert read_words(["--info", "searchpath"]).flag("--info") == "searchpath"
    read = read_words(["--info", "seed=1"])
    assert (read.flag("--info"), read.overrides) == ("", ["seed=1"])


def test_config_dirs_come_from_the_flag_then_the_environment(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    read = read_words(["-cd", str(tmp_path / "a")], str(tmp_path / "b"))
    assert read.config_dirs == (tmp_path / "a", tmp_path / "b")
    assert read.argv() == []


@pytest.mark.parametrize(("words", "said"), [
    (["--multirn"], "did you mean --multirun?"),
    (["--resum=x"], "resume=..."),
    (["--seed", "3"], "seed=..."),
    (["--cfg"], "--cfg needs a value"),
    (["--cfg", "jb"], "must be one of job, hydra, all, deepspeed; did you mean job?"),
    (["--cfg", "job", "-m"], "--cfg and --multirun exclude each other"),
    (["--resolve"], "--resolve belongs to --cfg"),
    (["-p", "ppo"], "--package belongs to --cfg"),
    (["--cfg", "deepspeed", "--resolve"], "--resolve belongs to --cfg"),
    (["-m=3"], "--multirun takes no value"),
    (["--config-dir", "nowhere"], "config folder nowhere does not exist"),
])
def test_wrong_flags_say_what_is_right(words, said):
    with pytest.raises(ConfigError) as error:
        read_words(words)
    assert said in str(error.value)


@pytest.mark.parametrize(("name", "best"), [
    ("lr", "ppo.optimizer.lr"), ("ppo.lr", "ppo.optimizer.lr"), ("ppo.lrr", "ppo.optimizer.lr"),
    ("ppo.clip", "ppo.cliprange"), ("model.pth", "model.path"), ("promts.path", "prompts.path"),
    ("seeed", "seed"), ("ppo.kl_coef", "ppo.init_kl_coef"), ("ppo.kl_est", "ppo.kl_estimator"),
    ("generation.maxnewtokens", "generation.max_new_tokens"), ("modl", "model")])
def test_the_nearest_key_is_named_first(name, best):
    assert nearest(name, [*schema_keys(), *schema_sections()])[0] == best


@pytest.mark.parametrize("name", ["ppo.foo", "xyz", "reward.qqq"])
def test_nothing_near_is_not_guessed(name):
    assert did_you_mean(name, list(schema_keys())) == ""


def test_free_mappings_take_any_key():
    key = key_for("reward.kwargs.anything.below")
    assert key is not None
    assert key.name == "reward.kwargs"
    assert key_for("ppo.anything") is None


def test_unquoted_takes_one_pair():
    assert [unquoted(t) for t in ("'a'", '"a"', "a", "'", "'a\"")] == ["a", "a", "a", "'", "'a\""]


TEXTS = ["", "plain", "o'b", "a\\", "a\\'b", "\\\\''\\", "it's \"it\"\\\\", "a\\\\\n",
         "pr, =${y}.x", "\\${a}", "\\\\${a:b}'", "${a}\\"]


@pytest.mark.parametrize("text", [*TEXTS, *("".join(parts) for parts in itertools.product(
    "'\\a\"", repeat=4))])
def test_quotes_are_undone(text):
    assert unquoted(quoted(text)) == text
    parsed = OverridesParser.create().parse_override(f"x={quoted(text)}")
    assert str(parsed.value()) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_literal_text_has_no_interpolation(text):
    parsed = OverridesParser.create().parse_override(f"x={literal(text)}")
    assert OmegaConf.create({"x": parsed.value()}).x == text
