"""How many threads compute on a CPU, and how they wait for one another. Nothing heavy is imported
before it is needed: the command line begins here."""

import os


def wait_passively() -> None:
    """Let threads that wait give their core away: spinning, as OpenMP's do by default, takes it
    from the thread they wait for wherever somebody else computes too. To be called before torch is
    loaded, which reads this; what is set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def settle_threads(number: int | None, recorded: int | None = None) -> None:
    """Set torch's threads. Sums in another order round otherwise, so the same command has to come
    to the same number each time: how busy the machine is must not decide it.

    Args:
        number: ``hardware.num_threads``; None leaves it open.
        recorded: threads of the run that is gone on with, taken as far as there are cores.
    """
    import torch

    from ppocli.storage.environment import usable_cores

    if number is None:
        number = default_threads() if recorded is None else min(recorded, usable_cores())
    torch.set_num_threads(number)


def default_threads() -> int:
    """Those of ``OMP_NUM_THREADS``, or one per core that this process may use."""
    import torch

    from ppocli.storage.environment import usable_cores

    threads = torch.get_num_threads()
    return threads if os.environ.get("OMP_NUM_THREADS") else min(threads, usable_cores())
