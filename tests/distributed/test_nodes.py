"""Two machines make one run, started by torchrun in two network namespaces with addresses of their
own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import environment, stable_rows
from ranks import close_to, errors_in, rows_of
from runs import run, wait_for, words
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@dataclass(frozen=True)
class Link:
    """Two joined network namespaces."""

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.43.1", "10.77.43.2")

    def start(self, world: Path, *more: str) -> list[subprocess.Popen[str]]:
        """torchrun in both."""
        given = words("run_name=nodes", "hardware.timeout_seconds=20", *more)
        return [subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
             "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1",
             f"--master-addr={self.addresses[0]}", "--master-port=29400", "-m", "ppocli", "train",
             *given], cwd=world, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(GLOO_SOCKET_IFNAME=f"link{node}"), process_group=0)
            for node, name in enumerate(self.names)]

    def sent(self, node: int) -> int:
        """Bytes that a node has put on the link."""
        path = f"/sys/class/net/link{node}/statistics/tx_bytes"
        return int(_ip("netns", "exec", self.names[node], "cat", path))


def _ip(*given: str) -> str:
    done = subprocess.run(["ip", *given], text=True, capture_output=True, check=False, timeout=30)
    if done.returncode != 0:
        pytest.skip(f"network namespaces can't be made here: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def link() -> Iterator[Link]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip: install iproute2")
    made = Link((f"ppocli-{os.getpid()}-0", f"ppocli-{os.getpid()}-1"))
    try:
        for name in made.names:
            _ip("netns", "add", name)
        _ip("link", "add", "link0", "netns", made.names[0], "type", "veth",
            "peer", "name", "link1", "netns", made.names[1])
        for node, name in enumerate(made.names):
            _ip("-n", name, "addr", "add", f"{made.addresses[node]}/30", "dev", f"link{node}")
            _ip("-n", name, "link", "set", f"link{node}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.parametrize("stage", [2, 0])
def test_two_namespaces_come_to_what_one_process_comes_to(world, link, stage):
    """The smallest true run of several machines: addresses of their own, nothing shared but files,
    and a host name that leads nowhere useful."""
    # plain descent: Adam would divide the rounding of gradients near zero by themselves
    more = ["ppo.num_steps=2", "ppo.optimizer.name=sgd", "ppo.optimizer.lr=1e-2"]
    for process in link.start(world, *more, f"hardware.zero_stage={stage}"):
        _, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
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


def test_a_node_that_dies_ends_the_other_with_one_message(world, link):
    processes = link.start(world, "ppo.num_steps=400", "eval.every_steps=100")
    wait_for(lambda: rows_of(world / "runs/nodes") >= 2, processes[0], seconds=240)
    for pid in _ip("netns", "pids", link.names[1]).split():
        os.kill(int(pid), signal.SIGKILL)
    processes[1].communicate(timeout=60)
    started = time.monotonic()
    _, err = processes[0].communicate(timeout=120)
    assert processes[0].returncode == 1
    assert time.monotonic() - started < 60
    [message] = errors_in(err)
    assert "rank 0 lost the connection to another rank" in message
