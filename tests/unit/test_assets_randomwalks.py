"""The random-walk benchmark: the graph, the walks, optimality worked by hand, the reward."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from ppocli.builtin import randomwalks
from ppocli.builtin.randomwalks import GOAL, WalkGraph, WalkSettings, benchmark, walk_length
from ppocli.rewards import randomwalks as reward

# a <- b <- c <- d, a shortcut d -> b, and e <-> f, which never arrive
SMALL = WalkGraph(((0,), (0, 2), (1,), (1, 2), (5,), (4,)), max_length=10)


def test_shortest_lengths_by_hand():
    assert SMALL.shortest_lengths() == (1, 2, 3, 3, None, None)
    assert SMALL.letters == "abcdef"


@pytest.mark.parametrize(("walk", "length", "score"), [
    ("ba", 2, 1.0),
    ("dba", 3, 1.0),
    ("dcba", 4, 6 / 7),
    ("bcba", 4, 6 / 8),
    ("bcbcbcbcba", 10, 0.0),  # arrives with the last node allowed
    ("bcbcbcbcbcba", 12, 0.0),
    ("baa", 2, 1.0),  # what follows the goal is not looked at
    ("bazz", 2, 1.0),
    ("a", 1, 1.0),
    ("ca", None, 0.0),  # no such edge
    ("dc", None, 0.0),  # never arrives
    ("efefefefef", None, 0.0),
    ("e", None, 0.0),
    ("zba", None, 0.0),
    ("b a", None, 0.0),
    ("", None, 0.0),
])
def test_optimality_by_hand(walk, length, score):
    assert walk_length(walk, SMALL) == length
    assert randomwalks.optimality([walk], SMALL) == [pytest.approx(score)]
    assert randomwalks.lengths([walk], SMALL) == [min(length or 10, 10)]


def test_benchmark_graph_and_walks():
    graph, walks = benchmark()
    assert len(graph.successors) == 21
    assert graph.successors[GOAL] == (GOAL,)
    for node, after in enumerate(graph.successors):
        assert after
        assert node == GOAL or node not in after
    assert None not in graph.shortest_lengths()  # every start can earn a reward
    assert len(walks) == 1000
    for walk in walks:
        assert walk[0] != "a"
        assert len(walk) == 10 or walk[-1] == "a"
        assert "a" not in walk[:-1]
        steps = pairwise(walk)
        assert all(ord(y) - 97 in graph.successors[ord(x) - 97] for x, y in steps)
    assert randomwalks.start_letters() == list("bcdefghijklmnopqrstu")


def test_benchmark_is_trlx_graph():
    # first walks and degrees that trlX's generator draws for the seed of its recipe, 1000
    graph, walks = benchmark()
    assert walks[:5] == ("sda", "fda", "ebjnbdtkna", "jnbjna", "lbusdtkbui")
    assert [len(after) for after in graph.successors] == [
        1, 3, 4, 3, 2, 4, 4, 1, 2, 1, 4, 1, 6, 2, 1, 2, 2, 3, 2, 1, 3]


def test_walks_leave_numpys_global_state_alone():
    before = np.random.get_state()
    benchmark(WalkSettings(seed=3))
    after = np.random.get_state()
    assert np.array_equal(before[1], after[1])
    assert before[2:] == after[2:]


def test_reward_and_metrics():
    samples = ["sda", "sd", "fda"]
    assert reward.optimality(samples, prompts=["s", "s", "f"]) == [1.0, 0.0, 1.0]
    assert reward.metrics(samples) == {"lengths": [3.0, 10.0, 3.0], "optimality": [1.0, 0.0, 1.0]}
    assert reward.optimality([]) == []


def test_graph_and_names_need_no_torch():
    code = ("import sys; import ppocli.builtin.names, ppocli.rewards.randomwalks as r; "
            "r.optimality(['sda']); assert not {'torch', 'transformers'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
