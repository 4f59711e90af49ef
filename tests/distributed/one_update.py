"""One rank of a small job: build a session, roll out, update once, tell what came of it.

    torchrun ... one_update.py CONFIG.json OUT.safetensors [save=DIR | load=DIR]
"""

import json
import sys
from pathlib import Path

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
from ppocli.distributed.backend import open_ranks
from ppocli.distributed.ranks import StopFlag
from ppocli.models.sharded_weights import gathered, optimizer_slots
from ppocli.ppo.policy_samples import evaluate
from ppocli.ppo.ppo_task import PPOTask
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.rollout_sources import collect_differing
from ppocli.ppo.session import PythonObjects, Session, build_session
from ppocli.ppo.step import to_experience
from ppocli.training.optimizers import named_trainable


def stop_of(session: Session) -> StopFlag:
    """A flag that all ranks look at."""
    stop = StopFlag()
    stop.ranks = session.backend.ranks
    return stop


def update(session: Session, step: int) -> tuple[Rollout, dict[str, torch.Tensor]]:
    """One rollout, and what it and its optimize phase came to."""
    cfg = session.cfg
    start, count = step * cfg.ppo.num_rollouts, cfg.ppo.num_rollouts
    rollout = rollout_of(session, start) if cfg.ppo.dynamic_sampling is None else collect_differing(
        session, session.context(stop_of(session)), start, count)
    experience = to_experience(rollout, fresh_state(session), cfg)
    result = optimize(session, experience, stop_of(session), step=step, updates=step * 4)
    return rollout, {
        **experience_tensors(experience),
        "terms": torch.tensor([result.terms[name] for name in sorted(result.terms)]),
        "drawn": torch.tensor(rollout.extras.sampled),
        "counts": torch.tensor([result.updates, result.skipped, result.nonfinite])}


def trained_weights(session: Session) -> dict[str, torch.Tensor]:
    """All trained weights, on every rank."""
    with gathered(session.policy, session.backend.zero_stage):
        return {f"weight/{name}": parameter.detach().cpu().clone()
                for name, parameter in named_trainable(session.policy).items()}


def optimizer_state(session: Session) -> dict[str, torch.Tensor]:
    """All of it, on every rank."""
    ranks = session.backend.ranks
    slots = optimizer_slots(named_trainable(session.policy), session.trained.optimizer,
                            session.backend.zero_stage, ranks)
    return {f"state/{name}": value for part in ranks.gather(slots) for name, value in part.items()}


def evaluation(session: Session) -> torch.Tensor:
    """Its figures."""
    figures = evaluate(session, session.context(stop_of(session))).figures
    return torch.tensor([figures[name] for name in sorted(figures)])


def leave(session: Session) -> None:
    """Free what it holds."""
    PPOTask(session).close()
    session.trained.close()


def main(config: str, out: str, *words: str) -> None:
    """``save=DIR``: write a checkpoint after the first step, then make a second one. ``load=DIR``:
    read that checkpoint and make the second step."""
    options = dict(word.split("=", 1) for word in words)
    cfg = set_keys(TrainConfig(), json.loads(Path(config).read_text()))
    with open_ranks(cfg) as backend:
        session = build_session(cfg, backend, PythonObjects(reward_fn=count_good))
        found: dict[str, torch.Tensor] = {}
        if "load" in options:
            load_session(session, Path(options["load"]))
        else:
            found |= update(session, 0)[1]
        if "save" in options:
            Path(options["save"]).mkdir(exist_ok=True)
            save_session(session, Path(options["save"]))
        if "save" in options or "load" in options:
            update(session, 1)
        found |= trained_weights(session) | optimizer_state(session)
        found["eval"] = evaluation(session)
        if backend.ranks.first:
            save_file(found, out)
        backend.ranks.gather(None)  # wait for all
        leave(session)


if __name__ == "__main__":
    main(*sys.argv[1:])
