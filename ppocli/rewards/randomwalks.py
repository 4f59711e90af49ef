"""Reward and metrics of the random-walk benchmark: find the shortest way to a goal in a graph.

It is trlX's self-contained benchmark rebuilt
(``CarperAI/trlx:examples/randomwalks/randomwalks.py@0a8e2bc``): the graph is the one that the seed
of trlX's recipe draws, so that scores can be compared. A node is a letter and a walk is a word
such as ``"uhka"``. ``samples`` are walks: the prompt (a start letter) and the response joined.
"""

from collections.abc import Mapping, Sequence
from typing import Any

GOAL = "a"
MAX_LENGTH = 10
"""nodes in the longest walk, start and goal included"""
SUCCESSORS = {
    "a": "a", "b": "dju", "c": "ekor", "d": "alt", "e": "bs", "f": "dhim", "g": "cqru",
    "h": "c", "i": "dh", "j": "n", "k": "bgjn", "l": "b", "m": "befghs", "n": "ab",
    "o": "r", "p": "ju", "q": "fj", "r": "gjo", "s": "du", "t": "k", "u": "bis"}
"""the nodes one step away from each; the goal can't be left"""


def shortest_lengths(successors: Mapping[str, str]) -> dict[str, int]:
    """Number of nodes, both ends counted, on the shortest walk from each node to the goal."""
    lengths = {GOAL: 1}
    queue = [GOAL]
    for node in queue:  # grows while it is read: a breadth-first search
        for before, after in successors.items():
            if node in after and before not in lengths:
                lengths[before] = lengths[node] + 1
                queue.append(before)
    return lengths


SHORTEST = shortest_lengths(SUCCESSORS)


def _length(walk: str) -> int:
    """Number of nodes through the first goal; ``MAX_LENGTH`` for a longer walk, a missing edge or a
    walk without the goal. Nodes after the goal don't count."""
    for place, node in enumerate(walk[:MAX_LENGTH]):
        if node not in (SUCCESSORS[walk[place - 1]] if place else SUCCESSORS):
            break
        if node == GOAL:
            return place + 1
    return MAX_LENGTH


def optimality(samples: Sequence[str], **columns: Any) -> list[float]:
    """[N] closeness of each walk to the shortest one from its start, in [0, 1].

    ``(MAX_LENGTH - length) / (MAX_LENGTH - shortest)``: 1 for a shortest walk, 0 for a walk that
    takes a missing edge, never arrives, or takes ``MAX_LENGTH`` nodes or more. ``columns`` are not
    used.
    """
    return [0.0 if length == MAX_LENGTH
            else (MAX_LENGTH - length) / (MAX_LENGTH - SHORTEST[walk[0]])
            for walk, length in zip(samples, map(_length, samples), strict=True)]


def metrics(samples: Sequence[str], **columns: Any) -> dict[str, list[float]]:
    """``lengths`` (nodes to the goal; 10 for a failure) and ``optimality``, [N] each.

    trlX reports the length of a failure as 100, which makes the mean a count of failures.
    """
    return {"lengths": [float(_length(walk)) for walk in samples],
            "optimality": optimality(samples)}
