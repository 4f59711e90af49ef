"""Whether the Hugging Face Hub can be reached, found out once and quickly.

Without a network, each library call to the Hub waits 20 to 50 seconds before it fails. Code that
loads something by name therefore asks :func:`hub_reachable` first and calls :func:`go_offline` if
the answer is no; local caches then answer at once.
"""

import functools
import os
import socket
import sys
from urllib.parse import urlsplit

from ppocli.runs.daemon import in_daemon

_SECONDS = 2.0
"""seconds that the Hub may take to answer"""
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})  # what huggingface_hub takes for true
_GATEWAY_ERRORS = frozenset({407, 502, 503, 504})  # the proxy speaking, not the Hub
_DEFAULT_PORTS = {"https": 443, "http": 80, "socks5": 1080, "socks5h": 1080, "socks4": 1080}


def offline_variable() -> str | None:
    """The environment variable that forbids downloads, in huggingface_hub's order of precedence."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if value := os.environ.get(name):
            return name if value.upper() in _TRUE else None
    return None


def hub_reachable() -> bool:
    """True if the Hub (``HF_ENDPOINT``, else huggingface.co) answers within two seconds.

    Probes at most once per process: a TCP connection, or, when the environment names a proxy for
    the Hub, one HTTP request through it. Probes nothing when the environment forbids downloading.
    """
    if offline_variable() is not None:
        return False
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        proxy = _proxy_for(endpoint)
    except ValueError:  # not a URL
        return False
    return _probe(endpoint, proxy)


def offline_hint() -> str:
    """The reason why nothing can be downloaded, as the end of a sentence."""
    if (name := offline_variable()) is not None:
        return f"{name}={os.environ[name]} forbids downloading"
    return "the Hub cannot be reached"


def go_offline() -> None:
    """Make this process behave as under ``HF_HUB_OFFLINE=1``; child processes are not touched.

    huggingface_hub asks its constant at each request, transformers asks huggingface_hub, and
    datasets copies the constant when it is imported, so that both orders of import are covered.
    """
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    if (datasets_config := sys.modules.get("datasets.config")) is not None:
        datasets_config.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        datasets_config.HF_DATASETS_OFFLINE = True  # type: ignore[attr-defined]


def _proxy_for(endpoint: str) -> str | None:
    from urllib.request import getproxies, proxy_bypass

    parts, proxies = urlsplit(endpoint), getproxies()
    if not parts.hostname or proxy_bypass(parts.hostname):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


@functools.cache
def _probe(endpoint: str, proxy: str | None) -> bool:
    def ask() -> bool:
        if proxy is None or urlsplit(proxy).scheme.startswith("socks"):
            parts = urlsplit(proxy or endpoint)
            port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 443)
            with socket.create_connection((parts.hostname or "", port), timeout=_SECONDS):
                return True
        import httpx2

        # certificates are judged later by the client that downloads
        answer = httpx2.head(endpoint, proxy=proxy, verify=False, timeout=_SECONDS)
        return answer.status_code not in _GATEWAY_ERRORS

    # Name resolution ignores socket timeouts and can take half a minute: only a thread bounds it.
    try:
        return in_daemon(ask, "hub-probe").result(_SECONDS)
    except Exception:  # of sockets and of the client, also when there is no answer in time
        return False
