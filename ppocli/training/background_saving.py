"""Checkpoints that are written while training goes on: from a copy, in a thread, one at a time.

The thread computes nothing and talks to no other rank. It is no daemon: a process that ends by
itself waits for it. Signals are handled in the main thread, which hashing, writing and syncing
leave free.
"""

import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ppocli.errors import PpocliError, RunGoneError
from ppocli.estimate import check, parts
from ppocli.parallel.host_memory import host_room, resident_mib
from ppocli.parallel.ranks import is_out_of_memory
from ppocli.storage.atomic import TEMPORARY_PREFIX, disk_reason, make_dirs, walk_files
from ppocli.text import format_memory
from ppocli.training.checkpoint_writing import Contents, contents_of
from ppocli.training.saved_model import Tensors
from ppocli.training.state import TrainState
from ppocli.training.task import Task

log = logging.getLogger("ppocli")
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""left to the main thread, whose waiting they interrupt"""


class HostCopies:
    """Host memory that tensors are copied to, kept for the next copy: to get and touch it takes
    longer than to fill it. Copies of tensors on a GPU are in pinned memory."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], torch.Tensor] = {}
        """by file and name"""

    def copy(self, contents: Contents, scratch: Path) -> Contents:
        """The contents as they are now, of which nothing changes any more until the next call.

        Args:
            scratch: a folder in which small files can be put for a moment.

        Raises:
            OSError: they can't.
            RuntimeError: there is no memory.
        """
        with TemporaryDirectory(dir=scratch, prefix=TEMPORARY_PREFIX) as place:
            contents.saved.describe(Path(place))
            described = {name: Path(place, name).read_bytes() for name in walk_files(Path(place))}
        files = {file: self._copied(file, tensors, contents.fixed)
                 for file, tensors in contents.files.items()}
        for device in {tensor.device for tensors in contents.files.values()
                       for tensor in tensors.values() if not tensor.is_cpu}:
            torch.get_device_module(device).synchronize(device)
        return replace(contents, files=files, described=described)

    def _copied(self, file: str, tensors: Tensors, fixed: frozenset[int]) -> Tensors:
        """Copies, of what is tied one, as transformers expects of tied weights."""
        found: Tensors = {}
        made: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, tensor in tensors.items():
            if (same := _identity(tensor)) not in made:
                made[same] = self._copy_of((file, name), tensor, tensor.data_ptr() in fixed)
            found[name] = made[same]
        return found

    def _copy_of(self, key: tuple[str, str], tensor: torch.Tensor, fixed: bool) -> torch.Tensor:
        if fixed and tensor.is_cpu:
            return tensor
        held = self.held.get(key)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held if fixed else held.copy_(tensor, non_blocking=True)
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
        self.held[key] = held
        return held.copy_(tensor, non_blocking=True)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same of two tensors that are one."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def copied_bytes(contents: Contents) -> int:
    """Host memory that :class:`HostCopies` takes for them."""
    return sum(tensor.nbytes if tensor.is_cpu else parts.pinned_bytes(tensor.nbytes)
               for tensors in contents.files.values()
               for tensor in {_identity(one): one for one in tensors.values()}.values()
               if not tensor.is_cpu or tensor.data_ptr() not in contents.fixed)


class Saving:
    """The checkpoint of a run that is on its way to the disk, if one is."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._under_way: Future[None] | None = None
        self._told = False

    def begin(self, work: Callable[[], None]) -> None:
        """Start ``work`` in a thread; nothing may be under way."""
        assert self._under_way is None
        thread = ThreadPoolExecutor(1, "checkpoint", signal.pthread_sigmask,
                                    (signal.SIG_BLOCK, _STOPPING))
        self._under_way = thread.submit(work)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for what is under way.

        Raises:
            DiskError: or whatever else ended it.
        """
        if self._under_way is None:
            return
        try:
            self._under_way.result()
        finally:
            if self._under_way.done():
                self._under_way = None

    def meet(self) -> None:
        """As :meth:`wait`, for what has ended by now."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def settle(self) -> None:
        """Wait for the save in progress; a failure is only logged, since the run ends anyway."""
        try:
            self.wait()
        except RunGoneError:
            pass  # what ends the run says so
        except PpocliError as error:
            log.error("%s", error)

    def copy(self, task: Task, state: TrainState, folder: Path) -> Contents | None:
        """A copy of what a checkpoint holds, to be written while the session trains; None where
        training has to stop for the writing. What was copied before must be written.

        Args:
            state: as of :func:`write_checkpoint`.
            folder: the run's ``checkpoints/``.

        Raises:
            DiskError: it can't be made.
        """
        wanted, backend = task.cfg.checkpoint.background, task.backend
        if wanted == "never" or backend.ranks.world > 1 or backend.zero_stage > 0:
            return None
        contents = contents_of(task, state)
        if wanted == "auto" and not self._copies.held and not self._fits(copied_bytes(contents)):
            return None
        try:
            make_dirs(folder)
            return self._copies.copy(contents, folder)
        except Exception as error:
            if isinstance(error, OSError) or disk_reason(error, folder):
                return None  # whoever writes it now says what the disk says
            if not is_out_of_memory(error):
                raise
            self._copies.held.clear()
            self._tell("there was no memory for it")
            return None

    def _fits(self, needed: int) -> bool:
        """Whether a copy leaves enough memory for the passes of a step, as measured so far."""
        there, regrowth = host_room(), _regrowth()
        if there is not None and needed + regrowth <= check.CLOSE * there:
            return True
        self._tell("how much memory is free can't be told" if there is None else
                   f"it takes {format_memory(needed)}, a step {format_memory(regrowth)} more than "
                   f"now, and {format_memory(there)} are free")
        return False

    def _tell(self, why: str) -> None:
        if not self._told:
            log.info("Training stops while a checkpoint is written, for want of a copy: %s.", why)
        self._told = True


def _regrowth() -> int:
    """Bytes that this process has held beside what it holds now: the next step's passes will take
    them again."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(peak - round((resident_mib(os.getpid()) or 0.0) * 2**20), 0)
