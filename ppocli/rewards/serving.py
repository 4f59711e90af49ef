"""The HTTP server of ``ppocli serve-reward``, which scores samples with a reward."""

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ppocli.config.secrets import hide_secrets
from ppocli.config.text import error_line
from ppocli.errors import PpocliError
from ppocli.rewards import reward_records
from ppocli.rewards.scoring import Reward
from ppocli.runs.daemon import in_daemon
from ppocli.version import __version__

log = logging.getLogger(__name__)

SCORE, HEALTH = "/score", "/health"
MOST_WAITING = 64
"""requests that may arrive or wait for the reward at once; others get status 503"""
MOST_CONNECTIONS = 256
"""requests on further connections get status 503"""
LAST_WAIT = 10
"""seconds that requests in progress may take when the server stops"""
IDLE = 60.0
"""seconds that any body may take to arrive"""
SLOWEST = 2**20
"""minimum bytes per second of a body, after the first ``IDLE`` seconds"""


class RewardServer:
    """Listens from its construction; :meth:`serve` answers until a signal or :meth:`stop`.

    Args:
        reward: with ``on_invalid=skip``: the client decides what a sample without score means.
        max_body: maximum bytes of a request.
        token: required as ``Authorization: Bearer``; None: no token is required.
        tokenizer: for rewards that take one.
        stop_requested: looked at every second; true ends :meth:`serve`.
    """

    def __init__(self, host: str, port: int, reward: Reward, *, max_body: int,
                 token: str | None = None, tokenizer: Any = None,
                 stop_requested: Callable[[], bool] = lambda: False) -> None:
        self.reward, self.max_body, self.token = reward, max_body, token
        self.tokenizer, self.stop_requested = tokenizer, stop_requested
        self.rewards = {SCORE: reward}
        """path -> reward: the weighted sum, and each of several rewards by itself"""
        if len(reward.parts) > 1:
            self.rewards |= {f"{SCORE}/{part.name}": Reward(
                [replace(part, weight=1.0)], reward.cfg, reward.splits) for part in reward.parts}
        self.requests = self.samples = self.waiting = 0
        self._turn: contextlib.AbstractAsyncContextManager[Any] = (
            contextlib.nullcontext() if reward.all_have("thread_safe") else asyncio.Lock())
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        app = Starlette(
            routes=[Route(HEALTH, self._health),
                    *(Route(path, self._score, methods=["POST"]) for path in self.rewards)],
            exception_handlers={HTTPException: self._refuse, ClientDisconnect: _gone,
                                Exception: _bug})
        self._server = uvicorn.Server(uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, log_level="error",
            access_log=False, server_header=False, limit_concurrency=MOST_CONNECTIONS + 1,
            timeout_graceful_shutdown=LAST_WAIT, callback_notify=self._look, timeout_notify=0))

    def serve(self) -> None:
        """Answer until SIGINT, SIGTERM or :meth:`stop`. A signal is raised again at the end."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End :meth:`serve`, from another thread."""
        self._server.should_exit = True

    async def _look(self) -> None:
        if self.stop_requested():
            self.stop()

    async def _health(self, request: Request) -> Response:
        return JSONResponse({
            "status": "ok", "version": __version__, "rewards": list(self.rewards),
            "requests": self.requests, "samples": self.samples})

    async def _score(self, request: Request) -> Response:
        length = self._checked_length(request)
        if self.waiting >= MOST_WAITING:
            raise HTTPException(503, f"{MOST_WAITING} requests are waiting already")
        self.waiting += 1
        try:
            body = await _read_body(request, length)
            async with self._turn:
                # a daemon: a reward that hangs must not keep the process from ending
                scores, count = await asyncio.wrap_future(in_daemon(
                    partial(self._scores, request.scope["path"], body), "reward"))
        finally:
            self.waiting -= 1
        self.requests, self.samples = self.requests + 1, self.samples + count
        return Response(scores, media_type="application/json")

    def _checked_length(self, request: Request) -> int:
        """The size of the body, by the head of the request."""
        header = request.headers.get("Authorization", "").encode()
        if self.token is not None and not hmac.compare_digest(
                header, f"Bearer {self.token}".encode()):
            raise HTTPException(401, "the token is missing or wrong")
        if not (length := request.headers.get("Content-Length", "")).isdecimal():
            raise HTTPException(411, "Content-Length is missing")
        if int(length) > self.max_body:
            raise HTTPException(413, f"{length} bytes are more than the {self.max_body} that are "
                                     "allowed")
        return int(length)

    def _scores(self, path: str, body: bytes) -> tuple[bytes, int]:
        """The body of the answer to a request, and its number of samples.

        Raises:
            HTTPException: 400 for a malformed request, 422 if it lacks columns that the reward
                needs, 500 if the reward failed.
        """
        reward, status = self.rewards[path], 400
        try:
            request = reward_records.decode_request(body, self.tokenizer)
            status = 422
            reward.check_columns(list(request.columns), steps=request.steps is not None)
            status = 500
            result = reward.score(request)
        except (reward_records.WireError, PpocliError) as error:
            raise HTTPException(status, str(error.args[0])) from None
        scores: Sequence[reward_records.Score] = result.dense or result.scores
        return reward_records.encode_scores(
            [score if valid else None for score, valid in zip(scores, result.valid, strict=True)]
        ), len(request)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, text = error.status_code, hide_secrets(error.detail)
        if status in (404, 405):
            text = f"POST samples to {', '.join(self.rewards)}; {HEALTH} shows this server's state"
        # requests that only look whether a server answers aren't worth a warning
        log.log(logging.WARNING if request.method == "POST" else logging.DEBUG,
                "%s %s: %d %s", request.method, request.scope["path"], status, text)
        # the body may be unread, so that the connection can't be used again
        return JSONResponse({"error": text}, status, {
            "Connection": "close", **({"Retry-After": "1"} if status == 503 else {})})


async def _read_body(request: Request, length: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(IDLE + length / SLOWEST):
            async for piece in request.stream():
                body += piece
                if len(body) > length:  # in chunks, of which Content-Length says nothing
                    raise HTTPException(413, f"the body has more than {length} bytes")
    except TimeoutError:
        raise HTTPException(408, "the body took too long to arrive") from None
    return bytes(body)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": hide_secrets(error_line(error))}, 500)
