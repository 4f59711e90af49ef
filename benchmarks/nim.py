"""The game of the world ``nim``, as an environment."""

import numpy as np

from ppocli import Step


class Nim:
    """Take 1 to 3 sticks of a heap in turn; who takes the last one wins, and earns 1. The opponent
    leaves a multiple of 4 every second time that there is one to leave, else it takes at random. A
    turn that is no move loses."""

    def reset(self, *, rng: np.random.Generator) -> str:
        """Draw the heap."""
        self.heap = int(rng.integers(9, 21, endpoint=True))
        return f" of {self.heap}.\n"

    def step(self, response: str, *, rng: np.random.Generator) -> Step:
        """Take sticks, and let the opponent take some."""
        text = response.strip()
        if text not in ("1", "2", "3") or int(text) > self.heap:
            return Step(" lost\n", done=True)
        self.heap -= int(text)
        if self.heap == 0:
            return Step(" won\n", reward=1.0, done=True)
        best, most = self.heap % 4, min(3, self.heap)
        taken = best if best and rng.random() < 0.5 else int(rng.integers(1, most, endpoint=True))
        self.heap -= taken
        return Step(f" {self.heap}\n" if self.heap else " lost\n", done=self.heap == 0)
