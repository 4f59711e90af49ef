"""The policy's weights, as servers read them from a folder of safetensors that is new for each
version (``rollout.transfer=files``)."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from safetensors.torch import save_file

from ppocli.errors import DiskError, SamplerError
from ppocli.models.loading.adapters import Adapter, merged_tensors
from ppocli.sampling.vllm.server import LOOK, Lost, Server

_PREFIX = "ppocli-weights-"
SEEN = "seen"
"""a folder without weights beside them: who can read it sees the weights, too"""


class Transfer(Protocol):
    """A way that weights go to servers; rank 0 has it."""

    def hold(self, lm: Any, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        """Take what is sent from now on, a state dict as :func:`tensors_of` gives it."""

    def prepare(self, server: Server) -> None:
        """Make sure that the server can take them: what was begun can't be undone.

        Raises:
            Lost, SamplerError.
        """

    def send(self, server: Server) -> None:
        """Replace its weights, from a thread of its own for each server.

        Raises:
            Lost, SamplerError.
        """

    def let_go(self) -> None:
        """Free what was held in memory, until the next :meth:`hold`."""


def tensors_of(lm: Any, adapter: Adapter | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state dict of a causal LM, LoRA's products added, in the type that servers compute in.
    Output embeddings that are the input ones are there a second time."""
    state = lm.state_dict() if adapter is None else merged_tensors(adapter)
    found: dict[str, torch.Tensor] = {}
    places = set[int]()
    for name, tensor in state.items():
        sent = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
        if sent.data_ptr() in places:
            sent = sent.clone()
        places.add(sent.data_ptr())
        found[name] = sent
    return found


class FolderTransfer:
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

    def hold(self, lm: Any, tensors: Mapping[str, torch.Tensor], version: str) -> None:
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

    def prepare(self, server: Server) -> None:
        """As :class:`Transfer`: a reload that fails takes vLLM's engine with it. Whether the server
        sees the folder is tried by another one, of a folder without weights, which changes nothing.
        """
        try:
            server.call("reload_weights", weights_path=str(self._newest / SEEN),
                        is_checkpoint_format=False)
        except Lost as error:
            server.ask("/health", timeout=LOOK)
            raise SamplerError(f"{server.url} can't read the weights in {self._newest}: {error}",
                               where="rollout.weights_dir", fix="name a folder that the servers "
                               "see under the same path, or set rollout.transfer=gloo"
                               ) from error

    def send(self, server: Server) -> None:
        """As :class:`Transfer`."""
        server.call("reload_weights", weights_path=str(self._newest))

    def let_go(self) -> None:
        """As :class:`Transfer`: memory holds nothing."""


def _remove_abandoned() -> None:
    """Remove the folders of processes of this machine that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _refused(folder: str | None, error: OSError) -> DiskError:
    return DiskError(f"Weights for servers can't be written: {error}.", where="rollout.weights_dir",
                     fix=f"make room in {folder or tempfile.gettempdir()}, or name another folder")
