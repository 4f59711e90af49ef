"""Keys of earlier versions that are no longer read, and keys that had another default. The former
are ignored in a run's config.yaml, and refused on a command line with what to do instead."""

import logging
from typing import Any

log = logging.getLogger("ppocli")

GONE = {
    "checkpoint.background": "training waits while a checkpoint is written",
    "eval.ref_responses": "ppocli generate --model MODEL samples from the model trained from",
    "sweep.jobs": "hydra/launcher=joblib hydra.launcher.n_jobs=N runs N jobs at a time",
    "sweep.launcher": "hydra/launcher=submitit_slurm runs the jobs on Slurm",
    "sweep.slurm": "with hydra/launcher=submitit_slurm, Slurm's settings are hydra.launcher.NAME",
    "sweep.prune": "a search runs each of its jobs to the end",
    "hardware.node_rank": "torchrun or srun starts the processes of several machines",
    "hardware.rdzv_endpoint": "torchrun or srun starts the processes of several machines",
    "model.arch": "the model's config.json says whether it is an encoder-decoder",
    "rollout.transfer": "vLLM servers read new weights from a folder (rollout.weights_dir)",
}
"""dotted key or section -> its replacement, as the end of a sentence"""


def gone_key(key: str) -> str | None:
    """The entry of :data:`GONE` that a key is, or belongs to."""
    return next((name for name in GONE if f"{key}.".startswith(f"{name}.")), None)


def with_former_defaults(loaded: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, where they were written before ``ppo.step_kl`` was a key, with what its
    absence and ``ppo.kl_in=null`` meant then."""
    ppo = loaded.get("ppo")
    if not isinstance(ppo, dict) or "step_kl" in ppo:
        return loaded
    kl_in = ppo.get("kl_in") or ("loss" if ppo.get("advantage") == "grpo" else "reward")
    former = {"step_kl": None, "kl_in": kl_in, "lam": 0.95, "init_kl_coef": 0.05}
    return {**loaded, "ppo": {**former, **ppo, "kl_in": kl_in}}


def without_gone_keys(loaded: dict[str, Any]) -> dict[str, Any]:
    """A run's settings without the keys that are gone; these are logged."""
    settings = dict(loaded)
    for key, instead in GONE.items():
        section, _, last = key.rpartition(".")
        parent = settings.get(section) if section else settings
        if isinstance(parent, dict) and last in parent:
            log.info("%s of the run's configuration is ignored: %s", key, instead)
            rest = {name: value for name, value in parent.items() if name != last}
            settings = settings | {section: rest} if section else rest
    return settings
