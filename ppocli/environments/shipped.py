"""Environments that come with ppocli, short enough to be read, copied and changed:
``env.fn=guess_number``, a search for a number; and ``env.fn=calculator``, arithmetic with a
calculator, the smallest example of a tool."""

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ppocli.rewards.rules import Answer
from ppocli.runs.episode import Step

TURN_COST = 0.1
LONGEST = 100
"""maximum number of characters of an expression; without powers it limits the result too"""
_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.USub: operator.neg}


class GuessNumber:
    """Guess a random number from 1 to ``limit``; the answer to a guess is higher, lower or correct.

    A turn is a number and nothing else; the answer to any other text is invalid. The right guess in
    turn n earns ``1 - TURN_COST * n``, at least 0, and ends the episode. For 20 numbers, binary
    search takes at most 5 turns, 3.7 on average.

    Args:
        limit: the largest number.
    """

    def __init__(self, limit: int = 20) -> None:
        self.limit, self.turns = limit, 0

    def reset(self, *, rng: np.random.Generator) -> str:
        """Draw the number; the range is added to the prompt."""
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
    """The value of an expression of numbers, ``+ - * /`` and parentheses.

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

    The reply to a turn that begins with ``calc`` is the result, ``= 1776``, or ``= error``. Any
    other turn is the answer, which ends the episode and earns 1 if its last number is that of the
    prompts' column ``answer``, else 0 (:class:`ppocli.rewards.rules.Answer`).
    """

    def reset(self, *, answer: Any) -> None:
        """Remember the right answer."""
        self.answer = answer

    def step(self, response: str) -> Step:
        """Calculate, or judge the answer."""
        tool, _, expression = response.strip().partition(" ")
        if tool != "calc":
            [right] = Answer()([response], lambda name, values: None, answer=[self.answer])
            return Step(reward=right, done=True)
        try:
            return Step(f" = {evaluate(expression)}\n")
        except ValueError as error:
            return Step(" = error\n", failed=str(error))
