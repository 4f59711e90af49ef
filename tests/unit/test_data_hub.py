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

@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "true"),
                                             ("TRANSFORMERS_OFFLINE", "YES")])
def test_a_variable_that_forbids_downloading_needs_no_probe(monkeypatch, name, value):
    with server() as (port, seen):
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv(name, value)
        assert not hub.hub_reachable()
        assert seen == []
    assert hub.offline_hint() == f"{name}={value} forbids downloading"


def test_the_endpoint_is_probed_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with server() as (port, _):
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub.hub_reachable()
    assert hub.hub_reachable()  # the answer stays for the process, though the server is gone


def test_each_way_to_the_endpoint_is_tried_as_the_environment_names_it(monkeypatch):
    """A proxy may be down or bypassed; one of SOCKS counts when it accepts."""
    socks = {"HF_ENDPOINT": "https://hub.invalid"}
    with server() as (port, _):
        closed, up = (f"127.0.0.1:{number}" for number in (closed_port(), port))
        for variables, reachable in (
                ({"HF_ENDPOINT": f"http://{closed}"}, False), ({"HF_ENDPOINT": "http://["}, False),
                ({"HF_ENDPOINT": "http://x:port"}, False),
                ({"https_proxy": f"http://{closed}"}, False),
                ({"http_proxy": f"http://{closed}", "no_proxy": "127.0.0.1",
                  "HF_ENDPOINT": f"http://{up}"}, True),
                ({**socks, "all_proxy": f"socks5h://{closed}"}, False),
                ({**socks, "all_proxy": f"socks5h://{up}"}, True)):
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                assert hub.hub_reachable() is reachable, variables
                assert reachable or hub.offline_hint() == "the Hub cannot be reached"


@pytest.mark.parametrize(("status", "reachable"), [(200, True), (404, True), (407, False),
                                                   (503, False)])
def test_a_proxy_is_asked_for_the_endpoint(monkeypatch, status, reachable):
    with server(status) as (port, seen):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid/")
        assert hub.hub_reachable() is reachable
        assert seen == ["http://hub.invalid/"]


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


LOAD = """
import time, sys, socket
from pathlib import Path
{prepare}
from ppocli.config.schema import PromptsConfig
from ppocli.data.prompt_set import load_prompts
from ppocli.errors import InputError
from data_tokenizers import words
tokenizer = words()


def waited():
    # seconds in which this thread neither ran nor queued for a core, as it does on a busy machine
    ran, queued, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    return time.monotonic() - (ran + queued) / 1e9


before = waited()
for name, split in {sets}:
    try:
        cfg = PromptsConfig(path=name, column="text", split=split)
        print(load_prompts(cfg, tokenizer, seed=0, max_prompt_tokens=9).columns)
    except InputError as error:
        print(error)
seconds = waited() - before
assert seconds < 5, seconds
"""
HANGING_NETWORK = """
def hang(*args, **kwargs):
    time.sleep(60)
socket.getaddrinfo = hang
socket.create_connection = hang
"""
MISSING = ("Data set 'someone/else' is not on this machine and the Hub cannot be reached.\n"
           "  where: prompts.path=someone/else\n"
           "  fix:   give a local file or folder: prompts.path=/path, or run once with network: "
           "hf download --repo-type dataset someone/else --local-dir else\n")


def cache_data_set(home: Path) -> None:
    """What `datasets` leaves behind after it has loaded someone/film_reviews from the Hub."""
    from datasets import Dataset, DatasetInfo, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    folder = home / "datasets" / "someone___film_reviews" / "default" / "0.0.0" / "0123abc"
    folder.mkdir(parents=True)
    splits = SplitDict(dataset_name="film_reviews")
    for split, text in (("train", "good film"), ("test", "bad film")):
        rows = Dataset.from_dict({"text": [text], "from": [split]})
        writer = ArrowWriter(features=rows.features,
                             path=str(folder / f"film_reviews-{split}.arrow"))
        for row in rows:
            writer.write(row)
        examples, size = writer.finalize()
        splits.add(SplitInfo(split, num_bytes=size, num_examples=examples))
    DatasetInfo(features=rows.features, builder_name="json", dataset_name="film_reviews",
                config_name="default", version="0.0.0", splits=splits
                ).write_to_directory(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["", pytest.param("import datasets, transformers",
                                                       marks=pytest.mark.slow)])
def test_a_dead_network_takes_less_than_five_seconds(tmp_path, imported):
    cache_data_set(tmp_path / "home")
    sets = [("someone/else", "train"), ("someone/film_reviews", "train+test")]
    done = run_python(LOAD.format(prepare=imported + HANGING_NETWORK, sets=sets), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == MISSING + "{'from': ['train', 'test']}\n"
