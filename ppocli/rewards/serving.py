"""The HTTP server of ``ppocli serve-reward``, which scores samples with a reward.

Python's own HTTP server is enough: one thread per connection. Only one of them calls the reward at
a time, unless the reward has an attribute ``thread_safe = True``.
"""

import contextlib
import hmac
import io
import json
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any

from ppocli.config.secrets import hide_secrets
from ppocli.config.text import cut, error_line
from ppocli.distributed import host_memory
from ppocli.errors import PpocliError
from ppocli.rewards import reward_records, scoring
from ppocli.version import __version__

log = logging.getLogger(__name__)

SCORE, HEALTH = "/score", "/health"
MOST_WAITING = 64
"""requests that may wait for the reward; others get status 503"""
LAST_WORDS = 10.0
"""seconds that requests under way may take when the server stops"""
IDLE = 60.0
"""maximum seconds of silence on a connection, and for the head of a request to arrive"""
SLOWEST = 2**20
"""minimum bytes per second of a body, after the first ``IDLE`` seconds"""
MOST_CONNECTIONS = 256
MOST_HEAD = 2**16
"""maximum bytes of the head of a request"""
BODIES = 4
"""number of bodies of the largest size that are in memory at once; others are read after these have
been answered"""
_LARGE = 2**20


class Refused(Exception):
    """A request that gets an error in place of scores."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """Listens from its construction; ``serve_forever`` answers until ``poll`` raises.

    Args:
        reward: with ``on_invalid=skip``: the client decides what a sample without score means.
        max_body: maximum bytes of a request.
        token: required as ``Authorization: Bearer``; None: no token is required.
        tokenizer: for rewards that take one.
    """

    request_queue_size = 128
    server_bind = socketserver.TCPServer.server_bind
    """doesn't look up this machine's name, which may take seconds"""

    def __init__(self, host: str, port: int, reward: scoring.Reward, *, max_body: int,
                 token: str | None = None, tokenizer: Any = None,
                 poll: Callable[[], None] = lambda: None) -> None:
        self.reward, self.max_body, self.token = reward, max_body, token
        self.tokenizer, self.poll = tokenizer, poll
        self.rewards = {SCORE: reward}
        """path -> reward: the weighted sum, and each of several rewards by itself"""
        if len(reward.parts) > 1:
            self.rewards.update({f"{SCORE}/{part.name}": replace(
                reward, parts=(replace(part, weight=1.0),)) for part in reward.parts})
        self.requests = self.samples = 0
        self._places, self._counting = threading.Semaphore(MOST_WAITING), threading.Lock()
        self._connections = threading.Semaphore(MOST_CONNECTIONS)
        self._held, self._room = 0, threading.Condition()
        self._untidy = False
        """whether large bodies have been freed since memory was last returned to the system"""
        self._turn = (contextlib.nullcontext() if reward.all_say("thread_safe")
                      else threading.Lock())
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def service_actions(self) -> None:
        """Called by ``serve_forever`` between connections; an exception stops the server."""
        if self._untidy:
            self._untidy = False
            host_memory.give_back_memory()
        self.poll()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; close it if there are too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def hold(self, size: int) -> None:
        """Reserve memory for a body of ``size`` bytes; a negative size releases it.

        Raises:
            Refused: 503 if none was free for ``IDLE`` seconds.
        """
        most = BODIES * self.max_body
        with self._room:
            if not self._room.wait_for(lambda: size < 0 or self._held + size <= most, IDLE):
                raise Refused(503, f"{most} bytes of other requests are waiting already")
            self._held += size
            self._untidy |= size <= -_LARGE
            self._room.notify_all()

    def take_place(self) -> Callable[[], None]:
        """Count a request as under way; the returned function ends it.

        Raises:
            Refused: 503 if too many are waiting.
        """
        if not self._places.acquire(blocking=False):
            raise Refused(503, f"{MOST_WAITING} requests are waiting already")
        return self._places.release

    def answer(self, path: str, body: bytes) -> bytes:
        """The body of the answer to a request.

        Raises:
            Refused: 400 for a malformed request, 422 if it lacks columns that the reward needs, 500
                if the reward failed.
        """
        reward, status = self.rewards[path], 400
        try:
            with self._turn:
                request = reward_records.decode_request(body, self.tokenizer)
                status = 422
                reward.check_columns(list(request.columns), steps=request.steps is not None)
                status = 500
                result = reward.score(request)
            with self._counting:
                self.requests, self.samples = self.requests + 1, self.samples + len(request)
        except (reward_records.WireError, PpocliError) as error:
            raise Refused(status, error.args[0]) from None
        scores: Sequence[reward_records.Score] = result.dense or result.scores
        return reward_records.encode_scores([score if valid else None
                                      for score, valid in zip(scores, result.valid, strict=True)],
                                     result.logs)

    def finish(self) -> bool:
        """Wait up to ``LAST_WORDS`` seconds for requests under way; whether all were answered."""
        deadline = monotonic() + LAST_WORDS
        return all(self._places.acquire(timeout=max(0.0, deadline - monotonic()))
                   for _ in range(MOST_WAITING))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error: a bug with its traceback, a client that went away for debugging only."""
        gone = isinstance(sys.exception(), (ConnectionError, TimeoutError))
        log.log(logging.DEBUG if gone else logging.ERROR, "connection of %s ended", client_address,
                exc_info=True)


class _Arriving(io.RawIOBase):
    """A client's data, limited in bytes and by a deadline for all of them together."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._left, self._until = connection, 0, 0.0

    def expect(self, size: int, seconds: float) -> None:
        """Accept ``size`` bytes from now on, within ``seconds`` in all."""
        self._left, self._until = size, monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(1e-3, self._until - monotonic()))
        size = self._connection.recv_into(memoryview(buffer)[:max(0, self._left)])
        self._left -= size
        return size


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version = f"ppocli/{__version__}"

    def setup(self) -> None:
        super().setup()
        self._arriving = _Arriving(self.connection)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        self._arriving.expect(MOST_HEAD, IDLE)
        super().handle_one_request()

    def do_GET(self) -> None:
        if self.path == HEALTH:
            self._send(200, json.dumps({
                "status": "ok", "version": __version__, "rewards": list(self.server.rewards),
                "requests": self.server.requests, "samples": self.server.samples}).encode())
        else:
            self._refuse(Refused(405 if self.path in self.server.rewards else 404,
                                 f"POST samples to {SCORE}; {HEALTH} shows this server's state"))

    def do_POST(self) -> None:
        with contextlib.ExitStack() as under_way:
            try:
                self._allowed()
                body = self._body(under_way)
                under_way.callback(self.server.take_place())
                self._send(200, self.server.answer(self.path, body))
            except Refused as refused:
                self._refuse(refused)
            except (ConnectionError, TimeoutError):
                raise
            except Exception as error:
                log.exception("a bug of this server's, or of the reward's")
                self._refuse(Refused(500, error_line(error)))

    def _allowed(self) -> None:
        """Refuse a request by its head: a wrong token or path."""
        token, header = self.server.token, self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()
                                                         ):
            raise Refused(401, "the token is missing or wrong")
        if self.path not in self.server.rewards:
            raise Refused(404, f"there is no {self.path!r} here; there are: "
                          f"{', '.join(self.server.rewards)}")

    def _body(self, under_way: contextlib.ExitStack) -> bytes:
        """The body; its memory is reserved until the request is answered."""
        if not (length_text := self.headers.get("Content-Length", "")).isdecimal():
            raise Refused(411, "Content-Length is missing")
        # int() refuses thousands of digits
        if len(length_text) > 18 or int(length_text) > self.server.max_body:
            raise Refused(413, f"{cut(length_text, 18)} bytes are more than the "
                          f"{self.server.max_body} that are allowed")
        length = int(length_text)
        self.server.hold(length)
        under_way.callback(self.server.hold, -length)
        self._arriving.expect(length, IDLE + length / SLOWEST)
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the client has left")
        return body

    def _refuse(self, refused: Refused) -> None:
        text = hide_secrets(str(refused))
        # requests that only look whether a server answers aren't worth a warning
        log.log(logging.WARNING if self.command == "POST" else logging.DEBUG,
                "%s %s: %d %s", self.command, self.path, refused.status, text)
        # the body may be unread, so the next request on this connection couldn't be found
        self.close_connection = True
        self._send(refused.status, json.dumps({"error": text}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.connection.settimeout(IDLE)  # for the whole answer
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The base class would print a line for each request."""
        log.debug(format, *args)
