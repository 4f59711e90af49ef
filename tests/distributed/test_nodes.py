"""Two machines make one run: on loopback, and in two network namespaces with addresses of their own
and a slow link between them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import environment, jsonl, stable_rows
from ranks import close_to, errors_in, ranks_of, rows_of, wait_for_no_ranks
from runs import free_port, run, spawn, wait_for, words
from safetensors.torch import load_file
from warm import Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def node_words(name: str, endpoint: str, rank: int, *more: str) -> list[str]:
    return words(f"run_name={name}", "hardware=multi_node", f"hardware.rdzv_endpoint={endpoint}",
                 f"hardware.node_rank={rank}", "hardware.timeout_seconds=60", *more)


def assert_end(processes: Sequence[Process], code: int) -> list[str]:
    """What they say, which end alike."""
    said = [process.communicate(timeout=400)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return said


@pytest.mark.parametrize("hardware", ["hardware.zero_stage=2", "hardware.zero_stage=0"])
def test_two_launchers_on_one_machine_make_one_run(world, hardware):
    endpoint = f"127.0.0.1:{free_port()}"
    assert_end([spawn("train", *node_words("nodes", endpoint, rank, hardware), cwd=world)
                for rank in (1, 0)], 0)
    run("train", *words("run_name=alone"), cwd=world, code=0)
    assert close_to(stable_rows(world / "runs/alone/metrics.jsonl"),
                    stable_rows(world / "runs/nodes/metrics.jsonl"))
    assert not (world / "runs/nodes/.node-failed").exists()


def test_a_node_that_never_comes(world):
    started = time.monotonic()
    done = run("train", *node_words("nodes", f"127.0.0.1:{free_port()}", 0,
                                    "hardware.timeout_seconds=5"), cwd=world, code=1)
    assert time.monotonic() - started < 60
    [message] = errors_in(done.err)
    assert "node 0: the nodes lost each other, or did not meet within 5 seconds" in message
    assert "Traceback" not in done.err
    assert not (world / "runs/nodes").exists()


# Namespaces ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Link:
    """Two network namespaces, joined by a link that is as slow as a cheap switch."""

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.43.1", "10.77.43.2")

    def spawn(self, node: int, *given: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], sys.executable, "-m", "ppocli", *given],
            cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(**env), process_group=0)

    def sent(self, node: int) -> int:
        """Bytes that a node has put on the link."""
        path = f"/sys/class/net/link{node}/statistics/tx_bytes"
        return int(_ip("netns", "exec", self.names[node], "cat", path))


def _ip(*given: str) -> str:
    done = subprocess.run(["ip", *given], text=True, capture_output=True, check=False, timeout=30)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(given)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def link() -> Iterator[Link]:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}: install iproute2")
    made = Link((f"ppocli-{os.getpid()}-0", f"ppocli-{os.getpid()}-1"))
    try:
        try:
            for name in made.names:
                _ip("netns", "add", name)
            _ip("link", "add", "link0", "netns", made.names[0], "type", "veth",
                "peer", "name", "link1", "netns", made.names[1])
        except OSError as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        for node, name in enumerate(made.names):
            _ip("-n", name, "addr", "add", f"{made.addresses[node]}/30", "dev", f"link{node}")
            _ip("-n", name, "link", "set", f"link{node}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            try:
                _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", f"link{node}", "root",
                    "tbf", "rate", "100mbit", "burst", "64kbit", "latency", "200ms")
            except OSError as error:
                pytest.skip(f"the link can't be made slow here: {error}")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_nodes(link: Link, world: Path, *more: str) -> list[subprocess.Popen[str]]:
    endpoint = f"{link.addresses[0]}:29400"
    return [link.spawn(node, "train", *node_words("nodes", endpoint, node, *more), cwd=world)
            for node in (0, 1)]


def long_run(link: Link, world: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Nodes in the midst of a run."""
    processes = start_nodes(link, world, "ppo.num_steps=400", "eval.every_steps=100", *more)
    wait_for(lambda: rows_of(world / "runs/nodes") >= 2, processes[0], seconds=240)
    return processes


@pytest.mark.parametrize("stage", [2, 0, 3])
def test_two_namespaces_come_to_what_one_process_comes_to(world, link, stage):
    """The smallest true run of several machines: addresses of their own, nothing shared but files,
    and a host name that leads nowhere useful."""
    # plain descent: Adam would divide the rounding of gradients near zero by themselves
    more = ["ppo.num_steps=2", "ppo.optimizer.name=sgd", "ppo.optimizer.lr=1e-2"]
    assert_end(start_nodes(link, world, *more, f"hardware.zero_stage={stage}"), 0)
    run("train", *words("run_name=alone", *more), cwd=world, code=0)
    one, two = (load_file(world / f"runs/{name}/model/model.safetensors")
                for name in ("alone", "nodes"))
    assert set(one) == set(two)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
    rows, others = (stable_rows(world / f"runs/{name}/metrics.jsonl")
                    for name in ("alone", "nodes"))
    assert len(rows) == 3
    assert close_to(others, rows, rel=1e-5, abs=1e-5)
    # eight updates, each with the gradients of all weights at least once over the link
    sent = 8 * sum(value.numel() * 4 for value in two.values())
    for node in (0, 1):
        assert sent / 2 < link.sent(node) < 20 * sent


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_dies_ends_the_other_with_one_message(world, link, killed):
    processes = long_run(link, world, "hardware.timeout_seconds=20")
    spaces = {pid: os.stat(f"/proc/{pid}/ns/net").st_ino
              for pid in ranks_of(world / "runs/nodes")}
    own = os.stat(f"/proc/{processes[killed].pid}/ns/net").st_ino
    dying = [processes[killed].pid, *(pid for pid, space in spaces.items() if space == own)]
    assert len(dying) == 2  # the command, its rank
    for pid in dying:
        os.kill(pid, signal.SIGKILL)
    processes[killed].communicate(timeout=60)
    started = time.monotonic()
    _, err = processes[1 - killed].communicate(timeout=120)
    assert processes[1 - killed].returncode == 1
    assert time.monotonic() - started < 20 + 20
    [message] = errors_in(err)
    assert message.startswith(f"Error: rank {1 - killed}, ")
    assert "another rank is gone or gave no answer within 20 seconds" in message
    assert "Traceback" not in err
    wait_for_no_ranks(world / "runs/nodes")


def test_a_link_that_falls_silent_ends_both_within_the_timeout(world, link):
    """No connection is closed: each side only hears nothing any more."""
    processes = long_run(link, world, "hardware.timeout_seconds=10")
    _ip("-n", link.names[0], "link", "set", "link0", "down")
    started = time.monotonic()
    ended = assert_end(processes, 1)
    assert time.monotonic() - started < 60
    for err in ended:
        assert len(errors_in(err)) == 1, err
        assert "Traceback" not in err
    wait_for_no_ranks(world / "runs/nodes")


def test_sigterm_to_one_node_stops_both_and_both_resume(world, link):
    processes = long_run(link, world)
    # `ip netns exec` has become the command
    processes[1].send_signal(signal.SIGTERM)
    assert_end(processes, 143)
    steps = rows_of(world / "runs/nodes") - 1
    assert_end([link.spawn(node, "resume", "runs/nodes", f"hardware.node_rank={node}",
                           f"ppo.num_steps={steps + 2}", cwd=world) for node in (0, 1)], 0)
    assert [row["step"] for row in jsonl(world / "runs/nodes/metrics.jsonl")] == list(
        range(steps + 3))
