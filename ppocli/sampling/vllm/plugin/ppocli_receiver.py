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
    """Rank 0's values of a contiguous tensor; over nccl they are there once the current stream is
    that far.

    Raises:
        RuntimeError: another rank is gone, or took too long.
    """
    options = distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


class Receiver:
    """What ``/collective_rpc`` calls in each worker, which has ``rank``, ``device`` and
    ``reload_weights``. Answers are JSON. What goes wrong is an answer, too: where a worker raises,
    vLLM leaves those of the others lying about for the next question."""

    ppocli_group: Any = None
    ppocli_on_host = True
    ppocli_joined = ""
    ppocli_broken = False

    def ppocli_look(self) -> dict[str, Any]:
        """What the other end has to know before it begins. ``broken``: a transfer has ended early,
        after which vLLM's layers take no other."""
        return {"torch": str(torch.__version__), "joined": self.ppocli_joined,
                "broken": self.ppocli_broken}

    def ppocli_join(self, name: str, backend: str, address: str, port: int, world: int,
                    seconds: float) -> dict[str, str]:
        """Join the group of a run; one of before is left.

        Args:
            name: that :meth:`ppocli_look` gives it.
            address, port: of the store at rank 0.
        """
        self.ppocli_group, self.ppocli_joined = None, ""
        rank = 1 + self.rank  # type: ignore[attr-defined]
        try:
            store = distributed.TCPStore(address, port, world, is_master=False,
                                         timeout=timedelta(seconds=seconds))
            if store.add(f"rank {rank}", 1) > 1:
                raise RuntimeError("data parallel servers take rollout.transfer=files only")
            self.ppocli_group = group_of(store, backend, own_address(address, port), rank, world,
                                         seconds)
        except Exception as error:
            return {"error": str(error)}
        self.ppocli_on_host, self.ppocli_joined = backend == "gloo", name
        return {}

    def ppocli_receive(self, name: str, rows: Sequence[Row]) -> dict[str, str]:
        """Replace the weights by those that rank 0 of the group ``name`` broadcasts in this order,
        under the names of their checkpoint format."""
        if name != self.ppocli_joined:
            return {"error": "another run has taken the server"}

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for row, dtype, shape in rows:
                tensor = torch.empty(
                    tuple(shape), dtype=getattr(torch, dtype),
                    device="cpu" if self.ppocli_on_host else
                    self.device)  # type: ignore[attr-defined]
                broadcast(self.ppocli_group, tensor)
                yield row, tensor

        self.ppocli_broken = True
        try:
            self.reload_weights(weights_iterator=arriving())  # type: ignore[attr-defined]
        except Exception as error:
            self.ppocli_group, self.ppocli_joined = None, ""
            return {"error": str(error)}
        self.ppocli_broken = False
        return {}
