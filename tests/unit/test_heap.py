"""Memory that the process keeps: what the system sees of it, in processes of their own."""

import ctypes
import os
import subprocess
import sys

import pytest
from helpers import environment
from runs import run, words

from ppocli.distributed.host_memory import _OTHERS

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")

SIZE = 64 * 2**20
MEASURE = f'''
import ctypes, os, resource
from pathlib import Path


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure():
    """Bytes that stay of {SIZE} once they are freed, and pages that taking them again costs."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = resident()
    for _ in range(2):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc({SIZE})
        ctypes.memset(block, 1, {SIZE})
        libc.free(block)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return resident() - before, faults
'''
OWN = MEASURE + '''
from ppocli.distributed.host_memory import settle_freed_memory
{call}
print(*measure())
'''
REWARD = MEASURE + '''

def plain(outputs, **columns):
    Path("measured").write_text("{} {}".format(*measure()))
    return [float(len(text)) for text in outputs]
'''


def measured(call="", **env):
    """Bytes kept and pages faulted in of a process that has called that."""
    env = {name: value for name, value in environment().items() if name not in _OTHERS} | env
    done = subprocess.run([sys.executable, "-c", OWN.replace("{call}", call)], env=env, text=True,
                          capture_output=True, check=True)
    return tuple(map(int, done.stdout.split()))


def test_freed_memory_stays_and_is_taken_again_without_the_system():
    pages = SIZE // os.sysconf("SC_PAGESIZE")
    kept, faults = measured()
    assert kept < SIZE / 4
    assert faults > 1  # fewer than pages where the system gives huge ones
    kept, faults = measured("settle_freed_memory(sharded=False)")
    assert kept > 0.9 * SIZE
    assert faults < pages / 100


def test_ranks_of_deepspeed_hand_blocks_of_every_size_back():
    """Once a block was freed, glibc by itself would keep those up to its size."""
    grown = f"""libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc({SIZE // 4}))
blocks = [libc.malloc({SIZE // 8}) for _ in range(8)]
for block in blocks:
    ctypes.memset(block, 1, {SIZE // 8})
top = libc.malloc({SIZE // 16})  # more than any hole in the heap, so that it lies above them
before = resident()
for block in blocks:
    libc.free(block)
print(before - resident(), 0)
raise SystemExit
"""
    assert measured(grown)[0] < SIZE / 4
    assert measured(f"settle_freed_memory(sharded=True)\n{grown}")[0] > 0.9 * SIZE


@pytest.mark.slow
def test_a_run_keeps_what_it_has_freed(world, monkeypatch):
    for name in _OTHERS:
        monkeypatch.delenv(name, raising=False)
    (world / "rewards.py").write_text(REWARD)
    run("train", *words("ppo.num_steps=1", "run_name=mine"), cwd=world, code=0)
    _, faults = map(int, (world / "measured").read_text().split())
    assert faults < SIZE // os.sysconf("SC_PAGESIZE") / 100
