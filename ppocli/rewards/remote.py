"""HTTP requests to servers that a run depends on; and the built-in reward ``http``: scores computed
by another process, GPU or machine.

    reward.fn=http reward.kwargs.url=http://127.0.0.1:8123/score

:mod:`ppocli.rewards.reward_records` describes requests and answers; ``ppocli serve-reward`` is a
server.
"""

import ipaddress
import logging
import os
import re
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import urlsplit

from ppocli.config import secrets
from ppocli.config.schema_training import LONGEST_WAIT
from ppocli.config.secrets import VARIABLE, why_no_url
from ppocli.config.text import error_line
from ppocli.config.user_code import shorten
from ppocli.errors import PpocliError, RewardError
from ppocli.rewards.resolve import wrong_argument
from ppocli.rewards.reward_records import (
    RewardRequest,
    WireError,
    decode_scores,
    encode_request,
    opening,
)
from ppocli.runs.daemon import in_daemon

log = logging.getLogger(__name__)

_GRACE = 0.3
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""seconds before the first retry, doubled before each further one, and at most"""
LEAST_ANSWER, A_SAMPLE, A_NUMBER = 2**20, 2**12, 64
"""maximum bytes of an answer: always, plus those per sample (its score and logs), plus those per
token (its number)"""
_TOKEN = "give the token that it asks for: reward.kwargs.token_env=VARIABLE"
_REMEDIES = {401: _TOKEN, 403: _TOKEN,
             404: "correct the path of reward.kwargs.url; ppocli serve-reward listens at /score",
             413: "send fewer samples at once: reward.kwargs.batch_size=N"}
_HEADER = re.compile(rf"\s*([A-Za-z0-9-]+)\s*:\s*({VARIABLE.pattern})\s*")


class Client:
    """Requests to one host, from any number of threads.

    Args:
        url: of the host.
        timeout: maximum seconds of a request, from the connection to the end of the answer.
        headers: sent with each request.
        keep: number of connections that are kept open.
    """

    def __init__(self, url: str, *, timeout: float, headers: Mapping[str, str], keep: int) -> None:
        import httpx2

        self.timeout = timeout
        # no limit of connections, so that requests don't wait for those of abandoned answers;
        # servers close idle connections after 5 s, and a request must not use one then
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=keep,
                               keepalive_expiry=2.0)
        self._client = httpx2.Client(
            timeout=timeout, limits=limits,
            # a proxy would look for "localhost" on its own machine
            trust_env=not is_loopback(urlsplit(url).hostname or ""),
            # a compressed answer may become a thousand times larger
            headers={"Accept-Encoding": "identity", **headers})
        weakref.finalize(self, self._client.close)

    def ask(self, method: str, url: str, body: bytes = b"", most: int = 0,
            timeout: float | None = None) -> Any:
        """The answer: its status, ``Retry-After``, ``Location``, and at most ``most`` + 1 bytes.

        Args:
            timeout: seconds, in place of the client's.

        Raises:
            TimeoutError: no whole answer in time; the server may still be at work on it.
            ConnectionError: the server can't be reached.
        """
        import httpx2

        seconds = timeout or self.timeout
        try:
            # httpx's own timeout starts again with every byte, but tells whether the connection
            # or the answer took too long
            return in_daemon(lambda: self._ask(method, url, body, most, seconds), f"asking {url}"
                             ).result(seconds + _GRACE)
        except (httpx2.ReadTimeout, httpx2.WriteTimeout, TimeoutError) as error:
            raise TimeoutError(f"{url} did not answer within {seconds:g} s.") from error
        except httpx2.TransportError as error:
            raise ConnectionError(f"{url} could not be reached: {error_line(error)}") from error

    def _ask(self, method: str, url: str, body: bytes, most: int, seconds: float) -> Any:
        content, until = bytearray(), time.monotonic() + seconds
        with self._client.stream(method, url, content=body, timeout=seconds,
                                 headers={"Content-Type": "application/json"}) as answer:
            for piece in answer.iter_raw() if most else ():
                content += piece
                if time.monotonic() > until:
                    raise TimeoutError
                if len(content) > most:
                    break
        kept = {name: value for name in ("Retry-After", "Location")
                if (value := answer.headers.get(name, "")).isascii()}
        return type(answer)(answer.status_code, headers=kept, content=bytes(content[:most + 1]))


def is_loopback(host: str) -> bool:
    """Whether an address or name stands for this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def from_environment(variable: str, header: str, key: str, error: type[PpocliError]) -> str:
    """The value of an environment variable, to be sent as a header.

    Raises:
        error: there is no such variable, or its value can't be sent.
    """
    value = os.environ.get(variable)
    if value is None:
        raise error(f"The environment has no variable {variable}, which is to be sent as {header}.",
                    where=key, fix=f"export {variable}=...")
    if not (value == value.strip() and value.isascii() and value.isprintable() and value):
        raise error(f"{variable} can't be sent as {header}: it is empty, or has characters beyond "
                    "ASCII, or white space at an end (it is not shown).", where=key,
                    fix=f"correct it: export {variable}=...")
    secrets.SENT.add(value)  # hidden from now on: a server's answer may repeat it
    return value


def retry_after(answer: Any, most: float) -> float:
    """Seconds to wait by the header ``Retry-After``, at most ``most``; 0 without a number."""
    try:
        return min(float(answer.headers.get("Retry-After") or 0), most)
    except ValueError:
        return 0.0


# The reward ---------------------------------------------------------------------------------------

class HttpReward:
    """Scores from a server for batches of samples.

    After connection errors and the statuses 429 and 5xx, a request is tried again, with growing
    pauses. After a timeout it isn't: the server may still be at work on it.

    Args:
        url: address that batches are posted to, http:// or https://.
        timeout: maximum seconds of a request, from the connection to the end of the answer.
        retries: number of further tries of a request.
        concurrency: requests at once; a chunk is split between them.
        batch_size: maximum samples per request (default: the chunk in ``concurrency`` parts).
        token_env: name of the environment variable that holds a token (``Authorization: Bearer``).
        headers: further headers, each as ``Name: VARIABLE``, an environment variable's name.

    Raises:
        RewardError: a wrong argument, a variable that isn't set, or a server that can't be reached.
    """

    waits = True
    """scoring waits instead of computing here, so it may run during generation"""
    reward_style = "request"

    def __init__(self, url: str, *, timeout: float = 60.0, retries: int = 3, concurrency: int = 1,
                 batch_size: int | None = None, token_env: str | None = None,
                 headers: Sequence[str] = ()) -> None:
        if (problem := why_no_url(url)) == "a secret":
            raise _unshown("url", "holds a secret", "reward.kwargs.token_env=VARIABLE sends one")
        if problem:
            raise wrong_argument("url", url, "an address such as http://127.0.0.1:8123/score")
        for name, value, lowest in (("retries", retries, 0), ("concurrency", concurrency, 1),
                                    ("batch_size", batch_size, 1)):
            if value is not None and (type(value) is not int or value < lowest):
                raise wrong_argument(name, value, f"a whole number from {lowest}")
        if type(timeout) not in (int, float) or not 0 < timeout <= LONGEST_WAIT:
            raise wrong_argument("timeout", timeout, f"seconds above 0, at most {LONGEST_WAIT:g}")
        self.url, self.display_name = url, f"http {url}"
        self.retries, self.concurrency, self.batch_size = retries, concurrency, batch_size
        self._client = Client(url, timeout=float(timeout), keep=concurrency,
                              headers=_secret_headers(token_env, headers))
        # any answer will do: a missing server is an error before models are loaded
        self._request("GET")

    def __call__(self, request: RewardRequest) -> list[Any]:
        """[N] scores from the server, in the order of the samples."""
        count = len(request)
        size = self.batch_size or -(-count // self.concurrency)
        parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        # its threads are daemons: a server that hangs must not keep the process from ending
        with ThreadPool(min(self.concurrency, len(parts))) as pool:
            answers = list(pool.imap(partial(self._scores, request), parts))
        return [score for scores in answers for score in scores]

    def _scores(self, request: RewardRequest, part: slice) -> list[Any]:
        """The scores of a part of the samples."""
        count = part.stop - part.start
        tokens = sum(len(ids) for ids in request.response_ids[part])
        most = LEAST_ANSWER + A_NUMBER * tokens + A_SAMPLE * count
        answer = self._request("POST", encode_request(request, part), most)
        try:
            if len(answer.content) > most:
                raise WireError(f"more than {most} bytes for {count} samples")
            return decode_scores(answer.content, count)
        except WireError as problem:
            raise RewardError(
                f"{self.url} answered 200 with {problem} (sample {part.start} to {part.stop - 1} "
                f"of {len(request)}).", where="reward.kwargs.url",
                fix='it must answer {"scores": [...]}, one per sample, in their order') from None

    def _request(self, method: str, body: bytes = b"", most: int = 0) -> Any:
        """The answer of status 200, or any to a GET; what may succeed later is tried again."""
        for attempt in range(self.retries + 1):
            pause, cause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE), None
            try:
                answer = self._client.ask(method, self.url, body, most)
                if method == "GET" or answer.status_code == 200:
                    return answer
                failed, fix = self._failure(answer)
                if answer.status_code < 500 and answer.status_code != 429:  # too many requests
                    raise RewardError(failed, where="reward.kwargs.url", fix=fix)
                pause = max(pause, retry_after(answer, LONGEST_PAUSE))
            except TimeoutError as error:
                if method == "GET":
                    return None  # it is slow, but it exists
                raise RewardError(
                    str(error), where="reward.kwargs.timeout", fix="make it faster, give smaller "
                    "parts (reward.kwargs.batch_size=N), or raise reward.kwargs.timeout") from error
            except ConnectionError as error:
                failed, cause = str(error), error
                fix = "start it (ppocli serve-reward), or correct reward.kwargs.url"
            if attempt < self.retries:
                log.warning("%s; trying again in %g s (%d of %d)", failed, pause, attempt + 1,
                            self.retries)
                time.sleep(pause)
        tries = f" ({self.retries + 1} times in a row)" if self.retries else ""
        raise RewardError(failed + tries, where="reward.kwargs.url", fix=fix) from cause

    def _failure(self, answer: Any) -> tuple[str, str]:
        """What an answer of another status than 200 says, and the fix."""
        status = answer.status_code
        fix = _REMEDIES.get(status, "look into the server's own messages")
        if location := answer.headers.get("Location"):
            fix = f"it points to {location}: correct reward.kwargs.url"
        return f"{self.url} answered {status}: {shorten(opening(answer.content))}", fix


def _secret_headers(token_env: str | None, headers: Sequence[str]) -> dict[str, str]:
    """Header -> value from the environment."""
    if not isinstance(headers, (list, tuple)):
        raise _unshown("headers", "is not a list", 'reward.kwargs.headers=["Name: VARIABLE"]')
    sources = [] if token_env is None else [("token_env", f"Authorization: {token_env}", "Bearer ")]
    values = {}
    for key, text, prefix in [*sources, *(("headers", text, "") for text in headers)]:
        if (matched := _HEADER.fullmatch(str(text))) is None:
            raise _unshown(key, "is not the name of a variable" if prefix else
                           "is not of the form 'Name: VARIABLE'",
                           "put the value into an environment variable and give its name")
        header, variable = matched.groups()
        values[header] = prefix + from_environment(variable, header, f"reward.kwargs.{key}",
                                                   RewardError)
    return values


def _unshown(key: str, what: str, fix: str) -> RewardError:
    return RewardError(f"reward.kwargs.{key} {what} (it is not shown).",
                       where=f"reward.kwargs.{key}", fix=fix)
