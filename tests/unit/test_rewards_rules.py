"""The rule rewards that serve as examples, and that of the random-walk benchmark, by hand."""

import subprocess
import sys
from typing import Any

import pytest
from helpers import refused

from ppocli.config.schema import RewardConfig
from ppocli.errors import RewardError
from ppocli.rewards import randomwalks
from ppocli.rewards.records import RewardRequest
from ppocli.rewards.scoring import build_reward


def score(name: str, responses: list[str], **kwargs: Any) -> list[float]:
    request = RewardRequest(["good prompt "] * len(responses), responses,
                            [[1] * (len(r.split()) + 1) for r in responses], {}, None)
    return build_reward(RewardConfig(fn=name, kwargs=kwargs), columns=[]).score(request).scores


def test_length():
    texts = ["", "a", "a b", "a b c", "a b c d e", "it's fine"]
    assert score("length", texts, target=2, unit="words") == [0.0, 0.5, 1.0, 0.5, 0.0, 1.0]
    assert score("length", texts[:4], target=2) == [0.5, 1.0, 0.5, 0.0]  # one token for the end


def test_keyword():
    texts = ["A GREAT film", "greatest", "great and moving", ""]
    assert score("keyword", texts, words=["great", "moving"]) == [0.5, 0.0, 1.0, 0.0]
    assert score("keyword", texts, words=["great"], ignore_case=False) == [0.0, 0.0, 1.0, 0.0]
    assert score("keyword", texts, pattern=r"great(est)?$") == [0.0, 1.0, 0.0, 0.0]
    assert score("keyword", ["c++ rules", "c rules"], words=["C++"]) == [1.0, 0.0]


def test_word_list():
    texts = ["good, fine and bad", "Bad", "nothing", "GOOD good"]
    expected = [pytest.approx(1 / 3), -1.0, 0.0, 1.0]
    assert score("word_list", texts, positive=["good", "Fine"], negative=["bad"]) == expected


@pytest.mark.parametrize(("name", "kwargs", "words"), [
    ("length", {}, "reward.kwargs.target=..."),
    ("length", {"target": 0}, "target=0 is not a number above 0"),
    ("length", {"target": 3, "unit": "chars"}, "tokens or words"),
    ("keyword", {}, "either words or a pattern"),
    ("keyword", {"words": ["a"], "pattern": "a"}, "either words or a pattern"),
    ("keyword", {"pattern": "("}, "a regular expression (missing )"),
    ("word_list", {"positive": ["a"], "negative": ["A"]}, "isn't in positive too"),
    ("word_list", {"positive": ["a", ""]}, "a list of words"),
    ("word_list", {"positve": ["a"]}, "Did you mean 'positive'?"),
])
def test_wrong_arguments(name, kwargs, words):
    with refused(RewardError, words):
        build_reward(RewardConfig(fn=name, kwargs=kwargs))


def test_shortest_lengths_by_hand():
    # a <- b <- c <- d, a shortcut d -> b, and e <-> f, which never arrive
    graph = {"a": "a", "b": "ac", "c": "b", "d": "bc", "e": "f", "f": "e"}
    assert randomwalks.shortest_lengths(graph) == {"a": 1, "b": 2, "c": 3, "d": 3}


@pytest.mark.parametrize(("walk", "length", "score"), [
    ("bda", 3, 1.0),
    ("bdazz", 3, 1.0),  # what follows the goal is not looked at
    ("bjna", 4, 6 / 7),
    ("bdtkna", 6, 4 / 7),
    ("knakna", 3, 1.0),
    ("kbdtkbda", 8, 2 / 7),
    ("bdtkbdtkna", 10, 0.0),  # arrives with the last node allowed
    ("bdtkbdtkbdtkna", 10, 0.0),
    ("a", 1, 1.0),
    ("ba", 10, 0.0),  # no such edge
    ("bdt", 10, 0.0),  # never arrives
    ("zda", 10, 0.0), ("b da", 10, 0.0),
    ("", 10, 0.0),
])
def test_scores_by_hand(walk, length, score):
    assert randomwalks.optimality([walk], prompts=["b"]) == [pytest.approx(score)]
    assert randomwalks.metrics([walk]) == {"lengths": [length],
                                           "optimality": [pytest.approx(score)]}


def test_scores_and_names_need_no_torch():
    code = ("import sys; import ppocli.builtin.names, ppocli.rewards.randomwalks as r; "
            "r.optimality(['sda']); assert not {'torch', 'transformers'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
