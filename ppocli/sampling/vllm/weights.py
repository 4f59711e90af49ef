"""The policy's weights, as servers read them from a folder of safetensors that is new for each
version."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from ppocli.errors import DiskError, SamplerError
from ppocli.models.loading.load_adapters import Adapter, merged_tensors
from ppocli.sampling.vllm.server import LOOK, Lost, Server

_PREFIX = "ppocli-weights-"
SEEN = "seen"
"""a folder without weights beside them: who can read it sees the weights, too"""


def tensors_of(lm: Any, adapter: Adapter | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state dict of a causal LM, LoRA's products added, in the type that servers compute in.
    Output embeddings that are the input ones are there a second time."""
    state = lm.state_dict() if adapter is None else merged_tensors(adapter)
    tensors: dict[str, torch.Tensor] = {}
    places = set[int]()
    for name, tensor in state.items():
        sent = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
        if sent.data_ptr() in places:
            sent = sent.clone()
        places.add(sent.data_ptr())
        tensors[name] = sent
    return tensors


class WeightsFolder:
    """Versions of the weights, put into a folder one after another; it goes when the process ends.

    Args:
        parent: a folder that the servers see (default: the one for temporary files).

    Raises:
        DiskError: nothing can be written there.
    """

    def __init__(self, parent: str | None) -> None:
        try:
            if parent is None:
                _remove_abandoned()
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
                             ).resolve()
        except OSError as error:
            raise _refused(parent, error) from error
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._newest = self.path

    def write(self, lm: Any, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        """Write these weights under the names of their checkpoint format, in place of the version
        before.

        Raises:
            DiskError: the disk is full.
        """
        self._newest = folder = self.path / version
        if folder.is_dir():
            return
        old = list(self.path.iterdir())
        try:
            (folder / SEEN).mkdir(parents=True)
            save_file({}, folder / SEEN / "model.safetensors")
            lm.save_pretrained(folder, state_dict=dict(tensors))
        except OSError as error:
            raise _refused(str(folder), error) from error
        for path in old:
            shutil.rmtree(path, ignore_errors=True)

    def check_readable(self, server: Server) -> None:
        """Make sure that a server sees the folder: a reload that fails takes vLLM's engine with it.
        It loads a folder without weights, which changes nothing.

        Raises:
            Lost, SamplerError.
        """
        try:
            server.call("reload_weights", weights_path=str(self._newest / SEEN),
                        is_checkpoint_format=False)
        except Lost as error:
            server.ask("/health", timeout=LOOK)
            raise SamplerError(f"{server.url} can't read the weights in {self._newest}: {error}",
                               where="rollout.weights_dir", fix="name a folder that the servers "
                               "see under the same path") from error

    def load(self, server: Server) -> None:
        """Replace a server's weights by the newest, from a thread of its own for each server.

        Raises:
            Lost, SamplerError.
        """
        server.call("reload_weights", weights_path=str(self._newest))


def _remove_abandoned() -> None:
    """Remove the folders of processes of this machine that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _refused(folder: str | None, error: OSError) -> DiskError:
    return DiskError(f"Weights for servers can't be written: {error}.", where="rollout.weights_dir",
                     fix=f"make room in {folder or tempfile.gettempdir()}, or name another folder")
