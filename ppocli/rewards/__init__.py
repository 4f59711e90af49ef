"""Rewards: from an import path to checked scores. Here, the short names of those that ship.

A plain table from a name to an import path: nothing is imported until a run asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
