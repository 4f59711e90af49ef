"""A reward behind an address: what ``ppocli serve-reward`` runs.

Python's own HTTP server is enough: a thread a connection, and the reward is called by one of them
at a time unless it says, by an attribute ``thread_safe = True``, that several may call it at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import math
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ppocli.config.secrets import hide_secrets
from ppocli.errors import PpocliError, RewardError
from ppocli.rewards.check import Score
from ppocli.rewards.scoring import Reward
from ppocli.rewards.wire import WireError, decode_request, encode_scores
from ppocli.version import __version__

log = logging.getLogger(__name__)

SCORE, HEALTH = "/score", "/health"
MOST_WAITING = 64
"""requests that may wait for the reward; more are told to come again"""
LAST_WORDS = 10.0
"""seconds that a request under way has to be answered in when the server is to end"""
IDLE = 60.0
"""seconds that a connection may say nothing"""


class Refused(Exception):
    """A request that gets another answer than scores."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Service:
    """What is served."""

    reward: Reward
    """with ``skip_invalid``: whoever asks decides what a sample without score means"""
    max_body: int
    """bytes of the largest request"""
    token: str | None = None
    """asked for as ``Authorization: Bearer``; None: of nobody"""
    tokenizer: Any = None
    """handed to rewards that ask for one"""

    @property
    def thread_safe(self) -> bool:
        """Whether every reward says that several threads may call it at once."""
        return all(getattr(part.bound.call, "thread_safe", False) is True
                   for part in self.reward.parts)

    def paths(self) -> dict[str, Reward]:
        """Path -> the reward there: their weighted sum, and each of several by itself."""
        found = {SCORE: self.reward}
        if len(self.reward.parts) > 1:
            found.update({f"{SCORE}/{part.name}": replace(
                self.reward, parts=(replace(part, weight=1.0),)) for part in self.reward.parts})
        return found

    def score(self, reward: Reward, body: bytes) -> tuple[bytes, int]:
        """The body of the answer to a request's body, and how many samples it scores.

        Raises:
            Refused: 400 for a request of another form, 422 for columns that the reward lacks, 500
                where it failed.
        """
        try:
            request = decode_request(body, self.tokenizer)
        except WireError as problem:
            raise Refused(400, f"{problem}") from None
        try:
            reward.check_columns(list(request.columns))
        except RewardError as error:
            raise Refused(422, error.what) from None
        try:
            found = reward.score(request)
        except PpocliError as error:
            raise Refused(500, error.what) from None
        scores: list[Score] = []
        for index, valid in enumerate(found.valid):
            dense = None if found.dense is None else found.dense[index]
            scores.append(None if not valid else found.scores[index] if dense is None else dense)
        return encode_scores([None if isinstance(score, float) and math.isnan(score) else score
                              for score in scores]), len(request)


class RewardServer(ThreadingHTTPServer):
    """Listens from when it is made; ``serve_forever`` answers until ``poll`` raises."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, service: Service,
                 poll: Callable[[], None] = lambda: None) -> None:
        self.service, self.poll = service, poll
        self.requests = self.samples = 0
        self._turn = contextlib.nullcontext() if service.thread_safe else threading.Lock()
        self._busy, self._changed = 0, threading.Condition()
        self.rewards = service.paths()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def service_actions(self) -> None:
        """Called by ``serve_forever`` between connections; what it raises ends it."""
        self.poll()

    def answer(self, path: str, body: bytes) -> bytes:
        """Score one request, in its turn.

        Raises:
            Refused: too many wait already; or as :meth:`Service.score`.
        """
        with self._counted(), self._turn:
            answer, samples = self.service.score(self.rewards[path], body)
        with self._changed:
            self.requests, self.samples = self.requests + 1, self.samples + samples
        return answer

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            if self._busy >= MOST_WAITING:
                raise Refused(503, f"{MOST_WAITING} requests are waiting already")
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def finish(self) -> bool:
        """Wait a while for the requests under way; whether all were answered."""
        with self._changed:
            return self._changed.wait_for(lambda: self._busy == 0, LAST_WORDS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error; anything else is a bug and keeps its traceback."""
        gone = isinstance(sys.exception(), (ConnectionError, TimeoutError))
        log.log(logging.DEBUG if gone else logging.ERROR, "connection of %s ended", client_address,
                exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version = f"ppocli/{__version__}"
    timeout = IDLE

    def do_GET(self) -> None:
        if self.path == HEALTH:
            self._send(200, json.dumps({
                "status": "ok", "version": __version__, "rewards": list(self.server.rewards),
                "requests": self.server.requests, "samples": self.server.samples}).encode())
        else:
            self._refuse(Refused(405 if self.path in self.server.rewards else 404,
                                 f"POST samples to {SCORE}; {HEALTH} says how this server is"))

    def do_POST(self) -> None:
        try:
            self._allowed()
            body = self.rfile.read(self._length())
            self._send(200, self.server.answer(self.path, body))
        except Refused as refused:
            self._refuse(refused)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            log.exception("a bug of this server's, or of the reward's")
            self._refuse(Refused(500, f"{type(error).__name__}: {error}"))

    def _allowed(self) -> None:
        """Whether this request may be scored at all, by its head alone."""
        token, given = self.server.service.token, self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()
                                                         ):
            raise Refused(401, "the token is missing or wrong")
        if self.path not in self.server.rewards:
            raise Refused(404, f"there is no {self.path!r} here; there are: "
                          f"{', '.join(self.server.rewards)}")

    def _length(self) -> int:
        given = self.headers.get("Content-Length", "")
        if not given.isdecimal():
            raise Refused(411, "Content-Length is missing")
        if int(given) > self.server.service.max_body:
            raise Refused(413, f"{given} bytes are more than the {self.server.service.max_body} "
                          "that are allowed")
        return int(given)

    def _refuse(self, refused: Refused) -> None:
        text = hide_secrets(str(refused))
        # a client that only looks whether somebody is there is no news
        log.log(logging.WARNING if self.command == "POST" else logging.DEBUG,
                "%s %s: %d %s", self.command, self.path, refused.status, text)
        # the body may not have been read: what follows on this connection can't be told apart
        self.close_connection = True
        self._send(refused.status, json.dumps({"error": text}).encode())

    def _send(self, status: int, body: bytes) -> None:
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
