"""The rule rewards that serve as examples, and that of the random-walk benchmark, by hand."""

import pytest
from helpers import refused

from ppocli.config.schema import RewardConfig
from ppocli.errors import RewardError
from ppocli.rewards import randomwalks
from ppocli.rewards.reward_records import RewardRequest
from ppocli.rewards.scoring import build_reward


def score_of(name: str, responses: list[str], columns: dict[str, list] | None = None,
             **kwargs: object) -> list[float]:
    """The score of a rule reward, with the columns that it needs."""
    request = RewardRequest(["good prompt "] * len(responses), responses,
                            [[1] * (len(r.split()) + 1) for r in responses], columns or {}, None)
    reward = build_reward(RewardConfig(fn=name, kwargs=kwargs))
    reward.check_columns(list(request.columns))
    return reward.score(request).scores


def test_length():
    texts = ["", "a", "a b", "a b c", "a b c d e", "it's fine"]
    assert score_of("length", texts, target=2, unit="words") == [0.0, 0.5, 1.0, 0.5, 0.0, 1.0]
    assert score_of("length", texts[:4], target=2) == [0.5, 1.0, 0.5, 0.0]  # one token for the end


def test_keyword():
    texts = ["A GREAT film", "greatest", "great and moving", ""]
    assert score_of("keyword", texts, words=["great", "moving"]) == [0.5, 0.0, 1.0, 0.0]
    assert score_of("keyword", texts, words=["great"], ignore_case=False) == [0.0, 0.0, 1.0, 0.0]
    assert score_of("keyword", texts, pattern=r"great(est)?$") == [0.0, 1.0, 0.0, 0.0]
    assert score_of("keyword", ["c++ rules", "c rules"], words=["C++"]) == [1.0, 0.0]


def test_word_list():
    texts = ["good, fine and bad", "Bad", "nothing", "GOOD good"]
    expected = [pytest.approx(1 / 3), -1.0, 0.0, 1.0]
    assert score_of("word_list", texts, positive=["good", "Fine"], negative=["bad"]) == expected
    texts = ["I don\u2019t", "I don't", "İstanbul"]  # the last has an accent more in lower case
    assert score_of("word_list", texts, positive=["don't", "İstanbul"]) == [1.0, 1.0, 1.0]


def answers(responses: list[str], golden: list, **kwargs: object) -> list[float]:
    return score_of("answer", responses, {"answer": golden}, **kwargs)


def test_answer():
    worked = "She has 5 * 3 = <<5*3=15>>15 eggs. #### 1,215"
    said = ["1215", "it is 1,215.0!", "12 and 15", "-1215", "", "no number", "3-1215", "121.5"]
    assert answers(said, [worked] * len(said)) == [1, 1, 0, 0, 0, 0, 1, 0]
    assert answers(["7 #### 8", "8", "#### 7, not 8 #### 9", "####"], [8, "8", 9.0, 8],
                   after="####") == [1, 0, 1, 0]
    said = ["0.00001", "x -5", "1e-05", "so 1e16", "16", "10000000000000000", "1e5000"]
    assert answers(said, [1e-5] * 3 + [1e16] * 3 + ["5000"]) == [1, 0, 1, 1, 0, 1, 1]
    with refused(RewardError, "'none' holds no number"):
        answers(["1"], ["none"])
    with refused(RewardError, "no column 'answer'"):
        score_of("answer", ["1"])


@pytest.mark.parametrize(("name", "kwargs", "words"), [
    ("length", {}, "reward.kwargs.target=..."),
    ("length", {"target": 0}, "target=0 is not a number above 0"),
    ("keyword", {"pattern": "("}, "a regular expression (missing )"),
    ("word_list", {"positive": ["a"], "negative": ["A"]}, "isn't in positive too"),
    ("step_word_list", {"negative": ["not bad"]}, "negative='not bad' is not a single word"),
])
def test_wrong_arguments_of_rules(name, kwargs, words):
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
    ("bdtkbdtkna", 10, 0.0),  # arrives with the last node allowed
    ("bdtkbdtkbdtkna", 10, 0.0),
    ("ba", 10, 0.0),  # no such edge
    ("bdt", 10, 0.0),  # never arrives
    ("", 10, 0.0),
])
def test_scores_by_hand(walk, length, score):
    assert randomwalks.optimality([walk], prompts=["b"]) == [pytest.approx(score)]
    assert randomwalks.metrics([walk]) == {"lengths": [length],
                                           "optimality": [pytest.approx(score)]}
