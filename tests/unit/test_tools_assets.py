"""How the prompts and the reward of the random walks are made."""

import sys
from itertools import pairwise
from pathlib import Path

from ppocli.rewards import randomwalks
from ppocli.rewards.randomwalks import GOAL, MAX_LENGTH, SUCCESSORS

sys.path.append(str(Path(__file__).resolve().parents[2]))  # tools/ is in no wheel

from tools.assets.randomwalks import WalkSettings, draw_walks


def test_the_graph_and_the_walks_are_those_of_trlx():
    graph, walks = draw_walks(WalkSettings())
    assert graph == SUCCESSORS
    assert set(randomwalks.SHORTEST) == set(graph)  # every start can earn a reward
    # first walks that trlX's generator draws for the seed of its recipe, 1000
    assert walks[:5] == ["sda", "fda", "ebjnbdtkna", "jnbjna", "lbusdtkbui"]
    assert len(walks) == 1000
    for walk in walks:
        assert len(walk) == MAX_LENGTH or walk[-1] == GOAL
        assert GOAL not in walk[:-1]
        assert all(after in graph[node] for node, after in pairwise(walk))
