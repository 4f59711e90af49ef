"""How many threads compute, and that a run goes on with as many; a wait gives its core away."""

import json
import os
import subprocess
import sys

import pytest
import torch
from runs import words

from ppocli.parallel import threads
from ppocli.storage.environment import usable_cores


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("seconds", "taken"), [
    ({1: 1.0, 3: 0.94, 6: 0.93}, 1), ({1: 1.0, 3: 0.59, 6: 0.57}, 3),
    ({1: 1.0, 3: 0.5, 6: 0.3}, 6), ({1: 1.0, 3: 9.0, 6: 0.5}, 6)])
def test_more_threads_are_taken_where_they_pay_off(monkeypatch, seconds, taken):
    monkeypatch.setattr(threads, "_seconds", seconds.__getitem__)
    threads._fastest.cache_clear()
    assert threads._fastest(6) == taken
    threads._fastest.cache_clear()


def test_what_decides_the_number(monkeypatch):
    cores = usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    threads.settle_threads(None)
    assert torch.get_num_threads() == 1
    threads.settle_threads(None, noted=cores + 5)
    assert torch.get_num_threads() == cores
    threads.settle_threads(3, noted=1)
    assert torch.get_num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "_fastest", lambda most: most)
    threads.settle_threads(None, measure=False)
    assert torch.get_num_threads() == 3
    threads.settle_threads(None)
    assert torch.get_num_threads() == min(3, cores)


def test_a_run_goes_on_with_the_threads_it_has_noted(world, command, app):
    command(*words("ppo.num_steps=1", "run_name=r"), code=0)
    env = world / "runs/r/env.json"
    noted = json.loads(env.read_text())
    assert noted["num_threads"] == 1
    env.write_text(json.dumps({**noted, "num_threads": usable_cores()}))
    app("resume", "r", "ppo.num_steps=2", "hardware.num_threads=auto", code=0)
    assert json.loads(env.read_text())["num_threads"] == usable_cores()
    told = app("eval", "r", "--json", code=0)
    assert json.loads(told.out)["hardware"]["threads"] == usable_cores()


def test_threads_of_the_command_wait_passively():
    code = ("import os, sys\nfrom ppocli.cli.app import main\nsys.argv = ['ppocli', 'list']\n"
            "try:\n    main()\nexcept SystemExit:\n"
            "    print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)")
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, policy in ({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"):
        done = subprocess.run([sys.executable, "-c", code], env={**env, **given}, text=True,
                              capture_output=True, check=True)
        assert done.stdout.split() == [policy, "False"]
