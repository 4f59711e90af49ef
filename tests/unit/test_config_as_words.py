"""A configuration as words composes to itself again."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from helpers import checked

from ppocli.builtin.names import recipe_files
from ppocli.config.resolved import config_differences
from ppocli.config.words import training_command, words_for

BASE = ["model.path=builtin:reviews", "prompts.path=builtin:reviews-prompts", "ppo.num_steps=2"]


def composed(words):
    return checked(*words).config


@pytest.mark.parametrize("recipe", sorted(recipe_files()))
def test_a_recipe_comes_back(recipe):
    config = composed([f"+recipe={recipe}"])
    assert config_differences(config, composed(words_for(config))) == []


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
    config = composed([*base, *words])
    assert config_differences(config, composed(words_for(config))) == []


@pytest.mark.parametrize("text", ["plain", "null", "true", "1e5", "it's", "a\\", "a\\'b",
                                  "ü [x] {y}", "", " lead", "a=b", "a:b", "$HOME `x` \"q\""])
def test_texts_come_back(text):
    config = composed([*BASE, "reward.fn=a.b:c"])
    config = replace(config, reward=replace(config.reward, kwargs={"value": text, "list": [text]}),
                     prompts=replace(config.prompts, column=text or "x"))
    again = composed(words_for(config))
    assert again.reward.kwargs == config.reward.kwargs
    assert again.prompts.column == config.prompts.column


def test_the_command_survives_a_shell():
    config = composed([*BASE, "reward.fn=a.b:c", "reward.kwargs.x='it is; rm -rf $HOME'"])
    typed = shlex.split(training_command(config, "run_name=again").replace("\\\n", " "))
    assert typed[:2] == ["ppocli", "train"]
    again = composed(typed[2:])
    assert again.run_name == "again"
    assert config_differences(config, again) == []
