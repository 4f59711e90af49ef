"""Every shipped recipe: it composes, and its reward is there and fits."""

from __future__ import annotations

import pytest
from helpers import checked

from ppocli.config.paths import recipe_files
from ppocli.rewards.scoring import check_reward_config


@pytest.mark.parametrize("name", list(recipe_files()))
def test_a_recipe_composes_and_its_reward_resolves(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_reward_config(checked(f"+recipe={name}").config.reward) == []  # no user code


def test_a_missing_reward_would_be_noticed(tmp_path, monkeypatch):
    from ppocli.errors import RewardError

    monkeypatch.chdir(tmp_path)
    config = checked("+recipe=quickstart").config
    config.reward.fn = "sentimnt"
    with pytest.raises(RewardError):
        check_reward_config(config.reward)
