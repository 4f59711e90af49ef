"""HTTP: servers that answer a run with anything at any pace, and clients that send ``ppocli
serve-reward`` anything. A run gets its scores or a reward error within its time and little memory;
a server goes on serving the others."""

import atexit
import json
import random
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import runs
from helpers import request_of
from warm import Process

from tools.soak.cases import ROOT  # first: it makes the tests' helpers importable

TIMEOUT, COUNT = 1.0, 5
SLACK = 2.5
"""seconds beyond a client's timeout: connecting, a busy machine"""
MOST_MEMORY = 200 * 2**20
"""bytes that the peak of the client's memory may grow by over all cases"""

SCORES = json.dumps({"scores": [0.5] * COUNT}).encode()
BODIES = (
    SCORES, SCORES, b"", b"{", b"null", b"[]", b"[1,2,3,4,5]", b"{\"scores\": null}", b"\xff" * 99,
    b"[" * 100_000, b"{\"scores\": [" + b"1e999," * 4 + b"1]}", b"{\"scores\": [NaN,1,2,3,4]}",
    b"{\"scores\": [" + b"[1]," * 4 + b"[2]]}", b"[" + b"9" * 5000 + b",1,2,3,4]",
    b"{\"error\": \"\\u001b[2J" + b"e" * 5000 + b"\"}", b"<html>502</html>", b"{\"scores\": {}}",
    b"[\"1\",\"2\",\"3\",\"4\",\"5\"]", b"[true,true,true,true,true]", b"x" * 3_000_000)
STATUSES = ("200 OK",) * 6 + ("204 No Content", "206 Partial", "301 Moved", "302 Found", "400 Bad",
                              "401 No", "404 None", "413 Large", "418 Teapot", "500 Oops",
                              "503 Busy", "999 ?", "abc", "")
HEADERS = (b"", b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n", b"X: " +
           b"y" * 70_000 + b"\r\n", b"Location: /score\r\n", b"Location: file:///etc/passwd\r\n",
           b"Retry-After: 99999\r\n", b"Retry-After: -1\r\n", b"Content-Type: text/html\r\n",
           b"Connection: close\r\n", b"Content-Length: 7\r\n", b"Content-Length: -5\r\n",
           b"no colon\r\n")


def one_server(draw: random.Random, folder: Path, outcomes: Counter[str]) -> None:
    """A client of ours with a server that misbehaves, or the other way round."""
    draw.choice((_our_client, _our_server))(draw, outcomes)


# A server that misbehaves ------------------------------------------------------------------------

def _our_client(draw: random.Random, outcomes: Counter[str]) -> None:
    from ppocli.config.schema import RewardConfig
    from ppocli.errors import RewardError
    from ppocli.rewards.scoring import build_reward

    body, pace = draw.choice(BODIES), draw.choice(("at once",) * 5 + ("drips", "hangs", "endless"))
    status, headers = draw.choice(STATUSES), draw.choice(HEADERS)
    told = f"{status} {headers[:40]!r} {body[:40]!r} {pace}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _misbehaving(status, headers, body, pace, first_good=draw.random() < 0.3) as port:
        cfg = RewardConfig(fn="http", kwargs={"url": f"http://127.0.0.1:{port}/score",
                                              "timeout": TIMEOUT, "retries": 0})
        began, said = time.monotonic(), ""
        try:
            result = build_reward(cfg).score(request_of(COUNT))
        except RewardError as error:
            said = str(error)
            outcomes["client: reward error"] += 1
        else:
            outcomes["client: scores"] += result is not None
        seconds = time.monotonic() - began
    assert "\x1b" not in said, told
    assert len(said) < 10_000, told
    assert seconds < 2 * (TIMEOUT + SLACK), f"{told}: {seconds:.1f} s"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < MOST_MEMORY, f"{told}: {grown} bytes"


@contextmanager
def _misbehaving(status: str, headers: bytes, body: bytes, pace: str, *, first_good: bool
                 ) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()
    answer = b"HTTP/1.1 " + status.encode() + b"\r\n" + headers
    if b"Content-Length" not in headers and b"chunked" not in headers:
        answer += b"Content-Length: %d\r\n" % (10**15 if pace == "endless" else len(body))
    answer += b"\r\n" + body

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(5)
            connection.recv(1 << 16)
            if pace == "hangs":
                ended.wait(20)
            elif pace == "drips":
                for byte in answer:
                    connection.sendall(bytes([byte]))
                    if ended.wait(0.2):
                        return
            else:
                connection.sendall(answer)
                while pace == "endless" and not ended.is_set():
                    connection.sendall(b" " * (1 << 20))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        ended.set()
        listener.close()


# A client that misbehaves ------------------------------------------------------------------------

@cache
def _served() -> tuple[Process, int]:
    """One ``ppocli serve-reward`` for all cases, and its port."""
    folder = ROOT / "build/soak/served"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "served.py").write_text(
        "def score(completions, **columns):\n    return [float(len(t)) for t in completions]\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = runs.spawn("serve-reward", "reward.fn=served.py:score", "--port", str(port),
                         cwd=folder)
    atexit.register(process.kill)
    threading.Thread(target=process.stdout.read, daemon=True).start()
    threading.Thread(target=process.stderr.read, daemon=True).start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process, port
        time.sleep(0.1)
    raise AssertionError("serve-reward doesn't listen")


GOOD = json.dumps({"prompts": ["a"], "responses": ["bcd"], "response_ids": [[1, 2]],
                   "columns": {}}).encode()


def _post(body: bytes, length: int | None = None, more: bytes = b"") -> bytes:
    return (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + more
            + b"Content-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body)


def _our_server(draw: random.Random, outcomes: Counter[str]) -> None:
    process, port = _served()
    sent = draw.choice((
        lambda: draw.randbytes(draw.randrange(2000)), lambda: _post(draw.randbytes(500)),
        lambda: _post(GOOD, len(GOOD) + 10**draw.randrange(1, 15)), lambda: _post(GOOD, -3),
        lambda: _post(b"[" * 100_000), lambda: _post(GOOD[:draw.randrange(len(GOOD))]),
        lambda: _post(GOOD, more=b"Transfer-Encoding: chunked\r\n"),
        lambda: _post(b"x" * 3_000_000), lambda: b"POST /score HTTP/1.1\r\n" + b"a: b\r\n" * 999,
        lambda: b"GET /" + b"x" * 99_999 + b" HTTP/1.1\r\n\r\n",
        lambda: b"DELETE / HTTP/1.1\r\n\r\n",
        lambda: _post(GOOD.replace(b"bcd", b"\\ud800")), lambda: _post(GOOD) * 5))()
    leave = draw.choice(("reads", "hangs up", "resets", "stays"))
    connections = [socket.create_connection(("127.0.0.1", port), 5)
                   for _ in range(draw.choice((1, 1, 1, 5)))]
    for connection in connections:
        with suppress(OSError):
            connection.settimeout(3)
            connection.sendall(sent)
            if leave == "reads":
                connection.recv(1 << 16)
            if leave == "resets":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if leave != "stays":
            connection.close()
    with socket.create_connection(("127.0.0.1", port), 10) as other:
        other.settimeout(30)
        other.sendall(_post(GOOD, more=b"Connection: close\r\n"))
        answer = b""
        while part := other.recv(1 << 16):
            answer += part
    for connection in connections:
        connection.close()
    told = f"{sent[:60]!r} {leave}"
    assert process.poll() is None, f"{told}: serve-reward ended, {process.returncode}"
    assert b" 200 " in answer, f"{told}: {answer[:300]!r}"
    assert b"3.0" in answer, f"{told}: {answer[:300]!r}"
    resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096
    assert resident < 2 * 2**30, f"{told}: serve-reward holds {resident} bytes"
    outcomes["server: goes on"] += 1
