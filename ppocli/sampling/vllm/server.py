"""vLLM servers: one, as its routes see it; and rows of a rollout handed to whichever is free."""

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ppocli.config.schema import RolloutConfig
from ppocli.config.user_code import shorten
from ppocli.errors import SamplerError
from ppocli.models.trunk import Vocabulary
from ppocli.rewards.remote import Client, from_environment, retry_after

log = logging.getLogger(__name__)

ANSWER, A_TOKEN = 2**20, 2**10
"""bytes that an answer may have at any rate, and those for each token with its logprob"""
NEVER = -1e9
"""what is added to the logits of ids that must not be sampled"""
BUSY, TRIES, LONGEST_PAUSE = (429, 503), 4, 30.0
"""statuses that are tried again, how often, and the most seconds before"""
LOOK = 10.0
"""seconds for an answer that needs no work"""
POLL_SECONDS = 0.1
HOW_TO = "start it as `ppocli vllm-command` with this run's words prints it"
_REMEDIES = {401: "rollout.token_env=VARIABLE names the variable that holds its token",
             404: f"{HOW_TO}; the routes are those of vLLM 0.32"}


class Lost(Exception):
    """A server that can't be used any more, and why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as a server gave it."""

    ids: list[int]
    logprobs: list[float]
    """of each token under what it was drawn from"""
    finished: bool
    """whether a stop rule ended it"""
    versions: list[str]
    """of the weights, in the order of their tokens"""


class Server:
    """A server's address, and what has become of it."""

    def __init__(self, url: str, cfg: RolloutConfig, vocabulary: Vocabulary | None = None) -> None:
        token = cfg.token_env and from_environment(cfg.token_env, "Authorization",
                                                   "rollout.token_env", SamplerError)
        self.url, self.lost = url.rstrip("/"), ""
        """why it can't be used"""
        absent = [] if vocabulary is None else vocabulary.absent
        self._rows, self._absent = 2**31 if vocabulary is None else vocabulary.rows, set(absent)
        self._bias = {"logit_bias": dict.fromkeys(map(str, absent), NEVER)} if absent else {}
        """of ids without a token, which the server's model has rows for"""
        self._client = Client(url, timeout=cfg.timeout, keep=cfg.concurrency,
                              headers={"Authorization": f"Bearer {token}"} if token else {})

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, most: int = ANSWER,
            timeout: float | None = None) -> Any:
        """The JSON that a route answers to a GET, or to a POST of ``body``.

        Raises:
            Lost: the server is away, too slow or broken.
            SamplerError: the request is refused, or the answer makes no sense.
        """
        method, sent = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        for attempt in range(TRIES):
            try:
                answer = self._client.ask(method, self.url + path, sent, most, timeout)
            except TimeoutError as error:
                raise Lost(str(error)) from error
            except ConnectionError as error:
                if attempt == 0:  # vLLM closes a connection behind an error without saying so
                    continue
                raise Lost(str(error)) from error
            status, content = answer.status_code, answer.content
            reply = f"{self.url}{path} answered {status}"
            if status not in BUSY or attempt == TRIES - 1:
                break
            pause = max(2.0**attempt, retry_after(answer, LONGEST_PAUSE))
            log.warning("%s; trying again in %g s", reply, pause)
            time.sleep(pause)
        if status >= 500 or status in BUSY:
            raise Lost(f"{reply}: {_message(content)}")
        if status != 200:
            raise _refused(f"{reply}: {_message(content)}", _REMEDIES.get(status, HOW_TO))
        if len(content) > most:
            raise _refused(f"{reply} with more than {most} bytes.")
        try:
            return json.loads(content or b"null")
        except (ValueError, RecursionError):
            raise _refused(f"{reply} with what is no JSON: {_message(content)}") from None

    def check(self, name: str, tokens: int) -> None:
        """Make sure that the run's own model is served, at its length.

        Args:
            name: that :func:`~ppocli.sampling.vllm.server_process.served_name` gives it.
            tokens: of the longest prompt and response together.

        Raises:
            Lost, SamplerError.
        """
        listing = self.ask("/v1/models", timeout=LOOK)
        try:
            models = {str(one["id"]): int(one.get("max_model_len") or 0) for one in listing["data"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _refused(f"{self.url} answered no list of models ({error!r}): "
                           f"{shorten(json.dumps(listing))}") from None
        if name not in models:
            raise _refused(f"{self.url} serves {', '.join(models) or 'no model'}; this run's is "
                           f"{name}.")
        if models[name] < tokens:
            raise _refused(f"{self.url} takes {models[name]} tokens; the longest prompt and "
                           f"response have {tokens}.")

    def holds(self, version: str) -> bool:
        """Whether it has this version of the weights."""
        with suppress(Lost):
            info = self.ask("/weight_info", timeout=LOOK)
            return isinstance(info, dict) and info.get("weight_version") == version
        return False

    def load(self, send: Callable[[], None], version: str) -> None:
        """Replace the weights, and forget all that was made by others.

        Args:
            send: gives them to the server.

        Raises:
            Lost, SamplerError.
        """
        self.ask("/pause?mode=abort", {})  # what a run has left that was killed
        send()
        done = self.ask("/reset_prefix_cache", {})
        if not (isinstance(done, dict) and done.get("success")):
            raise Lost(f"{self.url} could not forget its prefix cache")
        self.ask("/update_weight_version", {"new_version": version})
        self.ask("/resume", {})
        self.lost = ""

    def call(self, method: str, **words: Any) -> list[Any]:
        """What a method of each of its workers returns.

        Raises:
            Lost, SamplerError.
        """
        reply = self.ask("/collective_rpc", {"method": method, "kwargs": words})
        results = reply.get("results") if isinstance(reply, dict) else None
        return results if isinstance(results, list) else []

    def generate(self, ids: Sequence[int], params: Mapping[str, Any]) -> Answer:
        """One response to a prompt.

        Args:
            params: fields of vLLM's ``SamplingParams``.

        Raises:
            Lost, SamplerError.
        """
        limit = int(params["max_tokens"])
        reply = self.ask("/inference/v1/generate", most=ANSWER + A_TOKEN * limit, body={
            "token_ids": list(ids),
            "sampling_params": {"n": 1, "logprobs": 0, **self._bias, **params}})
        try:
            choice, = reply["choices"]
            tokens = [int(one) for one in choice["token_ids"]]
            content, reason = choice["logprobs"]["content"], choice["finish_reason"]
            logprobs = [float(one["logprob"]) for one in content]
            versions = [str(one["version"]) for one in choice["weight_versions"]]
            same = [one["token_id"] for one in content] == tokens
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _refused(f"{self.url} answered no response with logprobs and weight versions "
                           f"({error!r}): {shorten(json.dumps(reply))}") from None
        if reason == "abort":
            raise _refused(f"{self.url} has broken a response off: somebody else uses it.",
                           "give each run servers of its own")
        if not same or not 0 < len(tokens) <= limit or (reason != "stop" and len(tokens) < limit):
            raise _refused(f"{self.url} answered {len(tokens)} tokens of at most {limit} with "
                           f"{len(logprobs)} logprobs ({reason}).")
        for one, logprob in zip(tokens, logprobs, strict=True):
            # NaN is in no range; what is certain may be rounded to a little more than 0
            if (one in self._absent or not 0 <= one < self._rows
                    or not -math.inf < logprob < 1e-2):
                raise _refused(f"{self.url} answered token {one} with logprob {logprob}, which its "
                               "model can't have said.")
        return Answer(tokens, logprobs, reason == "stop", versions)


def _refused(what: str, fix: str = HOW_TO) -> SamplerError:
    return SamplerError(what, where="rollout.urls", fix=fix)


def _message(content: bytes) -> str:
    """What an answer says went wrong."""
    text = content.decode(errors="replace")
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"] or text)
    return shorten(text) or "nothing"


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
        for _ in range(min(each, count)):
            for server in servers:  # in turn: fewer rows than one could take are split evenly too
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
        answers = []
        with self._changed:
            for row in rows:
                while row not in self._answers:
                    poll()
                    if self._failed is not None:
                        raise self._failed
                    if all(server.lost for server in self._servers):
                        self._closed = True
                        raise self._none_left()
                    self._changed.wait(POLL_SECONDS)
                answers.append(self._answers[row])
        return answers

    def close(self) -> None:
        """Ask for nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self, server: Server) -> None:
        while (row := self._next(server)) is not None:
            result: Answer | BaseException
            try:
                result = self._ask(server, row)
            except BaseException as error:
                result = error
            with self._changed:
                if isinstance(result, Lost):
                    if not server.lost:
                        log.warning("%s; its responses are asked for elsewhere", result)
                    server.lost = server.lost or str(result)
                    self._waiting.appendleft(row)
                elif isinstance(result, BaseException):
                    self._failed = result
                else:
                    self._answers[row] = result
                self._changed.notify_all()

    def _next(self, server: Server) -> int | None:
        with self._changed:
            while not (self._closed or self._failed or len(self._answers) == self._count):
                if self._waiting and not server.lost:
                    return self._waiting.popleft()
                # one that is lost may be back before rows that were asked for ahead are wanted
                self._changed.wait(POLL_SECONDS if server.lost else None)
        return None
