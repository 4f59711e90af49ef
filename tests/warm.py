"""Commands in processes of their own, without the seconds that libraries take to load.

One process of the session has loaded what ``ppocli`` uses of others, and forks for each command. A
command has a pid, a process group or a terminal, an environment, a folder and an output of its own,
and imports ppocli itself afresh. That it loads nothing too early and misses no import is for tests
that start an interpreter, such as those of packaging.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

SERVER = "PPOCLI_TESTS_FORK_AT"
_READ_LATE = ("PPOCLI_", "PYTEST_", "SLURM_", "MY_")
"""variables that begin so are read when a command needs them; of others, libraries may know already
what the forked process had"""
_READ_LATE_NAMES = {
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "COLUMNS", "LINES", "TERM", "NO_COLOR",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


# In the tests' process ----------------------------------------------------------------------------

def begin(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], server: Server | None = None
          ) -> Process:
    """``python ARGV``, which is ``-m MODULE ...`` or ``SCRIPT ...``, its output on pipes, in a
    process group of its own: forked, or started if the libraries would have to be loaded anew."""
    server = server or _server()
    if not server.fits(env):
        return subprocess.Popen([server.python, *argv], cwd=cwd, text=True, env=dict(env),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)
    out, their_out = os.pipe()
    err, their_err = os.pipe()
    try:
        forked = Forked(server, argv, cwd, env, (0, their_out, their_err))
    finally:
        os.close(their_out)
        os.close(their_err)
    forked.stdout, forked.stderr = os.fdopen(out), os.fdopen(err)
    return forked


def begin_on_terminal(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], terminal: int
                      ) -> Process:
    """As :func:`begin`, in a session of its own on this terminal, from which Ctrl-C reaches it."""
    if not _server().fits(env):
        return subprocess.Popen(["setsid", "--ctty", "--wait", sys.executable, *argv], cwd=cwd,
                                env=dict(env), stdin=terminal, stdout=terminal, stderr=terminal)
    return Forked(_server(), argv, cwd, env, (terminal,) * 3, terminal=True)


class Forked:
    """The part of :class:`subprocess.Popen` that tests use, for a forked command."""

    stdout: IO[str]
    stderr: IO[str]

    def __init__(self, server: Server, argv: Sequence[str], cwd: Path, env: Mapping[str, str],
                 fds: tuple[int, int, int], *, terminal: bool = False) -> None:
        self.args = list(argv)
        self.returncode: int | None = None
        self._connection = server.connect()
        _send(self._connection, {"argv": [str(word) for word in argv], "cwd": str(cwd),
                                 "env": dict(env), "terminal": terminal}, fds)
        self._told = self._connection.makefile("r")
        word, number = self._told.readline().split()
        assert word == "pid", "it ended before it began"
        self.pid = int(number)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or minus the signal that ended it."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            status = int(self._told.readline().removeprefix("status "))
            self.returncode = os.waitstatus_to_exitcode(status)
            self._told.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code if it has ended."""
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All output from now on, once it has ended."""
        said: dict[str, str] = {}

        def read(name: str) -> None:
            with getattr(self, name) as file:
                said[name] = file.read()

        readers = [threading.Thread(target=read, args=(name,), daemon=True)
                   for name in ("stdout", "stderr") if not getattr(self, name).closed]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return said.get("stdout", ""), said.get("stderr", "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that is forked: of this interpreter, or of another environment's."""

    def __init__(self, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        from helpers import environment

        self.python = python
        self._env = environment() if env is None else env
        self._folder = tempfile.TemporaryDirectory(prefix="ppocli-warm-")
        self._path = str(Path(self._folder.name) / "s")
        self._process = subprocess.Popen([python, __file__, self._path], env=self._env,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         process_group=0)
        assert self._process.stdout is not None
        assert b"ready\n" in iter(self._process.stdout.readline, b"")  # libraries may speak first
        atexit.register(self.close)

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether a command in such an environment would load the libraries as they are."""
        return not [name for name in env.keys() | self._env.keys()
                    if env.get(name) != self._env.get(name) and name not in _READ_LATE_NAMES
                    and not name.startswith(_READ_LATE)]

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        return connection

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()


def served_by() -> dict[str, str]:
    """The variable by which a process that a test has started finds the forking one, for
    :func:`ask`."""
    return {SERVER: _server()._path}


def ask(argv: Sequence[str]) -> int:
    """``python ARGV`` forked for this process, which a test has started, with its files, folder,
    environment and process group; its exit code."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ.pop(SERVER))
    _send(connection, {"argv": list(argv), "cwd": os.getcwd(), "env": dict(os.environ),
                       "terminal": False, "group": os.getpgrp()}, (0, 1, 2))
    with connection.makefile("r") as told:
        assert told.readline().startswith("pid")
        status = int(told.readline().removeprefix("status "))
    return os.waitstatus_to_exitcode(status)


Process = Forked | subprocess.Popen
_server = functools.cache(Server)


def _send(connection: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> None:
    data = json.dumps(request).encode()
    head = len(data).to_bytes(8, "big")
    connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    connection.sendall(data)


# In the process that is forked --------------------------------------------------------------------

def _load() -> None:
    """What a training run loads of other libraries, and nothing that starts a thread."""
    import accelerate  # noqa: F401
    import hydra.utils  # noqa: F401
    import rich.table  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import typer.main  # noqa: F401
    from transformers import (  # noqa: F401
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        GenerationConfig,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    if not Path("/proc/driver/nvidia").exists():  # it looks for a GPU when it is loaded
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401


def _serve(path: str) -> dict[str, Any]:
    """Fork for each request; returns it in the new process, and never in this one."""
    waking, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.write(1, b"ready\n")
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, waking, 0], [], [])
        if 0 in ready:  # the tests have ended
            os._exit(0)
        if waking in ready:
            waking.recv(4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with suppress(OSError), running.pop(ended[0]) as connection:
                    connection.sendall(f"status {ended[1]}\n".encode())
        if listener in ready:
            connection, _ = listener.accept()
            request, fds = _receive(connection)
            pid = os.fork()
            if pid:
                running[pid] = connection
                for fd in fds:
                    os.close(fd)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (listener, waking, waker, *running.values()):
                own.close()
            _take_over(request, fds)
            with connection:
                connection.sendall(f"pid {os.getpid()}\n".encode())
            return request


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, fds, _, _ = socket.recv_fds(connection, 8, 3)
    left, parts = int.from_bytes(head, "big"), []
    while left:
        parts.append(connection.recv(min(left, 1 << 16)))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), fds


def _take_over(request: dict[str, Any], fds: list[int]) -> None:
    """Become a process of one's own."""
    if request["terminal"]:
        os.setsid()
    else:
        os.setpgid(0, request.get("group", 0))
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])


def _run(argv: list[str]) -> None:
    """As ``python ARGV``."""
    if argv[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    _load()
    gc.freeze()  # what is shared with each command stays so
    if "triton" in sys.modules:  # whose objects would count as leaked, with a message
        atexit.register(gc.unfreeze)
    _run(_serve(sys.argv[1])["argv"])
