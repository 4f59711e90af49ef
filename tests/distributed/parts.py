"""One rank of a job that makes several sessions one after another, under one ZeRO stage.

    torchrun ... parts.py CONFIG.json OUT.safetensors

The configuration's ``scenarios`` map a name to keys of its own. Of each is written what its
rollouts, updates and evaluation came to, and what every rank held in memory.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# the import path has to be set first
import torch
from one_update import evaluation, leave, trained_weights, update
from safetensors.torch import save_file
from sessions import count_good, set_keys

from ppocli.config.schema import TrainConfig
from ppocli.distributed.backend import Backend, open_ranks
from ppocli.ppo.session import PythonObjects, Session, build_session


def elements(*modules: Any) -> int:
    """Elements that lie in this rank's memory as parameters of these modules, whole or in parts."""
    own = {id(p): p for module in modules if module is not None for p in module.parameters()}
    return sum(p.numel() + (p.ds_tensor.numel() if hasattr(p, "ds_tensor") else 0)
               for p in own.values())


def held_by_reference(session: Session) -> int:
    """Elements that this rank holds for the reference's sake."""
    reference = session.reference
    if hasattr(reference, "lm"):
        return elements(reference.lm)
    tensors = getattr(reference, "parts", None) or getattr(reference, "frozen", {})
    return sum(tensor.numel() for tensor in tensors.values())


def run(cfg: TrainConfig, backend: Backend, reward: Any) -> dict[str, torch.Tensor]:
    """What one session comes to."""
    session = build_session(cfg, backend, PythonObjects(reward_fn=reward))
    found: dict[str, torch.Tensor] = {}
    digest = session.reference_digest()
    if digest is not None:
        found["digest"] = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    sizes = [elements(session.policy), held_by_reference(session)]
    with session.sampler.acting(session.policy) as policy:
        sizes.append(elements(policy))
    rollout, came_to = update(session, 0)
    found |= came_to | trained_weights(session)
    found["kl"], found["scores"] = rollout.kl.clone(), torch.tensor(rollout.scores)
    # after training, when policy and reference differ
    later, came_to = update(session, 1)
    found["later/kl"], found["later/logprobs"] = later.kl.clone(), later.logprobs.clone()
    found["counts"] += came_to["counts"]
    found["eval"] = evaluation(session)
    found["sizes"] = torch.tensor(backend.ranks.gather(sizes))
    leave(session)
    return found


def main(config: str, out: str) -> None:
    """Run all scenarios and write what they came to."""
    settings = json.loads(Path(config).read_text())
    scenarios = settings.pop("scenarios")
    with open_ranks(set_keys(TrainConfig(), settings)) as backend:
        found: dict[str, torch.Tensor] = {}
        for name, keys in scenarios.items():
            cfg = set_keys(TrainConfig(), {**settings, **keys})
            reward = count_good if cfg.reward.fn is None else None
            found |= {f"{name}/{key}": value for key, value in run(cfg, backend, reward).items()}
            gc.collect()
        if backend.ranks.first:
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
        backend.ranks.gather(None)  # wait for all


if __name__ == "__main__":
    main(*sys.argv[1:])
