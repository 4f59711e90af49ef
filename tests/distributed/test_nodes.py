"""Two machines make one run, started by torchrun in two network namespaces with addresses of their
own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import environment, stable_rows
from ranks import close_to
from runs import run, words
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


def test_two_namespaces_come_to_what_one_process_comes_to(world, link):
    """The smallest true run of several machines: addresses of their own, nothing shared but files,
    and a host name that leads nowhere useful."""
    # plain descent: Adam would divide the rounding of gradients near zero by themselves
    more = ["ppo.num_steps=2", "ppo.optimizer.name=sgd", "ppo.optimizer.lr=1e-2"]
    for process in link.start(world, *more, "hardware.zero_stage=2"):
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
