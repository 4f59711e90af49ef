"""Real sessions on tiny models, for tests of the engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from helpers import save_lm, write_prompts

from ppocli.config.schema import TrainConfig
from ppocli.parallel.backend import open_ranks
from ppocli.parallel.stop import StopFlag
from ppocli.ppo.noise import ROLLOUT
from ppocli.tasks.ppo.records import TrainState
from ppocli.tasks.ppo.rollout import collect_rollout
from ppocli.tasks.ppo.session import PythonObjects, Session, build_session
from ppocli.train.clock import PhaseClock


def count_good(outputs, **_: Any) -> list[float]:
    """A reward with spread on random text: how often some words occur."""
    return [float(sum(w in ("good", "great", "warm", "a") for w in o.split())) for o in outputs]


def set_keys(cfg: Any, values: dict[str, Any]) -> Any:
    """Set dotted keys on a configuration; unknown names fail."""
    for key, value in values.items():
        node = cfg
        *parents, last = key.split(".")
        for name in parents:
            node = getattr(node, name)
        assert is_dataclass(node)
        assert last in {f.name for f in fields(node)}, key
        setattr(node, last, value)
    return cfg


def small_config(folder: Path, **keys: Any) -> TrainConfig:
    """A configuration on a tiny model and prompts below ``folder``; dots in names as ``__``."""
    lm = folder / "lm"
    if not lm.exists():
        save_lm(lm)
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts)
    values = {"model.path": str(lm), "prompts.path": str(prompts), "ppo.num_steps": 2,
              "ppo.num_rollouts": 16, "ppo.mini_batch_size": 8, "generation.max_new_tokens": 10,
              "hardware.device": "cpu", "ppo.optimizer.lr": 1e-3}
    values.update({key.replace("__", "."): value for key, value in keys.items()})
    return set_keys(TrainConfig(), values)


@contextmanager
def session_of(cfg: TrainConfig, reward: Any = count_good) -> Iterator[Session]:
    """A built session; the accelerator's global state is cleared afterwards."""
    with open_ranks(cfg) as backend:
        yield build_session(cfg, backend, PythonObjects(reward_fn=reward))


def rollout_of(session: Session, start: int = 0, count: int | None = None):
    """One rollout from episode ``start``."""
    count = count or session.cfg.ppo.num_rollouts
    return collect_rollout(session, session.next_prompts(start, count), ROLLOUT, StopFlag(),
                           PhaseClock.start(session.backend.device))


def fresh_state(session: Session) -> TrainState:
    """The state before the first step."""
    coef = session.cfg.ppo.init_kl_coef
    return TrainState(kl_coef=coef, init_kl_coef=coef, digests={}, judged_by="")


def weights_of(session: Session) -> dict[str, Any]:
    """A copy of all weights of the policy."""
    return {n: t.detach().clone() for n, t in session.policy.state_dict().items()}
