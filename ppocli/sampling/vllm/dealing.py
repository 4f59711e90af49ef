"""Rows of a rollout handed to whichever server is free."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ppocli.errors import SamplerError
from ppocli.sampling.vllm.server import Answer, Lost, Server

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


class Dealing:
    """Rows under way at several servers. Those of a server that is lost go to the others.

    Args:
        servers: those that are there.
        ask: has a server answer a row.
        count: how many rows there are.
        each: most rows under way at one server.
        none_left: the error once all servers are lost.
    """

    def __init__(self, servers: Sequence[Server], ask: Callable[[Server, int], Answer], count: int,
                 each: int, none_left: Callable[[], SamplerError]) -> None:
        self._servers, self._ask, self._count = servers, ask, count
        self._none_left = none_left
        self._changed = threading.Condition()
        self._waiting, self._closed = deque(range(count)), False
        self._answers: dict[int, Answer] = {}
        self._failed: BaseException | None = None
        for server in servers:
            for _ in range(min(each, count)):
                # daemons: a server that hangs must not keep a process that wants to end
                threading.Thread(target=self._serve, args=[server], daemon=True,
                                 name=f"asking {server.url}").start()

    def take(self, rows: Iterable[int], poll: Callable[[], None]) -> list[Answer]:
        """The answers to these rows, once they are all there.

        Args:
            poll: called every now and then; may raise to stop.

        Raises:
            SamplerError: no server is left, or what one says makes no sense.
        """
        found = []
        with self._changed:
            for row in rows:
                while row not in self._answers:
                    poll()
                    if self._failed is not None:
                        raise self._failed
                    if all(server.lost for server in self._servers):
                        raise self._none_left()
                    self._changed.wait(POLL_SECONDS)
                found.append(self._answers[row])
        return found

    def close(self) -> None:
        """Ask for nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self, server: Server) -> None:
        while (row := self._next(server)) is not None:
            found: Answer | BaseException
            try:
                found = self._ask(server, row)
            except BaseException as error:
                found = error
            with self._changed:
                if isinstance(found, Lost):
                    if not server.lost:
                        log.warning("%s; its responses are asked for elsewhere", found)
                    server.lost = server.lost or str(found)
                    self._waiting.appendleft(row)
                elif isinstance(found, BaseException):
                    self._failed = found
                else:
                    self._answers[row] = found
                self._changed.notify_all()

    def _next(self, server: Server) -> int | None:
        with self._changed:
            while not (self._closed or server.lost or self._failed
                       or len(self._answers) == self._count):
                if self._waiting:
                    return self._waiting.popleft()
                self._changed.wait()
        return None
