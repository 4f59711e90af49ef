"""The policy's weights sent to the workers of vLLM servers over a process group, without a file
(``rollout.transfer=gloo`` or ``nccl``); :mod:`ppocli.sampling.vllm.plugin.ppocli_receiver` takes
them there."""

import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch

from ppocli.config.schema import RolloutConfig
from ppocli.daemon import in_daemon
from ppocli.errors import SamplerError
from ppocli.models.transformers_internals import checkpoint_tensors
from ppocli.sampling.vllm.plugin.ppocli_receiver import broadcast, group_of, own_address
from ppocli.sampling.vllm.server import HOW_TO, LOOK, Lost, Server

log = logging.getLogger("ppocli")

SAYS_WHY = 2.0
"""seconds for a server to say why the connection to it has ended"""


@dataclass(slots=True)
class _Link:
    """This end of a connection to a server's workers."""

    name: str
    """that they know it by; others are of a run before, or of a server before"""
    group: Any
    """only this holds it: gloo hangs up when it is gone, and no sooner"""
    store: Any

    def close(self) -> None:
        """Hang up: workers that wait for more go on."""
        if isinstance(self.group, torch.distributed.ProcessGroupGloo):
            self.group = self.store = None
        elif self.group is not None:
            # what was begun would stay on the GPU, and torch's watchdog ends the process for it
            self.group.abort()


class GroupTransfer:
    """Weights that are broadcast to each server's workers, over a group of its own for each server:
    one that is lost doesn't keep the others waiting.

    Args:
        cfg: says which backend, and how long a server may take.
    """

    def __init__(self, cfg: RolloutConfig) -> None:
        self._backend, self._seconds = cfg.transfer, cfg.timeout
        self._links: dict[str, _Link] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def hold(self, lm: Any, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        """Take what is sent from now on, until it is let go."""
        self._tensors = {name: tensor.contiguous()
                         for name, tensor in checkpoint_tensors(lm, tensors).items()}

    def let_go(self) -> None:
        """Hold no weights, which may be copies of them all."""
        self._tensors = {}

    def prepare(self, server: Server) -> None:
        """Make sure that the server's workers can be reached, and are.

        Raises:
            Lost, SamplerError.
        """
        try:
            workers = server.call("ppocli_look")
        except Lost as error:
            if isinstance(error.__cause__, OSError):  # there was no answer
                raise
            server.ask("/health", timeout=LOOK)
            raise SamplerError(f"{server.url} takes weights from files only: its workers lack "
                               f"ppocli's extension ({error}).", where="rollout.transfer",
                               fix=HOW_TO) from error
        if any(one["broken"] for one in workers):
            raise Lost(f"{server.url} has a part of weights that were not sent to the end: it has "
                       "to be started anew")
        ours = _release(torch.__version__)
        if others := sorted({_release(one["torch"]) for one in workers} - {ours}):
            raise SamplerError(
                f"{server.url} runs torch {', '.join(others)} and this run {ours}: they may not "
                "understand each other.", where="rollout.transfer",
                fix="install the same release in both environments, or set rollout.transfer=files")
        link = self._links.get(server.url)
        if link is None or {one["joined"] for one in workers} != {link.name}:
            self._links.pop(server.url, None)
            self._links[server.url] = self._join(server, 1 + len(workers))

    def _join(self, server: Server, world: int) -> _Link:
        parts, name = urlsplit(server.url), secrets.token_hex(8)
        try:
            address = own_address(parts.hostname or "127.0.0.1", parts.port or 80)
            store = _store(address, world, self._seconds)
        except (OSError, RuntimeError) as error:
            raise Lost(f"{server.url} can't be sent weights: {error}") from error
        group = self._both(
            server, partial(_call, server, "ppocli_join", name=name, backend=self._backend,
                            address=address, port=store.port, world=world, seconds=self._seconds),
            partial(group_of, store, self._backend, address, 0, world, self._seconds))
        log.debug("joined the %d workers of %s over %s", world - 1, server.url, self._backend)
        return _Link(name, group, store)

    def send(self, server: Server) -> None:
        """Replace the server's weights by those that are held.

        Raises:
            Lost, SamplerError.
        """
        rows = [(name, str(one.dtype).removeprefix("torch."), list(one.shape))
                for name, one in self._tensors.items()]
        link = self._links[server.url]
        send = self._broadcast_by_nccl if self._backend == "nccl" else self._broadcast
        try:
            self._both(server, partial(_call, server, "ppocli_receive", name=link.name, rows=rows),
                       partial(send, link))
        except BaseException:
            self._links.pop(server.url).close()  # what has come through of it is not known
            raise

    def _broadcast(self, link: _Link) -> None:
        for tensor in self._tensors.values():
            broadcast(link.group, tensor.cpu())

    def _broadcast_by_nccl(self, link: _Link) -> None:
        device = next(iter(self._tensors.values())).device
        # a server that is lost must not hold up what this process computes
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for tensor in self._tensors.values():
                broadcast(link.group, tensor)
            stream.synchronize()

    def _both(self, server: Server, theirs: Callable[[], Any], ours: Callable[[], Any]) -> Any:
        """What our end comes to while the server is at its own; neither waits for one that
        failed."""
        ends = [in_daemon(theirs, f"asking {server.url}"), in_daemon(ours, f"to {server.url}")]
        if ends[1] in wait(ends, return_when=FIRST_EXCEPTION).done and ends[1].exception():
            wait(ends, SAYS_WHY)
        for end in ends:
            if end.done() and (error := end.exception()) is not None:
                error.__traceback__ = None  # its frames hold the group
                if isinstance(error, RuntimeError):  # so does torch tell of its connections
                    raise Lost(f"{server.url} did not take its weights: {error}") from error
                raise error
        return ends[1].result()


def _store(address: str, world: int, seconds: float) -> Any:
    """What the members of a group find each other by, which listens at this address alone."""
    with socket.create_server((address, 0), family=socket.getaddrinfo(address, 0)[0][0]) as place:
        port = place.getsockname()[1]
        return torch.distributed.TCPStore(
            address, port, world, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=seconds), master_listen_fd=place.detach())


def _call(server: Server, method: str, **words: Any) -> None:
    """Have each worker do something.

    Raises:
        Lost: one of them could not.
    """
    for answer in server.call(method, **words):
        if "error" in answer:
            raise Lost(f"{server.url} did not take its weights: {answer['error']}")


def _release(version: str) -> str:
    """The numbers of a release that mean another protocol."""
    return ".".join(version.split(".")[:2])
