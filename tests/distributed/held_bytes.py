"""One rank of a small job: bytes of all tensors that are alive when its optimizer steps, and after
the update.

    torchrun ... held_bytes.py CONFIG.json OUT.safetensors
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# the import path has to be set first
import torch
from one_update import update
from safetensors.torch import save_file
from sessions import count_good, set_keys

from ppocli.config.schema import TrainConfig
from ppocli.parallel.backend import open_ranks
from ppocli.tasks.ppo.session import PythonObjects, build_session
from ppocli.tasks.ppo.task import PPOTask


def held() -> dict[int, int]:
    """Bytes of each storage that a Python object holds, by its address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            tensors = [thing, thing.grad, getattr(thing, "ds_tensor", None)]
            for tensor in tensors:
                if tensor is not None and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def grown(before: dict[int, int]) -> int:
    """Bytes of what is held now and wasn't before."""
    return sum(size for place, size in held().items() if place not in before)


def main(config: str, out: str) -> None:
    """Build, roll out, update, count."""
    cfg = set_keys(TrainConfig(), json.loads(Path(config).read_text()))
    with open_ranks(cfg) as backend:
        before = held()
        session = build_session(cfg, backend, PythonObjects(reward_fn=count_good))
        # gradients are complete when DeepSpeed is asked to step; the first step makes the state
        stepping: list[int] = []
        step = session.trained.engine.step

        def counted() -> None:
            stepping.append(grown(before))
            step()

        session.trained.engine.step = counted
        update(session, 0)
        mine = [stepping[-1], grown(before)]
        found = backend.ranks.gather(mine)
        if backend.ranks.first:
            save_file({"held": torch.tensor(found)}, out)
        backend.ranks.barrier()
        PPOTask(session).close()
    session.trained.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
