"""Another run's value function, from which this one starts. No torch here."""

from dataclasses import replace
from pathlib import Path

from ppocli.config import resolved, schema, tasks
from ppocli.errors import InputError
from ppocli.storage import checkpoints, model_files, run_folder


def _with_critic(path: str) -> schema.ModelConfig | None:
    """The models of the PPO run that is named, by its folder or one of its checkpoints; None where
    ``path`` names something else."""
    folder = Path(path).absolute()
    around = run_folder.RunFolder(folder.parent.parent)
    run = around if around.checkpoints == folder.parent else run_folder.RunFolder(folder)
    cfg = resolved.read_config(run.config) if run.config.is_file() else None
    return cfg.model if cfg is not None and tasks.task_name(cfg) == "ppo" else None


def saved_critic(cfg: schema.ModelConfig) -> checkpoints.FoundCheckpoint | None:
    """The verified checkpoint whose value function this one starts as, where ``model.value.path``
    names a PPO run (its newest checkpoint is meant) or one of its checkpoints.

    Raises:
        InputError: there is none, it was trained without a critic, or with one of another kind;
            ``model.value.path`` names no such run, and the kind is none that is loaded whole.
        CheckpointError: it is damaged.
    """
    path, kind = cfg.value.path, cfg.value.kind
    made = None if path is None else _with_critic(path)
    if path is None or (made is None and kind == "model"):
        return None
    if made is None:
        raise InputError(f"{path} is no run of PPO: there is no value function of kind {kind}.",
                         where="model.value.path", fix="name a PPO run or one of its checkpoints")
    if made.value.kind != kind:
        raise InputError(f"The value function of {path} is of kind {made.value.kind}, not {kind}.",
                         where="model.value.path, model.value.kind",
                         fix=f"set model.value.kind={made.value.kind}")
    folder = run_folder.RunFolder(Path(path))
    found = checkpoints.find_latest(folder.checkpoints, run_id=None).found if (
        folder.config.is_file()) else checkpoints.open_checkpoint(folder.path)
    if found is None or not (found.path / model_files.VALUE_HEAD).is_file():
        raise InputError(f"{path} holds no value function: " + (
            "no checkpoint is there." if found is None else "it was trained without a critic."),
            where="model.value.path", fix="name another run, or leave the path out")
    return found


def value_start(cfg: schema.ModelConfig) -> schema.ModelConfig:
    """From what a value model is loaded: the ``path`` and ``revision`` of a configuration. Of
    another run's critic that is what this one was loaded from."""
    start, seen = cfg, set[str]()
    while (path := start.value.path) is not None and path not in seen:
        seen.add(path)
        start = _with_critic(path) or replace(start, path=path, revision=None,
                                              value=replace(start.value, path=None))
    # what the other run names, nobody here has typed: its code is not run
    return replace(cfg, path=start.path, revision=start.revision, trust_remote_code=(
        cfg.trust_remote_code and start.path in (cfg.path, cfg.value.path)))
