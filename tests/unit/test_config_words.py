"""Words of the command line: flags told from overrides, text kept text, near names, no secrets; and
a configuration as words, which composes to itself again."""

import itertools
import shlex
from dataclasses import replace

import pytest
from helpers import checked
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ppocli.builtin.names import recipe_files
from ppocli.config.compose import print_composition
from ppocli.config.keys import key_for, schema_keys, schema_sections
from ppocli.config.resolved import (
    config_differences,
    literal,
    quoted,
    training_command,
    unquoted,
    words_for,
)
from ppocli.config.secrets import looks_secret
from ppocli.config.words import read_setting, read_words
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


def test_config_dirs_come_from_the_flag_then_the_environment(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setenv("PPOCLI_CONFIG_DIR", str(tmp_path / "b"))
    read = read_words(["-cd", str(tmp_path / "a")])
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


SECRET = "xyzzy-do-not-show-me"


@pytest.mark.parametrize("key", [
    "hub.token", "hf_token", "reward.kwargs.api_key", "reward.kwargs.apiKey", "password",
    "reward.kwargs.client_secret", "reward.kwargs.OPENAI_API_KEY", "wandb_key", "access-token",
    "reward.kwargs.authToken"])
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_keys_named_like_secrets_are_refused_unshown(key, prefix):
    with pytest.raises(ConfigError) as error:
        checked(f"{prefix}{key}={SECRET}")
    assert "looks like a secret" in str(error.value)
    assert key in str(error.value)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("word", [
    "run_name=${oc.env:HF_TOKEN}", "run_name='${oc.env:HF_TOKEN,none}'", "run_name=${env:X}",
    "reward.kwargs.x=${ oc.env : HOME }", "prompts.items=['${oc.env:HF_TOKEN}']"])
def test_environment_variables_are_not_read(word, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(ConfigError) as error:
        print_composition(read_words(
            ["+recipe=quickstart", word, "--cfg", "job", "--resolve"]))
    assert SECRET not in str(error.value) + capsys.readouterr().out


def test_a_token_as_a_value_is_refused():
    token = "hf_" + "a1" * 16
    with pytest.raises(ConfigError) as error:
        checked("+recipe=quickstart", f"model.path={token}")
    assert token not in str(error.value)


@pytest.mark.parametrize("text", [
    "reward:\n  kwargs:\n    api_key: {}\n", "hub:\n  token: {}\n",
    "run_name: ${{oc.env:HF_TOKEN}}  # {}\n",
    "reward:\n  fns:\n    a:\n      kwargs: {{token: {}}}\n"])
def test_files_are_read_for_secrets_too(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(text.format(SECRET))
    with pytest.raises(ConfigError) as error:
        print_composition(read_words(["+recipe=mine", "--cfg", "job", "--resolve"]))
    assert "recipes/mine.yaml:" in str(error.value)
    assert SECRET not in str(error.value) + capsys.readouterr().out


def test_keys_of_the_schema_and_common_arguments_are_no_secrets():
    assert not [name for name in schema_keys() if looks_secret(name)]
    for name in ("reward.kwargs.keyword", "reward.kwargs.max_tokens", "reward.kwargs.key",
                 "reward.kwargs.tokenizer", "reward.kwargs.author", "reward.kwargs.stop_token_id"):
        assert not looks_secret(name), name


# Configurations as words --------------------------------------------------------------------------

BASE = ["model.path=builtin:reviews", "prompts.path=builtin:reviews-prompts", "ppo.num_steps=2"]


def comes_back(*words):
    config = checked(*words).config
    assert config_differences(config, checked(*words_for(config)).config) == []


@pytest.mark.parametrize("recipe", sorted(recipe_files()))
def test_a_recipe_comes_back(recipe):
    comes_back(f"+recipe={recipe}")


@pytest.mark.parametrize("words", [
    ["reward.fn=length", "reward.kwargs.target=20"],
    ["reward.fn=a.b:c", "reward.kwargs.text='12'", "reward.kwargs.other='it''s: {odd}, [x]'"],
    ["reward.fn=a.b:c", "reward.kwargs.deep={a:{b:[1,2.5,null,true,'no']}}"],
    ["reward.fns.one={fn:length,kwargs:{target:3},weight:0.5}", "reward.fns.two={fn:keyword}"],
    ["reward.fn=length", "generation.stop_sequences=['\\n\\n','a,b','it=is','\"']",
     "model.revision=12e4567"],
    ["reward.fn=length", "prompts.template='Q: {prompt}\\nA:'", "ppo.optimizer.lr=1e-05",
     "ppo.max_grad_norm=null", "run_name=null", "model.trust_remote_code=false"],
])
def test_values_of_every_kind_come_back(words):
    base = [word for word in BASE if word.partition("=")[0] not in str(words)]
    comes_back(*base, *words)


@pytest.mark.parametrize("text", ["plain", "null", "true", "1e5", "it's", "a\\", "a\\'b",
                                  "ü [x] {y}", "", " lead", "a=b", "a:b", "$HOME `x` \"q\""])
def test_texts_come_back(text):
    config = checked(*BASE, "reward.fn=a.b:c").config
    config = replace(config, reward=replace(config.reward, kwargs={"value": text, "list": [text]}),
                     prompts=replace(config.prompts, column=text or "x"))
    again = checked(*words_for(config)).config
    assert again.reward.kwargs == config.reward.kwargs
    assert again.prompts.column == config.prompts.column


def test_the_command_survives_a_shell():
    config = checked(*BASE, "reward.fn=a.b:c", "reward.kwargs.x='it is; rm -rf $HOME'").config
    typed = shlex.split(training_command(config, "run_name=again").replace("\\\n", " "))
    assert typed[:2] == ["ppocli", "train"]
    again = checked(*typed[2:]).config
    assert again.run_name == "again"
    assert config_differences(config, again) == []
