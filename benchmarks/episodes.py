"""What turns cost: decoding episodes of 1 to 6 turns against as many plain tokens.

    python benchmarks/episodes.py --rounds 5

64 episodes with random observations of four tokens after each turn, on random weights: with keys
and values kept over turns, with each context read anew in every turn, and the same number of the
policy's tokens in one response each. Processor seconds of one thread, the least of all rounds,
which take the three in turn.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from machine import provenance
from tables import marks, write_between
from transformers import GPT2Config, GPT2LMHeadModel

from ppocli.data.data_set import padded_left
from ppocli.sampling.conversation import Conversation, KeptKeys
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.sampler import decode, decoded_turns
from ppocli.sampling.samples import SamplingSpec

SHAPES = {"2 layers of 64": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 600},
          "4 layers of 256": {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 8000},
          "GPT-2 124M": {}}
EPISODES, TURNS, OBSERVED = 64, 6, 4


class Work:
    """Episodes whose turns have up to ``longest`` tokens."""

    def __init__(self, lm: GPT2LMHeadModel, longest: int) -> None:
        random = np.random.default_rng(0)

        def ids(count: int) -> list[int]:
            return [int(token) for token in random.integers(5, 500, count)]

        self.lm = lm
        self.contexts = [ids(12) for _ in range(EPISODES)]
        self.lengths = [[int(n) for n in random.integers(max(1, longest // 2), longest + 1, turns)]
                        for turns in random.integers(1, TURNS + 1, EPISODES)]
        self.observed = [[ids(OBSERVED) for _ in row] for row in self.lengths]
        self.noise = random.uniform(0.01, 0.99, (EPISODES, longest * TURNS))
        self.decoder = Decoder(lm, SamplingSpec(max_new_tokens=longest * TURNS, stop_ids=()))

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that the policy says, and those that it reads between."""
        return (sum(map(sum, self.lengths)),
                sum(OBSERVED * (len(row) - 1) for row in self.lengths))

    def kept(self) -> None:
        """Keys and values stay."""
        self._play(KeptKeys(self.decoder, self.contexts, self.noise, nullcontext).speak)

    def reread(self) -> None:
        """Each context is read anew."""
        self._play(decoded_turns(self.decoder, self.noise, nullcontext))

    def _play(self, talk: Conversation) -> None:
        contexts = [list(ids) for ids in self.contexts]
        for turn in range(TURNS):
            rows = [i for i, row in enumerate(self.lengths) if len(row) > turn]
            for i in rows:
                contexts[i] += self.observed[i][turn - 1] if turn else []
            out = talk(rows, [contexts[i] for i in rows], [self.lengths[i][turn] for i in rows])
            for i, ids in zip(rows, out.ids, strict=True):
                contexts[i] += ids

    def plain(self) -> None:
        """As many tokens in one turn."""
        list(decode(self.decoder, *padded_left(self.contexts), self.noise,
                    limits=[sum(row) for row in self.lengths]))


def least(works: list[Callable[[], None]], rounds: int) -> list[float]:
    """Processor seconds of each, the least of ``rounds``."""
    found = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            start = time.process_time()
            work()
            found[i] = min(found[i], time.process_time() - start)
    return found


def report(rounds: int) -> str:
    """The table, with what it was measured on."""
    lines = ["| model | tokens of a turn | said + read | plain s | kept over turns | read anew |",
             "|---" * 6 + "|"]
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        lm = GPT2LMHeadModel(GPT2Config(**shape)).eval()
        for longest in (6, 16):
            work = Work(lm, longest)
            plain, kept, reread = least([work.plain, work.kept, work.reread], rounds)
            said, read = work.tokens
            lines.append(f"| {name} | {max(1, longest // 2)} to {longest} | {said} + {read} "
                         f"| {plain:.2f} | {kept / plain:.2f} x | {reread / plain:.2f} x |")
    return "\n".join([*lines, "", provenance(f"one thread, the least of {rounds} rounds")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table into this file, between its "
                        f"lines {' and '.join(marks('episodes'))}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = report(args.rounds)
    print(text)
    if args.out:
        write_between(args.out, "episodes", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
