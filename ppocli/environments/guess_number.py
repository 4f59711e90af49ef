"""``env.fn=guess_number``: find a number by asking, a search in one dimension."""

import numpy as np

from ppocli.episode import Step

TURN_COST = 0.1


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
        said = response.strip()
        guess = int(said) if said.isdecimal() and len(said) < 10 else 0
        if not 1 <= guess <= self.limit:
            return Step(" invalid\n")
        if guess == self.number:
            return Step(" correct\n", reward=max(0.0, 1 - TURN_COST * self.turns), done=True)
        return Step(" higher\n" if guess < self.number else " lower\n")
