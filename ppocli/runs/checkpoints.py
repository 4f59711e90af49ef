"""Checkpoints that are complete or absent, and a search that returns only verified ones.

A save is staged in ``.staging-step-000120-<nonce>/``, listed in a manifest, synced, renamed to
``step-000120`` and checked. Loading scans the step folders, newest first, and takes the first one
whose manifest holds. The caller decides the contents (safetensors, JSON, a Hugging Face folder),
except for ``state.json``; pickles are refused. Another run may start from the value function in
it. ``retention`` deletes. No torch here.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppocli.config import config_yaml, schema, tasks
from ppocli.config.text import pasted
from ppocli.errors import CheckpointError, DiskError, InputError
from ppocli.runs import atomic, faults, model_files, retention, run_folder
from ppocli.version import __version__


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A verified step folder with its ``state.json``."""

    path: Path
    step: int
    versions: dict[str, str]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Search:
    """The newest valid checkpoint, and one line for each newer folder that was passed over:
    ``skipped step-000130: policy/model.safetensors hash mismatch``."""

    checkpoint: FoundCheckpoint | None
    skipped: tuple[str, ...]


def save_checkpoint(folder: Path, step: int, *, run_id: str, write: Callable[[Path], None],
                    state: dict[str, Any], config_digest: str, versions: dict[str, str]) -> Path:
    """Write the checkpoint of ``step``, durably; return its folder.

    A valid checkpoint of the same step, run, state and configuration is kept as it is and ``write``
    isn't called; any other folder of that name is replaced once the new one is complete.

    Args:
        folder: the run's ``checkpoints/``; created where missing.
        step: steps completed, >= 0.
        run_id: stored, and asked for again by :func:`find_latest`.
        write: puts files into the (empty) folder it is given; sub-folders are fine, links, pickles
            and a file named ``state.json`` or ``MANIFEST.json`` are not.
        state: stored as ``state.json``; strict JSON.
        config_digest: of the run's config.yaml, for the comparison at resume.
        versions: package name -> version, stored for the reader.

    Raises:
        DiskError: the disk refused; older checkpoints are untouched, the staging is gone.
        ValueError: ``write`` or ``state`` holds something that can't be stored.
    """
    target = folder / retention.step_name(step)
    meta = retention.Manifest(run_id=run_id, step=step, config_digest=config_digest,
                             ppocli=__version__, versions=dict(versions), files={})
    if _already_there(target, meta, state):
        return target
    def fill(staging: Path) -> None:
        faults.point("save.open")
        write(staging)
        for name in atomic.walk_files(staging):
            problem = "is reserved" if name == retention.STATE else retention.name_problem(name)
            if problem:
                raise ValueError(f"a checkpoint can't hold {name!r}: it {problem}")
        atomic.write_json_atomic(staging / retention.STATE, state)
        retention.write_manifest(staging, meta)

    def usual() -> int:
        return max((kept.total_bytes for kept in retention.sound_steps(folder)[-1:]), default=0)

    try:
        atomic.publish_folder(fill, target, "save", usual, f"step {step}")
    except DiskError as error:
        kept = retention.sound_steps(folder)
        rest = f"Kept step {kept[-1].step}." if kept else "No earlier step is on the disk."
        raise error.reworded(what=f"{error.what} {rest}", where=str(folder), fix=f"{error.fix}, "
                             f"then: ppocli resume {pasted(folder.parent)}") from error
    faults.point("save.after_rename")
    try:
        retention.check_folder(target, step=step, run_id=run_id, verify="size")
    except retention.Invalid as damage:
        raise DiskError(f"Step {step} reads back damaged right after writing: {damage}.",
                        where=str(target), fix="check the disk") from None
    return target


def _already_there(target: Path, meta: retention.Manifest, state: dict[str, Any]) -> bool:
    """Whether exactly this checkpoint exists; an invalid folder is deleted."""
    if not os.path.lexists(target):
        return False
    try:
        saved = retention.check_folder(target, step=meta.step, run_id=meta.run_id)
        state_there = retention.read_object(target, retention.STATE)
    except retention.Invalid:
        with atomic.disk_errors(target):
            retention.discard(target)
        return False
    same_state = state_there == json.loads(json.dumps(state, allow_nan=False))
    return same_state and saved.config_digest == meta.config_digest


def find_latest(folder: Path, *, run_id: str | None, verify: retention.Verify = "full") -> Search:
    """The newest valid checkpoint.

    Args:
        folder: the run's ``checkpoints/``; may be missing.
        run_id: the run it must belong to (``None``: any).
        verify: as of :func:`retention.check_folder`.

    Raises:
        CheckpointError: a newer ppocli wrote the newest intact one; going back silently would lose
            its work.
    """
    skipped: list[str] = []
    for step, path in reversed(retention.list_steps(folder)):
        try:
            return Search(_open(path, step, run_id, verify), tuple(skipped))
        except (retention.Invalid, OSError) as error:
            skipped.append(f"skipped {path.name}: {_why(error)}")
    return Search(None, tuple(skipped))


def _why(error: retention.Invalid | OSError) -> str:
    return getattr(error, "strerror", None) or str(error)


def refuse_pruned(run: run_folder.RunFolder) -> None:
    """Refuse to start a finished run afresh that has none of its checkpoints left.

    Raises:
        CheckpointError: its rows would be lost.
    """
    if (atomic.read_json(run.summary) or {}).get("status") == "finished":
        raise CheckpointError(f"{run.path.name} is finished, and none of its checkpoints is left.",
                              where=str(run.checkpoints),
                              fix="start another run with its model: "
                              f"{pasted(f'model.path={run.model}')} run_name=NAME")


def best_step(folder: Path) -> int | None:
    """The step with the best evaluation according to the newest valid checkpoint; None if it names
    none, or that step isn't kept."""
    latest = find_latest(folder, run_id=None, verify="size").checkpoint
    best = (latest.state.get("best") if latest else None) or {}
    return next((step for step, _ in retention.list_steps(folder) if step == best.get("step")),
                None)


def open_checkpoint(path: Path) -> FoundCheckpoint:
    """Open one checkpoint named by the user, or refuse it.

    Args:
        path: a step folder, or the ``latest`` or ``best`` link beside one.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer ppocli.
    """
    folder = path.absolute()
    if folder.name in retention.POINTERS and folder.is_symlink():
        folder = folder.resolve()
    match = retention.STEP.fullmatch(folder.name)
    try:
        return _open(folder, int(match[1]) if match else None)
    except (retention.Invalid, OSError) as error:
        present = ", ".join(path.name for _, path in retention.list_steps(folder.parent)) or "none"
        raise CheckpointError(f"{folder.name} can't be used: {_why(error)}", where=str(folder),
                              fix=f"name another checkpoint (there: {present})") from None


def _open(path: Path, step: int | None, run_id: str | None = None, verify: retention.Verify = "full"
          ) -> FoundCheckpoint:
    meta = retention.check_folder(path, step=step, run_id=run_id, verify=verify)
    return FoundCheckpoint(path, meta.step, meta.versions,
                           retention.read_object(path, retention.STATE))


def _with_critic(path: str) -> schema.ModelConfig | None:
    """The models of the PPO run that is named, by its folder or one of its checkpoints; None where
    ``path`` names something else."""
    folder = Path(path).absolute()
    around = run_folder.RunFolder(folder.parent.parent)
    run = around if around.checkpoints == folder.parent else run_folder.RunFolder(folder)
    cfg = config_yaml.read_config(run.config) if run.config.is_file() else None
    return cfg.model if cfg is not None and tasks.task_name(cfg) == "ppo" else None


def saved_critic(cfg: schema.ModelConfig) -> Path | None:
    """The folder of the value function that this one starts as, where ``model.value.path`` names a
    PPO run (its newest verified checkpoint is meant), one of its checkpoints, or an exported value
    adapter.

    Raises:
        InputError: there is none, it was trained without a critic, or with one of another kind;
            ``model.value.path`` names no such run, and the kind is none that is loaded whole.
        CheckpointError: it is damaged.
    """
    path, kind = cfg.value.path, cfg.value.kind
    for folder in () if path is None else (Path(path), Path(path) / model_files.VALUE_ADAPTER):
        if kind == "adapter" and (folder / model_files.ADAPTER_WEIGHTS).is_file() and (
                folder / model_files.VALUE_HEAD).is_file():
            return folder
    made = None if path is None else _with_critic(path)
    if path is None or (made is None and kind == "model"):
        return None
    if made is None or made.value.kind != kind:
        raise InputError(
            f"{path} has no value function of kind {kind}: " + (
                "it is no run of PPO." if made is None else f"its kind is {made.value.kind}."),
            where="model.value.path, model.value.kind", fix="name a PPO run, one of its "
            "checkpoints, or the folder that ppocli export --adapter has written" if made is None
            else f"set model.value.kind={made.value.kind}")
    run = run_folder.RunFolder(Path(path))
    checkpoint = find_latest(run.checkpoints, run_id=None).checkpoint if (
        run.config.is_file()) else open_checkpoint(run.path)
    if checkpoint is None or not (checkpoint.path / model_files.VALUE_HEAD).is_file():
        raise InputError(f"{path} has no checkpoint with a value function.",
                         where="model.value.path", fix="name another run, or leave the path out")
    return checkpoint.path


def value_start(cfg: schema.ModelConfig) -> schema.ModelConfig:
    """A configuration whose ``path`` and ``revision`` a value model is loaded from. For another
    run's critic, these are where that critic was loaded from."""
    start, seen = cfg, set[str]()
    while (path := start.value.path) is not None and path not in seen:
        seen.add(path)
        start = _with_critic(path) or replace(start, path=path, revision=None,
                                              value=replace(start.value, path=None))
    # a name from another run's configuration was not typed here: its code is not run
    return replace(cfg, path=start.path, revision=start.revision, trust_remote_code=(
        cfg.trust_remote_code and start.path in (cfg.path, cfg.value.path)))
