"""All collectives: what the processes of one run exchange, how they stop together, and what each
reports to the process that started it.

Every process draws the same prompts, holds the same state between steps and decides alike, because
what differs (samples, loss terms, a failed write) is exchanged here. With one process each of these
is the identity.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ppocli.distributed.launchers import my_rank
from ppocli.errors import OutOfMemoryError, PpocliError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory",
              "DefaultCPUAllocator: not enough memory", "CUBLAS_STATUS_ALLOC_FAILED",
              "CUDA error: out of memory")
"""texts of torch's RuntimeErrors that mean out of memory"""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run. All methods must be called by every rank in step."""

    rank: int = 0
    world: int = 1
    host_group: Any = None
    """gloo group for objects and CPU tensors, whatever the devices talk over; None with world 1"""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes to the run folder and to the terminal."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """[world] values, one of each rank in their order; pickled between processes of one run."""
        return [value] if self.world == 1 else self._gathered(value)

    def _gathered(self, value: T) -> list[T]:
        import torch

        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value, group=self.host_group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self.world == 1:
            return value
        import torch

        box: list[Any] = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def most(self, count: int) -> int:
        """The largest count of any rank."""
        import torch

        return int(self.reduce(torch.tensor(count), "MAX"))

    def reduce(self, values: torch.Tensor, operation: Literal["SUM", "MAX"]) -> torch.Tensor:
        """Element-wise sum or maximum over ranks, on the CPU."""
        import torch

        result = values.detach().cpu().clone()
        if self.world > 1:
            torch.distributed.all_reduce(result, group=self.host_group,
                                         op=getattr(torch.distributed.ReduceOp, operation))
        return result

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag))

    def first_does(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on rank 0, which alone runs it; all ranks raise its PpocliError."""
        return work() if self.world == 1 else self._first_for_all(work)

    def _first_for_all(self, work: Callable[[], T]) -> T:
        """As :meth:`first_does`, of several ranks. Any other exception ends rank 0 alone."""
        done: Any = None
        if self.first:
            try:
                done = work(), None
            except PpocliError as error:
                done = None, error
        result, failed = self.broadcast(done)
        if failed is not None:
            raise failed
        return result

    def all_do(self, work: Callable[[], T], phase: str) -> T:
        """What ``work`` returns here, once all ranks have done theirs; see :meth:`_together`."""
        return work() if self.world == 1 else self._together(work, phase)

    def _together(self, work: Callable[[], T], phase: str) -> T:
        """As :meth:`all_do`, of several ranks.

        Raises:
            PpocliError: that ``work`` raised on some rank, on all ranks, naming rank and phase;
                memory that didn't suffice there only if nothing else went wrong.
            OutOfMemoryError: on this rank ``alone``: the others are still inside of a pass.
        """
        failed: PpocliError | None = None
        result: Any = None
        try:
            result = work()
        except PpocliError as error:
            if isinstance(error, OutOfMemoryError) and error.alone:
                raise
            failed = error.reworded(what=f"rank {self.rank}, {phase}: {error.what}")
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed = OutOfMemoryError(
                f"rank {self.rank}, {phase}: out of memory", where="ppo.chunk_size, "
                "ppo.micro_batch_size", fix="set the smaller of them lower")
        if errors := [error for error in self.gather(failed) if error is not None]:
            raise min(errors, key=lambda error: isinstance(error, OutOfMemoryError))
        return result

    def share(self, rows: Sequence[int]) -> tuple[list[int], int]:
        """This rank's part of ``rows``, and how many of them, from the front, are its own. Rows are
        assigned round-robin, which spreads neighbours of similar length. Where they don't divide
        evenly the last is repeated, so that all ranks make the same number of passes."""
        shard, size = list(rows[self.rank::self.world]), -(-len(rows) // self.world)
        return shard + list(rows[-1:]) * (size - len(shard)), len(shard)


# Stopping together --------------------------------------------------------------------------------

class StopRequested(BaseException):
    """Raised by :meth:`StopFlag.check`. Not an ``Exception``, as ``KeyboardInterrupt`` isn't:
    code that survives failing trackers or rewards must not survive this.

    Args:
        signal_number: ``SIGINT`` or ``SIGTERM`` (a hang-up counts as ``SIGTERM``).
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class StopFlag:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self) -> None:
        self.requested: int | None = None
        """the first signal's number; stays set, also inside :meth:`defer`"""
        self._deferred = 0
        self.ranks = Ranks()
        """the processes that have to stop together; set once they have met"""

    def request(self, signal_number: int) -> None:
        """Ask for a stop; only the first request counts."""
        if self.requested is None:
            self.requested = signal_number

    def check(self) -> None:
        """Raise :class:`StopRequested` if a stop was requested and isn't deferred. Several ranks
        stop only where they :meth:`meet`, or some would be left in a collective."""
        if self.requested is not None and not self._deferred and self.ranks.world == 1:
            raise StopRequested(self.requested)

    def meet(self) -> None:
        """As :meth:`check`, by all ranks in step: a signal that one of them got stops all."""
        if self.ranks.world > 1:
            self._meet_others()
        self.check()

    def _meet_others(self) -> None:
        signal_number = max(self.ranks.gather(self.requested or 0))
        if signal_number and not self._deferred:
            self.request(signal_number)
            raise StopRequested(signal_number)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Inside the block ``check`` doesn't raise: for a unit of work that must be finished, such
        as the save made because of the stop. Leaving the block raises nothing by itself."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1


def interleave(shares: Sequence[Sequence[T]]) -> list[T]:
    """Items that :meth:`Ranks.share` assigned round-robin, a list of each rank, in their original
    order."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch says that a device, or on a CPU the host, has no memory left."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY))


def is_lost_neighbour(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone or doesn't answer: never the cause of
    what happened, only its consequence here."""
    import torch

    if isinstance(error, torch.distributed.DistError):
        return True
    # gloo raises plain RuntimeErrors that name their place in its sources, save those of
    # operations that had begun when another one waited too long
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("gloo", "Application timeout caused pair closure"))


# Reports of ranks that ppocli has started, in files that the process reads that started them -----

@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a rank ended. The rank writes it, and the process that started it reads it."""

    rank: int
    code: int
    """the exit code the command should end with"""
    message: str = ""
    """of the error, empty if there was none"""
    trace: str = ""
    """traceback of an unexpected exception"""
    at: float = field(default_factory=time.time)
    """seconds since the epoch, to find the first failure"""
    phase: str = ""
    """where it was, as ``step 3, optimize``"""
    lost: bool = False
    """whether it only reports that another rank is gone or doesn't answer"""
    error_code: str = PpocliError.code
    """kind of the error, see :mod:`ppocli.errors`"""


def outcome_of(rank: int, work: Callable[[], object]) -> RankOutcome:
    """Run ``work`` and return how it ended: errors of all kinds become an outcome; its result is
    dropped."""
    try:
        work()
    except PpocliError as error:
        return RankOutcome(rank, error.exit_code, str(error), error_code=error.code)
    except KeyboardInterrupt:
        return RankOutcome(rank, 128 + signal.SIGINT, "interrupted")
    except SystemExit as leaving:
        return RankOutcome(rank, leaving.code if isinstance(leaving.code, int)
                           else int(leaving.code is not None))
    except Exception as error:
        return RankOutcome(rank, 1, f"{type(error).__name__}: {error}", traceback.format_exc(),
                           lost=is_lost_neighbour(error))
    return RankOutcome(rank, 0)


class _Reports:
    """Of this process."""

    folder: Path | None = None
    phase = ""


def report_to(folder: str) -> None:
    """Report to the process that started this rank, in files of this folder."""
    _Reports.folder = Path(folder)


def _report(name: str, text: str) -> None:
    if (folder := _Reports.folder) is not None:
        with suppress(OSError):  # a full disk for temporary files is no reason to end
            (folder / f"{name}-{my_rank()}").write_text(text, encoding="utf-8")


def announce() -> None:
    """Report this rank's pid: from now on it can receive signals."""
    _report("pid", str(os.getpid()))


def note_phase(phase: str) -> None:
    """Record what this rank is doing, in case it never reports again."""
    _Reports.phase = phase
    if _Reports.folder is not None:
        _report("phase", phase)


def my_phase() -> str:
    """The phase that this process is in; empty before the first."""
    return _Reports.phase


def write_outcome(outcome: RankOutcome) -> None:
    """Report a rank's outcome to the process that started it."""
    from ppocli.config.secrets import safe_text  # the command line starts without OmegaConf

    redacted = replace(outcome, message=safe_text(outcome.message), trace=safe_text(outcome.trace))
    assert _Reports.folder is not None
    try:
        (_Reports.folder / f"outcome-{outcome.rank}").write_text(json.dumps(asdict(redacted)),
                                                                 encoding="utf-8")
    except OSError:  # the disk is full: print it instead
        sys.stderr.write(f"{redacted.trace}rank {redacted.rank}: {redacted.message}\n")


def read_reports(folder: Path, name: str) -> dict[int, str]:
    """The newest report of each rank.

    Args:
        name: ``pid``, ``phase`` or ``outcome``.
    """
    reports = {}
    for path in folder.glob(f"{name}-*"):
        with suppress(OSError, ValueError):
            reports[int(path.name.rpartition("-")[2])] = path.read_text(encoding="utf-8")
    return reports


def read_outcomes(folder: Path) -> list[RankOutcome]:
    """The outcomes of the ranks, the earliest first."""
    outcomes = []
    for text in read_reports(folder, "outcome").values():
        with suppress(ValueError, TypeError):
            outcomes.append(RankOutcome(**json.loads(text)))
    return sorted(outcomes, key=lambda outcome: outcome.at)
