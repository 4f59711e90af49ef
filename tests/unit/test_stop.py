import multiprocessing
import os
import signal
import time

import pytest
from checkpoint_samples import start_python

from ppocli.distributed.ranks import StopFlag, StopRequested
from ppocli.distributed.stop import catch_signals

LOOP = """
import signal, sys, time
from ppocli.distributed.ranks import StopRequested
from ppocli.distributed.stop import catch_signals
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
with catch_signals() as stop:
    print("up", flush=True)
    try:
        while True:
            time.sleep(0.01)
            stop.check()
    except StopRequested as request:
        print("stopping", request, flush=True)
        if "deaf" in sys.argv:
            print("unflushed", end="")
            print("ready", file=sys.stderr, flush=True)
            with stop.defer():
                while True:
                    stop.check()
                    time.sleep(0.01)
        sys.exit(128 + request.signal_number)
"""


def start(*arguments: str):
    child = start_python(LOOP, *arguments)
    assert child.stdout.readline() == "up\n"
    return child


@pytest.mark.parametrize(("sent", "name", "code"), [
    (signal.SIGINT, "SIGINT", 130), (signal.SIGHUP, "SIGTERM", 143)])
def test_one_signal_stops_at_the_next_check(sent: int, name: str, code: int):
    child = start()
    child.send_signal(sent)
    out, err = child.communicate(timeout=30)
    assert (out, err) == (f"stopping {name}\n", "")
    assert child.returncode == code


@pytest.mark.parametrize(("first", "second", "code"), [
    (signal.SIGTERM, signal.SIGINT, 130), (signal.SIGINT, signal.SIGHUP, 143)])
def test_the_second_signal_leaves_at_once(first: int, second: int, code: int):
    child = start("deaf")
    child.send_signal(first)
    assert child.stderr.readline() == "ready\n"
    assert child.poll() is None, "deferred: the first signal alone must not end it"
    sent_at = time.monotonic()
    child.send_signal(second)
    out, err = child.communicate(timeout=30)
    assert child.returncode == code
    assert time.monotonic() - sent_at < 5
    assert (out.splitlines()[1:], err) == (["unflushed"], "")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_worker_can_be_ended_by_its_parent_at_any_time():
    """As ``multiprocessing.Pool`` does, which then waits for it without a limit."""
    forked = multiprocessing.get_context("fork")
    with catch_signals() as stop:
        worker = forked.Process(target=time.sleep, args=(30,), daemon=True)
        worker.start()
        worker.terminate()
        worker.join(20)
        assert (worker.exitcode, stop.requested) == (-signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == signal.SIGTERM


def test_defer_holds_back_and_does_not_forget():
    stop = StopFlag()
    stop.check()
    with stop.defer():
        stop.request(signal.SIGINT)
        stop.request(signal.SIGTERM)
        with stop.defer():
            stop.check()
        stop.check()
        assert stop.requested == signal.SIGINT
    with pytest.raises(StopRequested, match="SIGINT") as caught:
        stop.check()
    assert not isinstance(caught.value, Exception)  # which surviving any exception would swallow


@pytest.mark.timeout(60)
def test_ranks_that_meet_nobody_end_soon_after_their_parent(tmp_path):
    """The main thread waits on and on, as in a rendezvous, and no signal interrupts it."""
    process = start_python("""
import os, signal, threading
from ppocli.distributed.stop import stop_when_orphaned
signal.signal(signal.SIGTERM, lambda *_: None)
stop_when_orphaned(os.getppid() + 1, lambda: 0.1)
while True:
    threading.Event().wait()
""")
    assert process.wait() == 128 + signal.SIGTERM
    process.communicate()
