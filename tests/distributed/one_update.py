"""One rank of a small job: build a session, roll out, update once, tell what came of it.

    torchrun ... one_update.py CONFIG.json OUT.safetensors [save=DIR | load=DIR]
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# the import path has to be set first
import torch
from safetensors.torch import save_file
from sessions import (
    count_good,
    experience_tensors,
    fresh_state,
    load_session,
    optimize,
    rollout_of,
    save_session,
    set_keys,
)

from ppocli.config.schema import TrainConfig
from ppocli.parallel.backend import open_ranks
from ppocli.parallel.stop import StopFlag
from ppocli.tasks.ppo.evaluate import evaluate
from ppocli.tasks.ppo.experience import to_experience, update_moments
from ppocli.tasks.ppo.session import PythonObjects, Session, build_session
from ppocli.tasks.ppo.task import PPOTask
from ppocli.training.optimizers import named_trainable
from ppocli.zero.sharded_weights import gathered, optimizer_slots


def update(session: Session, step: int) -> tuple[Any, Any]:
    """One rollout and its optimize phase."""
    cfg = session.cfg
    rollout = rollout_of(session, step * cfg.ppo.num_rollouts)
    state = update_moments(fresh_state(session), rollout, cfg)
    experience = to_experience(rollout, state, cfg)
    stop = StopFlag()
    stop.ranks = session.backend.ranks
    return experience, optimize(session, experience, stop, step=step,
                               updates=step * 4)


def tensors_of(session: Session) -> dict[str, torch.Tensor]:
    """All weights and optimizer state, on every rank."""
    backend, found = session.backend, {}
    parameters = named_trainable(session.policy)
    with gathered(session.policy, backend.zero_stage):
        for name, parameter in parameters.items():
            found[f"weight/{name}"] = parameter.detach().cpu().clone()
    slots = optimizer_slots(parameters, session.trained.optimizer, backend.zero_stage,
                            backend.ranks)
    for part in backend.ranks.gather(slots):
        found.update({f"state/{name}": value for name, value in part.items()})
    return found


def main(config: str, out: str, *words: str) -> None:
    """``save=DIR``: write a checkpoint after the first
    step, then make a second one. ``load=DIR``: read that checkpoint and make the second step."""
    options = dict(word.split("=", 1) for word in words)
    cfg = set_keys(TrainConfig(), json.loads(Path(config).read_text()))
    with open_ranks(cfg) as backend:
        session = build_session(cfg, backend, PythonObjects(reward_fn=count_good))
        found: dict[str, torch.Tensor] = {}
        if "load" in options:
            load_session(session, Path(options["load"]))
        else:
            experience, result = update(session, 0)
            found |= experience_tensors(experience)
            found["terms"] = torch.tensor([result.terms[name] for name in sorted(result.terms)])
            found["counts"] = torch.tensor([result.updates, result.skipped, result.nonfinite])
        if "save" in options:
            Path(options["save"]).mkdir(exist_ok=True)
            save_session(session, Path(options["save"]))
        if "save" in options or "load" in options:
            update(session, 1)
        found |= tensors_of(session)
        stop = StopFlag()
        stop.ranks = backend.ranks
        figures = evaluate(session, stop).figures
        found["eval"] = torch.tensor([figures[name] for name in sorted(figures)])
        if backend.ranks.first:
            save_file(found, out)
        backend.ranks.gather(None)  # wait for all
        PPOTask(session).close()
        session.trained.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
