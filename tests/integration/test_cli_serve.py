"""``ppocli serve-reward`` and trainings that ask it, each a process of its own."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import spawn, wait_for
from warm import Process

from ppocli.config import import_guard

LENGTH = ["reward.fn=length", "reward.kwargs.target=3"]


@contextmanager
def server(*given: str, cwd: Path, **env: str) -> Iterator[tuple[Process, str]]:
    """A server and its address, once it listens."""
    process = spawn("serve-reward", *given, cwd=cwd, **env)
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), process.communicate()
        yield process, address
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_ctrl_c_while_scoring_answers_what_is_under_way(world):
    (world / "slow.py").write_text(
        "import time\n\n\ndef score(outputs):\n    open('begun', 'w').close()\n    time.sleep(1)\n"
        "    return [2.0 for text in outputs]\n")
    body = json.dumps({"prompts": ["p"], "responses": ["r"], "response_ids": [[1]]})
    with server("reward.fn=slow.py:score", "--port", "0", cwd=world) as (process, address):
        # whoever hangs up before the answer, as the reader of standard output has, ends nothing
        process.stdout.close()
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            head = f"POST /score HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
            gone.sendall((head + body).encode())
            wait_for((world / "begun").exists, process)
        (world / "begun").unlink()
        asking = subprocess.Popen(
            [sys.executable, "-c", "import sys, urllib.request as u; print(u.urlopen("
             "sys.argv[1], sys.argv[2].encode(), timeout=20).read().decode())",
             f"{address}/score", body], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "no_proxy": "*"})
        wait_for((world / "begun").exists, process)
        process.send_signal(signal.SIGINT)
        answer, _ = asking.communicate(timeout=30)
        err = process.stderr.read()
        process.wait(timeout=30)
    assert json.loads(answer) == {"scores": [2.0]}
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.parametrize(("given", "code", "said"), [
    (["reward.fn=nowhere:score"], 7, "nowhere"),
    ([*LENGTH, "--token-env", "NOT_SET_1"], 2, "NOT_SET_1")])
def test_what_is_wrong_is_told_before_anything_listens(given, code, said, app):
    ended = app("serve-reward", "--port", 0, *given, code=code)
    assert said in ended.err
    assert ended.out == ""


def test_without_the_extra_the_message_has_the_pip_line(app, monkeypatch):
    monkeypatch.setattr(import_guard, "installed", lambda library: library != "uvicorn")
    ended = app("serve-reward", *LENGTH, code=3)
    assert "ppocli serve-reward needs uvicorn" in ended.err
    assert "pip install 'ppocli[serve]'" in ended.err


def test_an_open_server_is_warned_of_and_a_taken_port_is_told(tmp_path, app):
    with server(*LENGTH, "--host", "0.0.0.0", "--port", "0", "--token-env", "MY_REWARD_VALUE",
                cwd=tmp_path, MY_REWARD_VALUE="abc") as (process, address):
        port = address.rpartition(":")[2]
        ended = app("serve-reward", *LENGTH, "--host", "0.0.0.0", "--port", port, code=2)
        assert f"0.0.0.0:{port} can't be listened on: Address already in use" in ended.err
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert "warning: 0.0.0.0 can be reached from other machines: whoever has the token" in err
    assert "reward.kwargs.token_env=MY_REWARD_VALUE" in err
