"""No secret gets into a configuration, and none is shown when refused."""

import pytest
from helpers import checked

from ppocli.config.compose import print_composition
from ppocli.config.keys import schema_keys
from ppocli.config.secrets import looks_secret
from ppocli.config.words import read_words
from ppocli.errors import ConfigError

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
