"""All collectives: what the processes of one run exchange.

Every process draws the same prompts, holds the same state between steps and decides alike, because
what differs (samples, loss terms, a failed write) is exchanged here. With one process each of these
is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

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
        """[world] values, one of each rank, in their order; pickled between processes of one run.
        """
        if self.world == 1:
            return [value]
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

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over ranks, on the CPU."""
        return self._reduce(values, "SUM")

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over ranks, on the CPU."""
        return self._reduce(values, "MAX")

    def most(self, count: int) -> int:
        """The largest count of any rank."""
        import torch

        return int(self.max(torch.tensor(count)))

    def _reduce(self, values: torch.Tensor, operation: str) -> torch.Tensor:
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
        """What ``work`` returns on rank 0, which alone runs it.

        Raises:
            PpocliError: that ``work`` raised, on all ranks. Any other exception ends rank 0 alone.
        """
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
        """What ``work`` returns here, once all ranks have done theirs.

        Raises:
            PpocliError: that ``work`` raised on some rank, on all ranks, naming rank and phase;
                memory that didn't suffice there only if nothing else went wrong.
            OutOfMemoryError: on this rank ``alone``: the others are still inside of a pass.
        """
        if self.world == 1:
            return work()
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
        """This rank's part of ``rows``, the same number on every rank.

        Rows are assigned round-robin, which spreads neighbours of similar length. If their number
        doesn't divide evenly, the last row is repeated: all ranks make the same number of passes.

        Returns:
            the rows, and how many of them (from the front) are this rank's own.
        """
        shard, size = list(rows[self.rank::self.world]), -(-len(rows) // self.world)
        return shard + list(rows[-1:]) * (size - len(shard)), len(shard)


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
