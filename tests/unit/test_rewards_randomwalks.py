"""The reward of the random-walk benchmark, by hand."""

import subprocess
import sys

import pytest

from ppocli.rewards import randomwalks
from ppocli.rewards.randomwalks import walk_length

# a <- b <- c <- d, a shortcut d -> b, and e <-> f, which never arrive
SMALL = {"a": "a", "b": "ac", "c": "b", "d": "bc", "e": "f", "f": "e"}


def test_shortest_lengths_by_hand():
    assert randomwalks.shortest_lengths(SMALL) == {"a": 1, "b": 2, "c": 3, "d": 3}


@pytest.mark.parametrize(("walk", "length"), [
    ("ba", 2), ("dcba", 4), ("bcbcbcbcbcba", 12),
    ("bazz", 2),  # what follows the goal is not looked at
    ("a", 1),
    ("ca", None),  # no such edge
    ("dc", None),  # never arrives
    ("zba", None), ("b a", None), ("", None),
])
def test_walk_length_by_hand(walk, length):
    assert walk_length(walk, SMALL) == length


@pytest.mark.parametrize(("walk", "length", "score"), [
    ("bda", 3, 1.0),
    ("bjna", 4, 6 / 7),
    ("bdtkna", 6, 4 / 7),
    ("knakna", 3, 1.0),
    ("kbdtkbda", 8, 2 / 7),
    ("bdtkbdtkna", 10, 0.0),  # arrives with the last node allowed
    ("bdtkbdtkbdtkna", 10, 0.0),
    ("a", 1, 1.0),
    ("ba", 10, 0.0),  # no such edge
    ("zda", 10, 0.0),
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
