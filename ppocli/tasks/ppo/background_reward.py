"""Work beside the main thread: a reward that waits for others need not keep generation waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
LOOK = 0.2
"""seconds between two looks at whether the run is to stop"""


def begin(work: Callable[[], T], device: torch.device, poll: Callable[[], None]
          ) -> Callable[[], T]:
    """Start ``work`` in a thread; the function returned waits for it.

    Nothing in it may talk to other ranks: collectives belong to the main thread. The thread is a
    daemon: work that hangs must not keep a process that wants to end.

    Args:
        device: where the run computes; CUDA's current device is a thread's own.
        poll: called while waiting; what it raises ends the waiting, not the work.

    Returns:
        a function that returns what ``work`` returned, or raises what it raised.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def body() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            outcome.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=body, name="reward", daemon=True).start()

    def wait() -> T:
        while not done.wait(LOOK):
            poll()
        if failure:
            raise failure[0]
        return outcome[0]

    return wait
