"""The policy's weights, as servers read them: a folder of safetensors that is new for each version.
"""

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

from ppocli.errors import DiskError
from ppocli.models.loading.adapters import Adapter, merged_tensors

_PREFIX = "ppocli-weights-"
SEEN = "seen"
"""a folder without weights beside them: who can read it sees the weights, too"""


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


class WeightsFolder:
    """Where versions of the weights are put, one after another; it goes when the process ends.

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

    def write(self, lm: Any, tensors: Mapping[str, torch.Tensor], version: str) -> Path:
        """A folder with these weights under the names of their checkpoint format, in place of the
        version before.

        Raises:
            DiskError: the disk is full.
        """
        folder = self.path / version
        old = [path for path in self.path.iterdir() if path != folder]
        try:
            (folder / SEEN).mkdir(parents=True)
            save_file({}, folder / SEEN / "model.safetensors")
            lm.save_pretrained(folder, state_dict=dict(tensors))
        except OSError as error:
            raise _refused(str(folder), error) from error
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
        return folder


def _remove_abandoned() -> None:
    """Remove the folders of processes of this machine that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _refused(folder: str | None, error: OSError) -> DiskError:
    return DiskError(f"Weights for servers can't be written: {error}.", where="rollout.weights_dir",
                     fix=f"make room in {folder or tempfile.gettempdir()}, or name another folder")
