"""Data sets by name without a network, and the probe that finds that out."""

import http.server
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import running

from ppocli.runs import hub

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
CLEARED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT",
           *PROXY_VARIABLES, *(name.upper() for name in PROXY_VARIABLES))


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    hub._probe.cache_clear()
    yield
    hub._probe.cache_clear()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(status: int = 200):
    """A local HTTP server that answers HEAD with ``status``; yields its port and its requests."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            seen.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(listening):
        yield listening.server_port, seen


# The probe ----------------------------------------------------------------------------------------


def test_each_way_to_the_endpoint_is_tried_as_the_environment_names_it(monkeypatch):
    """A proxy may be down or bypassed; one of SOCKS counts when it accepts."""
    socks = {"HF_ENDPOINT": "https://hub.invalid"}
    with server() as (port, _), server(502) as (failing, _):
        closed, up, bad = (f"127.0.0.1:{number}" for number in (closed_port(), port, failing))
        for variables, reachable in (
                ({"HF_ENDPOINT": f"http://{closed}"}, False), ({"HF_ENDPOINT": "http://["}, False),
                ({"HF_ENDPOINT": "http://x:port"}, False),
                ({"https_proxy": f"http://{closed}"}, False),
                ({"HF_ENDPOINT": "http://hub.invalid", "http_proxy": f"http://{up}"}, True),
                ({"HF_ENDPOINT": "http://hub.invalid", "http_proxy": f"http://{bad}"}, False),
                ({"http_proxy": f"http://{closed}", "no_proxy": "127.0.0.1",
                  "HF_ENDPOINT": f"http://{up}"}, True),
                ({**socks, "all_proxy": f"socks5h://{closed}"}, False),
                ({**socks, "all_proxy": f"socks5h://{up}"}, True)):
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                assert hub.hub_reachable() is reachable, variables
                assert reachable or hub.offline_hint() == "the Hub cannot be reached"


# In processes of their own, since they switch libraries offline -----------------------------------

def run_python(code: str, tmp_path: Path, *words: str, **environment: str
               ) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in CLEARED}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *words], capture_output=True, text=True,
        timeout=120, check=False, cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home"),
             "PYTHONPATH": str(Path(__file__).parent), **environment})


def test_the_probe_imports_nothing_heavy(tmp_path):
    code = ("import sys; from ppocli.runs.hub import hub_reachable, go_offline, offline_hint\n"
            "assert not hub_reachable(); go_offline(); print(offline_hint())\n"
            "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'httpx2', 'httpx'}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
            "import os; assert 'HF_HUB_OFFLINE' not in os.environ")
    done = run_python(code, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the Hub cannot be reached\n"
