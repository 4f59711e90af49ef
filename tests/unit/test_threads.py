"""What is computed is decided by no clock, load or free memory; how many threads compute, and that
a run goes on with as many; a wait gives its core away."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import ppocli, read_json
from runs import assert_equal_runs, words

from ppocli.config.schema import HardwareConfig
from ppocli.distributed import torch_settings
from ppocli.distributed.backend import open_backend
from ppocli.runs.environment import usable_cores

LIAR = """
import os, pathlib, random, time
rate, memory = os.environ["MY_RATE"], os.environ["MY_MEMORY"]
numbers, monotonic, read = random.Random(rate), time.monotonic, pathlib.Path.read_text
for name in ("perf_counter", "process_time", "thread_time"):
    setattr(time, name, lambda: 1000 * numbers.random())
time.monotonic = lambda: float(rate) * monotonic()
pathlib.Path.read_text = lambda self, *more, **how: (
    f"MemAvailable: {memory} kB\\n" if str(self) == "/proc/meminfo" else read(self, *more, **how))
"""
"""a ``sitecustomize`` under which clocks show anything, and memory is scarce or plenty"""


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [3, 10])
def test_neither_clock_nor_load_nor_free_memory_changes_a_byte(count, world):
    (world / "liar").mkdir()
    (world / "liar/sitecustomize.py").write_text(LIAR)
    places = ["", str(world / "liar")]

    def train(number: int) -> None:
        ppocli("train", *words("hardware.num_threads=null", "hardware.memory_check=off",
                               f"run_name={number}", stateful=True),
               cwd=world, code=0, timeout=900, OMP_NUM_THREADS="", PYTHONHASHSEED=str(number),
               PYTHONPATH=places[number > 0], MY_RATE=str((0.5, 7.0)[number % 2]),
               MY_MEMORY=str((10**9, 1)[number % 2]))

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy, \
            ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(count)))
        busy.kill()
    runs = [world / f"runs/{number}" for number in range(count)]
    for run in runs[1:]:
        assert_equal_runs(runs[0], run)
        assert [read_json(one / "env.json")["num_threads"] for one in (runs[0], run)] == [
            usable_cores()] * 2


def test_what_decides_the_number(monkeypatch):
    cores = usable_cores()
    torch.set_num_threads(1)
    torch_settings.settle_threads(None)
    assert torch.get_num_threads() == 1
    torch_settings.settle_threads(None, recorded=cores + 5)
    assert torch.get_num_threads() == cores
    torch_settings.settle_threads(cores + 3, recorded=1)
    assert torch.get_num_threads() == cores + 3
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 3))  # as torch has read it
    torch_settings.settle_threads(None)
    assert torch.get_num_threads() == cores + 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch_settings.settle_threads(None)
    assert torch.get_num_threads() == cores


def test_a_run_goes_on_with_the_threads_it_has_noted(tmp_path):
    (tmp_path / "env.json").write_text(json.dumps({"num_threads": usable_cores()}))
    torch.set_num_threads(1)
    with open_backend(HardwareConfig(device="cpu"), tmp_path):
        assert torch.get_num_threads() == usable_cores()
    assert torch.get_num_threads() == 1


def test_threads_of_the_command_wait_passively():
    code = ("import os, sys\nfrom ppocli.cli.app import main\nsys.argv = ['ppocli', 'list']\n"
            "try:\n    main()\nexcept SystemExit:\n"
            "    print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules, file=sys.stderr)")
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True,
                          check=True)
    assert done.stderr.split()[-2:] == ["PASSIVE", "False"]
