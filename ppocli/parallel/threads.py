"""How many threads compute on a CPU, and how they wait for one another. Nothing heavy is imported
before it is needed: the command line begins here."""

import os
from functools import cache
from statistics import median
from time import perf_counter

GAIN = 1.1
"""more threads are taken where they are this many times as fast"""
TRIES = 5
"""of each number of threads; the first only warms up"""
ROWS, WIDTH, LAYERS = 256, 768, 4
"""of the products that are timed: a small language model's, with a batch of rows"""


def wait_passively() -> None:
    """Let threads that wait give their core away: spinning, as OpenMP's do by default, takes it
    from the thread they wait for wherever somebody else computes too. To be called before torch is
    loaded, which reads this; what is set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def settle_threads(wanted: int | None, noted: int | None = None, *, measure: bool = True) -> None:
    """Set torch's threads: those that are wanted, those that a run computed with, those of
    ``OMP_NUM_THREADS``, or as many as pay off at this moment.

    Args:
        wanted: ``hardware.num_threads``.
        noted: what was measured when the run began. Sums in another order round otherwise, so
            whoever goes on with its numbers takes as many, if there are so many cores.
        measure: whether what is left open is to be measured.
    """
    import torch

    from ppocli.storage.environment import usable_cores

    cores = usable_cores()
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif noted is not None:
        torch.set_num_threads(min(noted, cores))
    elif measure and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_fastest(min(torch.get_num_threads(), cores)))


@cache
def _fastest(most: int) -> int:
    """The fewest threads, of ``most`` and its halves, that more don't outdo by ``GAIN``."""
    best, taken = _seconds(1), 1
    for threads in sorted({most >> halvings for halvings in range(most.bit_length())} - {1}):
        if (seconds := _seconds(threads)) * GAIN < best:
            best, taken = seconds, threads
    return taken


def _seconds(threads: int) -> float:
    """Seconds on the clock, as the machine is now, for ``LAYERS`` layers."""
    import torch

    torch.set_num_threads(threads)
    weight, times = torch.full((WIDTH, WIDTH), 1e-3), []
    for _ in range(TRIES):
        start, x = perf_counter(), torch.ones(ROWS, WIDTH)
        for _ in range(LAYERS):
            x = torch.nn.functional.gelu(x @ weight)
        times.append(perf_counter() - start)
    return median(times[1:])
