"""torch's settings of this process: how many threads compute on a CPU and how they wait for one
another, and the modes of a calling script, set aside while a run computes.

Nothing heavy is imported before it is needed: the command line begins here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def wait_passively() -> None:
    """Make waiting OpenMP threads yield their core. By default they spin, which on a busy machine
    takes it from the very thread they wait for. Call this before torch is loaded, which reads these
    variables; values that are set already stay."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def settle_threads(number: int | None, recorded: int | None = None) -> None:
    """Set torch's number of threads, which decides the order of sums and so their rounding: the
    same command must choose the same number each time, however busy the machine is.

    Args:
        number: ``hardware.num_threads``; None leaves it open.
        recorded: threads of the resumed run, limited to the cores that are available.
    """
    import torch

    from ppocli.runs.environment import usable_cores

    if number is None:
        number = default_threads() if recorded is None else min(recorded, usable_cores())
    torch.set_num_threads(number)


def default_threads() -> int:
    """Those of ``OMP_NUM_THREADS``, or one per core that this process may use."""
    import torch

    from ppocli.runs.environment import usable_cores

    threads = torch.get_num_threads()
    return threads if os.environ.get("OMP_NUM_THREADS") else min(threads, usable_cores())


@contextmanager
def default_modes() -> Iterator[None]:
    """Reset torch's global modes for the block, and restore the script's after it: a run trains, in
    the precision of its own configuration."""
    import torch

    dtype = torch.get_default_dtype()
    casts = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    # within a script's contexts ours would go on with weights as they were when first rounded:
    # torch forgets those at the end of the outermost one
    nesting = torch.autocast_increment_nesting()
    for _ in range(nesting):
        torch.autocast_decrement_nesting()
    torch.set_default_dtype(torch.float32)
    for device in casts:
        torch.set_autocast_enabled(device, False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        for device, enabled in casts.items():
            torch.set_autocast_enabled(device, enabled)
        for _ in range(nesting - 1):
            torch.autocast_increment_nesting()
