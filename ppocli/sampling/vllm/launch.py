"""vLLM servers beside a run on this machine (``rollout.launch``)."""

import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

from ppocli.config import schema
from ppocli.errors import SamplerError
from ppocli.models.loading.model_config import ModelFacts
from ppocli.sampling.vllm import keeper
from ppocli.sampling.vllm.command import server_command
from ppocli.sampling.vllm.server import Lost, Server

log = logging.getLogger("ppocli")

_PAUSE = 0.5


def check_python(cfg: schema.RolloutConfig) -> None:
    """Make sure that the interpreter is there and has vLLM.

    Raises:
        SamplerError: it doesn't.
    """
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([str(cfg.python), "-c", find], capture_output=True, check=False)
        what = "has no vLLM" if done.returncode else ""
    except OSError as error:
        what = f"can't be started: {error.strerror}"
    if what:
        raise SamplerError(f"{cfg.python} {what}.", where="rollout.python", fix="name the Python "
                           "of an environment with vLLM, build/vllm/bin/python say")


class Launched:
    """A server for each address, which lives as long as this object and this process do.

    Raises:
        SamplerError: one doesn't come up.
    """

    def __init__(self, cfg: schema.TrainConfig, facts: ModelFacts, servers: list[Server]) -> None:
        folder = Path(cfg.output_dir) / cfg.run_name if cfg.run_name else Path(tempfile.mkdtemp())
        begun = [self._start(cfg, facts, server, folder / f"vllm-{i}.log")
                 for i, server in enumerate(servers)]
        for server, (process, path) in zip(servers, begun, strict=True):
            self._wait(server, process, path, cfg.rollout.timeout)

    def _start(self, cfg: schema.TrainConfig, facts: ModelFacts, server: Server, path: Path
               ) -> tuple[subprocess.Popen[bytes], Path]:
        environment, words = server_command(cfg, facts, str(cfg.rollout.python), server.url)
        log.info("starting a vLLM server at %s, which says in %s what it does", server.url, path)
        log.debug("%s", shlex.join(words))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as output:
            process = subprocess.Popen([sys.executable, "-I", keeper.__file__, *words],
                                       stdin=subprocess.PIPE, stdout=output, stderr=output,
                                       env={**os.environ, **environment}, start_new_session=True)
        assert process.stdin is not None
        # the keeper ends the server when the pipe is closed, as the kernel does for a process that
        # was killed
        weakref.finalize(self, _end, process)
        return process, path

    def _wait(self, server: Server, process: subprocess.Popen[bytes], path: Path, seconds: float
              ) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                server.ask("/health", timeout=_PAUSE)
            except Lost:
                ended = process.poll() is not None
                if ended or time.monotonic() > until:
                    what = "has ended" if ended else f"was not there within {seconds:g} s"
                    raise SamplerError(f"The vLLM server at {server.url} {what}.", where=str(path),
                                       fix="its last lines say why; rollout.timeout is how long "
                                       "it may take to start") from None
                time.sleep(_PAUSE)
            else:
                return


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(2 * keeper.GRACE)
