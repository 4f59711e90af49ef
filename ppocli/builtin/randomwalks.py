"""The random-walk benchmark: find the shortest way to a goal in a small directed graph.

It is trlX's self-contained benchmark rebuilt
(``CarperAI/trlx:examples/randomwalks/randomwalks.py@0a8e2bc``): the same graph and the same sampled
walks for the same seed, so that scores can be compared; the seed is that of trlX's recipe.
A node is a letter, a walk is a word such as ``"uhka"``, and ``a`` is the goal. Needs numpy only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

GOAL = 0


@dataclass(frozen=True, slots=True)
class WalkSettings:
    """Everything the graph and its walks are a function of."""

    nodes: int = 21
    max_length: int = 10
    """nodes in the longest walk, start and goal included"""
    walks: int = 1000
    p_edge: float = 0.1
    seed: int = 1000


@dataclass(frozen=True, slots=True)
class WalkGraph:
    """A directed graph with a goal that can't be left."""

    successors: tuple[tuple[int, ...], ...]
    """[nodes] the nodes one step away, in ascending order; the goal's only successor is itself"""
    max_length: int

    @property
    def letters(self) -> str:
        """The letter of each node, in node order."""
        return "".join(chr(ord("a") + node) for node in range(len(self.successors)))

    def shortest_lengths(self) -> tuple[int | None, ...]:
        """[nodes] nodes on the shortest walk to the goal, both ends counted; None: no way there."""
        found: list[int | None] = [None] * len(self.successors)
        found[GOAL] = 1
        queue = deque([GOAL])
        while queue:
            node = queue.popleft()
            length = found[node]
            assert length is not None
            for before, after in enumerate(self.successors):
                if node in after and found[before] is None:
                    found[before] = length + 1
                    queue.append(before)
        return tuple(found)


@cache
def benchmark(settings: WalkSettings | None = None) -> tuple[WalkGraph, tuple[str, ...]]:
    """The graph and its sampled walks, drawn one after the other from one seeded stream.

    Every ordered pair of nodes gets an edge with probability ``p_edge``; a graph in which some
    node has no way out is drawn again. A walk starts anywhere but at the goal, takes uniformly
    drawn edges, and ends at the goal or after ``max_length`` nodes.
    """
    settings = settings or WalkSettings()
    nodes = settings.nodes
    # numpy's legacy generator: its stream is frozen, and it is the one trlX's graph comes from
    stream = np.random.RandomState(settings.seed)
    while True:
        edges = stream.rand(nodes, nodes) > 1 - settings.p_edge
        np.fill_diagonal(edges, False)
        if edges.any(axis=1).all():
            break
    edges[GOAL] = False
    edges[GOAL, GOAL] = True
    successors = tuple(tuple(int(node) for node in np.flatnonzero(row)) for row in edges)
    graph = WalkGraph(successors, settings.max_length)
    return graph, tuple(_walk(graph, stream) for _ in range(settings.walks))


def _walk(graph: WalkGraph, stream: np.random.RandomState) -> str:
    node = GOAL
    while node == GOAL:
        node = int(stream.randint(len(graph.successors)))
    walk = [node]
    while node != GOAL and len(walk) < graph.max_length:
        node = int(stream.choice(graph.successors[node]))
        walk.append(node)
    return "".join(graph.letters[node] for node in walk)


def sample_walks() -> list[str]:
    """The 1000 walks of the benchmark."""
    return list(benchmark()[1])


def start_letters() -> list[str]:
    """Every node a walk can start from: all but the goal, in alphabetical order."""
    return list(benchmark()[0].letters[GOAL + 1:])


def walk_length(walk: str, graph: WalkGraph) -> int | None:
    """Nodes up to and including the first goal; None where an edge is missing or the goal is.

    What follows the goal is not looked at.
    """
    for place, letter in enumerate(walk):
        node = graph.letters.find(letter)
        if node < 0:
            return None
        if place and node not in graph.successors[graph.letters.index(walk[place - 1])]:
            return None
        if node == GOAL:
            return place + 1
    return None


def optimality(samples: Sequence[str], graph: WalkGraph | None = None) -> list[float]:
    """How near each walk (start letter included) is to the shortest one from its start, in [0, 1].

    ``(max_length - length) / (max_length - shortest)``: 1 for a shortest walk, 0 for a walk that
    takes a missing edge, never arrives, or takes ``max_length`` nodes or more. trlX divides by zero
    where the goal is out of reach; here that is 0.
    """
    graph = graph or benchmark()[0]
    shortest = graph.shortest_lengths()
    scores = []
    for walk in samples:
        length = walk_length(walk, graph)
        if length is None or length >= graph.max_length:
            scores.append(0.0)
            continue
        best = shortest[graph.letters.index(walk[0])]
        assert best is not None  # the walk arrived, so there is a way
        scores.append((graph.max_length - length) / (graph.max_length - best))
    return scores


def lengths(samples: Sequence[str], graph: WalkGraph | None = None) -> list[float]:
    """Nodes each walk takes to the goal, at most ``max_length``, which also stands for a failure.

    It is the length that :func:`optimality` scores. trlX reports failures as 100 here, which
    makes the mean a count of failures.
    """
    graph = graph or benchmark()[0]
    found = (walk_length(walk, graph) for walk in samples)
    return [float(min(length or graph.max_length, graph.max_length)) for length in found]
