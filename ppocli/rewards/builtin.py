"""Short names of the rewards that ship with ppocli.

A plain table from a name to an import path: nothing is imported until a run asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ppocli.errors import RewardError
from ppocli.user_code import Kind, Located, Wanted, locate

BUILTIN_REWARDS: Mapping[str, str] = MappingProxyType({
    "classifier": "ppocli.rewards.classifier:TextClassifier",
    "reward_model": "ppocli.rewards.reward_model:RewardModel",
    "http": "ppocli.rewards.remote:HttpReward",
    "length": "ppocli.rewards.rules:Length",
    "keyword": "ppocli.rewards.rules:Keyword",
    "word_list": "ppocli.rewards.rules:WordList",
    "randomwalks": "ppocli.rewards.randomwalks:optimality",
})

MODEL_REWARDS = ("classifier", "reward_model")
"""those whose ``model`` argument names a model of their own"""
REWARD = Kind("function", RewardError, BUILTIN_REWARDS)


def locate_reward(spec: str, *, key: str) -> Located:
    """Import the reward function that ``key`` names: an import path or a built-in's short name.

    Raises:
        RewardError: the path leads to nothing that can be called, or its module can't be imported.
    """
    return locate(Wanted(spec, key, REWARD))
