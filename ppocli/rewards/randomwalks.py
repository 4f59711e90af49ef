"""Reward and metrics of the random-walk benchmark (:mod:`ppocli.builtin.randomwalks`).

``samples`` are walks as words: the prompt (a start letter) and the response joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppocli.builtin import randomwalks


def optimality(samples: Sequence[str], **columns: Any) -> list[float]:
    """[N] 1.0 for a shortest walk to the goal, 0.0 for one that fails; columns are not used."""
    return randomwalks.optimality(samples)


def metrics(samples: Sequence[str], **columns: Any) -> dict[str, list[float]]:
    """``lengths`` (nodes to the goal; 10 for a failure) and ``optimality``, [N] each."""
    return {"lengths": randomwalks.lengths(samples), "optimality": randomwalks.optimality(samples)}
