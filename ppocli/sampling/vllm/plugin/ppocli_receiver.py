"""Takes new weights inside a vLLM server: an extension of its workers (``rollout.transfer``).

vLLM's own Python finds this file by ``PYTHONPATH`` and ``--worker-extension-cls``; it needs nothing
but torch. The other end, in ppocli, makes its part of the process group by the same function.
"""

import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

Row = tuple[str, str, Sequence[int]]
"""name of a tensor, of its type, and its shape"""


def own_address(host: str, port: int) -> str:
    """The address by which this machine speaks to another one; nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    family, kind, proto, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as one:
        one.connect(place)
        return str(one.getsockname()[0])


def group_of(store: Any, backend: str, address: str, rank: int, world: int, seconds: float) -> Any:
    """This process's part of a group that torch's other groups know nothing of. Returns once all
    have theirs (gloo), or at the first broadcast (nccl).

    Args:
        store: of torch.distributed, the same for all.
        address: of this machine, as the others reach it.
        seconds: that the others may take, here and in each broadcast.
    """
    limit = timedelta(seconds=seconds)
    if backend == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = limit
        return distributed.ProcessGroupNCCL(store, rank, world, options)
    gloo: Any = distributed.ProcessGroupGloo
    own = gloo._Options()
    own._timeout = limit
    own._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, world, own)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Rank 0's values of a contiguous tensor.

    Raises:
        RuntimeError: another rank is gone, or took too long.
    """
    options = distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


class Receiver:
    """What ``/collective_rpc`` calls in each worker, which has ``rank``, ``device`` and
    ``reload_weights``. Answers are JSON."""

    ppocli_group: Any = None
    ppocli_on_host = True
    ppocli_joined = ""

    def ppocli_look(self) -> dict[str, Any]:
        """What the other end has to know before it begins."""
        return {"torch": str(torch.__version__), "rank": self.rank,  # type: ignore[attr-defined]
                "joined": self.ppocli_joined}

    def ppocli_join(self, name: str, backend: str, address: str, port: int, world: int,
                    seconds: float) -> None:
        """Join the group of a run; one of before is left.

        Args:
            name: that :meth:`ppocli_look` gives it.
            address, port: of the store at rank 0.
        """
        self.ppocli_group, self.ppocli_joined = None, ""
        store = distributed.TCPStore(address, port, world, is_master=False,
                                     timeout=timedelta(seconds=seconds))
        rank = 1 + self.rank  # type: ignore[attr-defined]
        self.ppocli_group = group_of(store, backend, own_address(address, port), rank, world,
                                     seconds)
        self.ppocli_on_host = backend == "gloo"
        self.ppocli_joined = name

    def ppocli_receive(self, rows: Sequence[Row]) -> None:
        """Replace the weights by those that rank 0 broadcasts in this order, under the names of
        their checkpoint format."""
        device = self.device  # type: ignore[attr-defined]

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in rows:
                tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype),
                                     device="cpu" if self.ppocli_on_host else device)
                broadcast(self.ppocli_group, tensor)
                yield name, tensor.to(device)

        self.reload_weights(weights_iterator=arriving())  # type: ignore[attr-defined]
