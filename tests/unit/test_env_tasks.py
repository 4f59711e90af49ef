"""The shipped environments: what they answer, what it is worth, and how their players begin."""

import operator
import random
from fractions import Fraction

import numpy as np
import pytest

from ppocli import Step
from ppocli.environments.shipped import LONGEST, Calculator, GuessNumber, evaluate
from ppocli.errors import RewardError


def game(seed: int, limit: int = 20) -> GuessNumber:
    environment = GuessNumber(limit)
    said = environment.reset(rng=np.random.default_rng(seed))
    assert said == f" from 1 to {limit}.\n"
    return environment


def binary_search(environment: GuessNumber) -> tuple[int, float]:
    """How many turns it takes, and what it earns."""
    low, high = 1, environment.limit
    for turn in range(1, 30):
        guess = (low + high) // 2
        step = environment.step(str(guess))
        if step.done:
            assert step.observation == " correct\n"
            return turn, step.reward
        assert step.reward == 0
        low, high = ((guess + 1, high) if step.observation == " higher\n" else (low, guess - 1))
    raise AssertionError("never found")


def test_binary_search_takes_as_long_as_it_does_in_theory():
    found = {game(seed).number: binary_search(game(seed)) for seed in range(300)}
    assert set(found) == set(range(1, 21))
    # a tree of 20 leaves: 1, 2, 4 and 8 numbers at depths 1 to 4, and the last 5 at depth 5
    assert sorted(turns for turns, _ in found.values()) == [
        1, *[2] * 2, *[3] * 4, *[4] * 8, *[5] * 5]
    assert all(reward == pytest.approx(1 - turns / 10) for turns, reward in found.values())


def answered(text: str, answer: str = "1776") -> Step:
    environment = Calculator()
    assert environment.reset(answer=answer) is None
    return environment.step(text)


def test_the_calculator_calculates():
    draw = random.Random(3)
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for _ in range(200):
        a, b, c = (draw.randint(1, 99) for _ in range(3))
        one, two = draw.choice("+-*/"), draw.choice("+-*/")
        wanted = signs[two](signs[one](Fraction(a), Fraction(b)), c)
        assert evaluate(f"(-{a} {one} -{b}){two}{c}") == pytest.approx(
            float(signs[two](signs[one](Fraction(-a), Fraction(-b)), c)))
        assert evaluate(f"({a}{one}{b}) {two} {c}") == pytest.approx(float(wanted))
    assert answered("calc 37*48") == Step(" = 1776\n")
    assert answered(" calc 7 / 2\n") == Step(" = 3.5\n")


@pytest.mark.parametrize("expression", [
    "", "1/0", "37*", "x", "2**9", "True+1", "1j", "'a'*3", "__import__('os')", "abs(1)", "[1][0]",
    "1 if 2 else 3", "(1,2)", "1;2", "9" * (LONGEST + 1), "(" * 99, "1_0\0", "7//2"])
def test_what_the_calculator_can_not_do_is_an_observation(expression):
    step = answered(f"calc {expression}")
    assert (step.observation, step.reward, step.done) == (" = error\n", 0.0, False)
    assert step.failed


def test_any_other_turn_is_the_answer():
    assert answered("1776") == answered("It is 1,776") == Step(reward=1.0, done=True)
    for text in ("1775", "", "37*48", "calc37*48", "17761"):
        assert answered(text) == Step(reward=0.0, done=True)
    assert answered("12", answer="5 + 7 = 12\n#### 12").reward == 1.0
    with pytest.raises(RewardError, match="no number"):
        answered("12", answer="twelve")
