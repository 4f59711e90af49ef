"""What tells one judge of samples from another."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ppocli.evaluation.identity import _described, _digest, _weights

SCALE = 2.0


def helper(text):
    return len(text) * SCALE


def scores(completions):
    return [helper(text) for text in completions]


def digest(value: Any) -> str:
    return _digest(_described(value, set(), 0, plain=True))


def scaled(factor):
    return lambda completions: [factor * len(text) for text in completions]


class Judge:
    __slots__ = ("again", "factor", "model")

    def __init__(self, factor: float, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.factor = factor
        self.model = torch.nn.Linear(3, 1)
        self.again = self

    def __call__(self, completions):
        return [self.factor] * len(completions)


def test_equal_code_is_equal_wherever_it_stands():
    one = lambda completions: [1.0] * len(completions)  # noqa: E731

    again = lambda completions: [1.0] * len(completions)  # noqa: E731
    assert digest(one) == digest(again)
    assert digest(scaled(2)) == digest(scaled(2))
    assert digest(Judge(1.0)) == digest(Judge(1.0))


def test_other_code_values_and_weights_are_told_apart():
    found = [digest(value) for value in (
        lambda completions: [1.0] * len(completions), lambda completions: [0.5] * len(completions),
        scaled(2), scaled(3), scaled(math.exp), scaled(math.log),
        functools.partial(scaled, 2), functools.partial(scaled, 3), Judge(1.0), Judge(2.0),
        Judge(1.0, seed=1), Judge(1.0).__call__, {"a": scaled(2)}, {"b": scaled(2)}, Judge,
        lambda completions, k=1: k, lambda completions, k=2: k)]
    assert len(set(found)) == len(found)
    assert found[8] == digest(Judge(1.0))


def test_what_a_function_calls_counts(monkeypatch):
    before = digest(scores)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    changed = digest(scores)
    assert changed != before
    monkeypatch.setitem(globals(), "helper", len)
    assert digest(scores) not in (before, changed)


def test_models_are_found_in_what_loaded_them():
    assert _weights(Judge(1.0), []) == _weights(Judge(2.0), []) != _weights(Judge(1.0, 1), [])
    judge = Judge(1.0)
    assert len(_weights(lambda: judge, [])) == 1
    assert _weights(scores, []) == []
