"""HTTP requests to servers that a run depends on: with a deadline for the whole answer, a limit of
its size, and secrets from environment variables."""

import ipaddress
import os
import time
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ppocli.config.text import error_line
from ppocli.errors import ConfigError, PpocliError
from ppocli.runs.daemon import in_daemon

_GRACE = 0.3


class Client:
    """Requests to one host, from any number of threads.

    Args:
        url: of the host.
        timeout: maximum seconds of a request, from the connection to the end of the answer.
        headers: sent with each request.
        keep: number of connections that are kept open.

    Raises:
        ConfigError: the environment names a proxy or certificates that can't be used.
    """

    def __init__(self, url: str, *, timeout: float, headers: Mapping[str, str], keep: int) -> None:
        import httpx2

        self.timeout = timeout
        # no limit of connections, so that requests don't wait for those of abandoned answers;
        # servers close idle connections after 5 s, and a request must not use one then
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=keep,
                               keepalive_expiry=2.0)
        try:
            self._client = httpx2.Client(
                timeout=timeout, limits=limits,
                # a proxy would look for "localhost" on its own machine
                trust_env=not is_loopback(urlsplit(url).hostname or ""),
                # a compressed answer may become a thousand times larger
                headers={"Accept-Encoding": "identity", **headers})
        except Exception as error:  # of many kinds: no such file, no such protocol, no address
            raise ConfigError(
                f"{url} can't be reached through the proxy, or with the certificates, that the "
                f"environment names: {error_line(error)}",
                where="HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE, SSL_CERT_DIR",
                fix="correct the variable, or unset it") from error
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
    from ppocli.config import secrets  # the command line starts without OmegaConf

    secrets.SENT.add(value)  # hidden from now on: a server's answer may repeat it
    return value


def retry_after(answer: Any, most: float) -> float:
    """Seconds to wait by the header ``Retry-After``, at most ``most``; 0 without a number."""
    try:
        return min(float(answer.headers.get("Retry-After") or 0), most)
    except ValueError:
        return 0.0
