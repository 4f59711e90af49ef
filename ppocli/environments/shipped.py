"""Environments that come with ppocli, short enough to be read, copied and changed:
``env.fn=guess_number``, find a number by asking, a search in one dimension; and
``env.fn=calculator``, sums with a calculator at hand, the smallest case of a tool."""

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ppocli.episode import Step
from ppocli.rewards.rules import Answer

TURN_COST = 0.1
LONGEST = 100
"""characters of an expression; with no power among the operators it bounds the result too"""
_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.USub: operator.neg}


class GuessNumber:
    """A number from 1 to ``limit`` is drawn; a guess is answered by higher, lower or correct.

    A turn is a number and nothing else; any other text is answered by invalid. The right guess of
    turn n earns ``1 - TURN_COST * n``, at least 0, and ends the episode. Binary search takes at
    most 5 turns of 20 numbers, 3.7 on average.

    Args:
        limit: the largest number.
    """

    def __init__(self, limit: int = 20) -> None:
        self.limit, self.turns = limit, 0

    def reset(self, *, rng: np.random.Generator) -> str:
        """Draw the number and say the range."""
        self.number = int(rng.integers(1, self.limit, endpoint=True))
        return f" from 1 to {self.limit}.\n"

    def step(self, response: str) -> Step:
        """Answer a guess."""
        self.turns += 1
        text = response.strip()
        guess = int(text) if text.isdecimal() and len(text) < 10 else 0
        if not 1 <= guess <= self.limit:
            return Step(" invalid\n")
        if guess == self.number:
            return Step(" correct\n", reward=max(0.0, 1 - TURN_COST * self.turns), done=True)
        return Step(" higher\n" if guess < self.number else " lower\n")


def evaluate(expression: str) -> int | float:
    """The value of numbers, ``+ - * /`` and parentheses, and of nothing else.

    Raises:
        ValueError: the text is longer than ``LONGEST``, is no such expression, or divides by 0.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


class Calculator:
    """A question with a number as its answer; ``calc 37*48`` asks the calculator.

    A turn that begins with ``calc`` is answered by the result, ``= 1776``, or by ``= error``.
    Any other turn is the answer, which ends the episode and earns 1 if its last number is that of
    the prompts' column ``answer``, else 0 (:class:`ppocli.rewards.rules.Answer`).
    """

    def reset(self, *, answer: Any) -> None:
        """Remember the right answer."""
        self.answer = answer

    def step(self, response: str) -> Step:
        """Calculate, or judge the answer."""
        tool, _, expression = response.strip().partition(" ")
        if tool != "calc":
            [right] = Answer()([response], answer=[self.answer])
            return Step(reward=right, done=True)
        try:
            return Step(f" = {evaluate(expression)}\n")
        except ValueError as error:
            return Step(" = error\n", failed=str(error))
