"""Resuming a run: the newest valid checkpoint is loaded, and files are cut back to it."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ppocli.config import tasks
from ppocli.config.text import pasted
from ppocli.distributed.backend import made_on
from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.errors import CheckpointError
from ppocli.models import sharded_weights
from ppocli.models.loading.load_adapters import fill_adapter
from ppocli.runs import atomic, checkpoints, retention, run_folder, run_logs
from ppocli.training import checkpoint_writing, loop, optimizers
from ppocli.training.state import Generators, Pace, RunLength, TrainState, seed_generators
from ppocli.training.task import Task

log = logging.getLogger("ppocli")


def restore(task: Task, folder: run_folder.RunFolder, run_id: str, fresh: TrainState) -> TrainState:
    """Load the newest valid checkpoint; remove rows and set aside folders of later steps.

    Args:
        fresh: the state a run of this configuration starts with.

    Raises:
        CheckpointError: there is none, or prompts or reference are not those of the run.
    """
    ranks = task.backend.ranks
    if (place := ranks.first_does(lambda: _newest(task, folder, run_id, fresh))) is None:
        return fresh
    path, state = place
    task.length = RunLength.of(task.cfg, task.examples, state.pace)
    tensors = read_checkpoint(task, path)
    ranks.first_does(lambda: _tidy(task, folder, path, state))
    return replace(state, tensors=tensors)


def _newest(task: Task, folder: run_folder.RunFolder, run_id: str, fresh: TrainState
            ) -> tuple[Path, TrainState] | None:
    """The checkpoint to go on from and its state; None starts afresh, where that was allowed."""
    leftovers = (*retention.clean_staging(folder.checkpoints),
                 *retention.clean_staging(folder.nonfinite_dump),
                 *atomic.repair_published(folder.model))
    for place in (folder.path, folder.events):
        atomic.sweep(place)
    search = checkpoints.find_latest(folder.checkpoints, run_id=run_id)
    for line in (*leftovers, *search.skipped):
        log.warning(line)
    if search.checkpoint is not None:
        here = made_on(task.backend)
        other = {name: (before, value) for name, value in here.items()
                 if (before := search.checkpoint.versions.get(name, value)) != value}
        if other:
            log.warning("the checkpoint was made on other hardware or settings than this run goes "
                        "on with (%s): equal up to rounding, not bit-exact", ", ".join(
                            f"{name}: {before} -> {now}" for name, (before, now) in other.items()))
        saved = TrainState.from_json(search.checkpoint.state)
        return search.checkpoint.path, _adopt(task, saved, fresh, folder)
    if task.cfg.resume == "auto":
        checkpoints.refuse_pruned(folder)  # starting afresh would remove what was worth keeping
        log.info("No checkpoint in %s: the run starts from the beginning.", folder.checkpoints)
        retention.update_pointers(folder.checkpoints, latest=None, best=None)
        _forget_after(folder, -1, -1)
        return None
    raise CheckpointError(f"No valid checkpoint in {folder.checkpoints}.", where=str(folder.path),
                          fix="start again: the words it was started with, and "
                          f"{pasted('run_name=' + folder.path.name)} resume=auto; or choose "
                          "another run_name")


def _tidy(task: Task, folder: run_folder.RunFolder, path: Path, state: TrainState) -> None:
    """Cut the run's files back to a checkpoint that has been loaded."""
    loop.keep_checkpoints(task, folder, state)  # a kill may have come between a save and this
    last_row = state.step - (state.pending is not None)
    _forget_after(folder, state.step, last_row)
    if state.episodes < task.length.total_samples:
        _set_aside_finished(folder)
    log.info("resuming step %d of %d from %s (verified)", state.step, task.length.total_steps, path)


def _adopt(task: Task, state: TrainState, fresh: TrainState, folder: run_folder.RunFolder
           ) -> TrainState:
    """The saved state under the present configuration."""
    changed = [name for name in {**state.digests, **fresh.digests}
               if state.digests.get(name) != fresh.digests.get(name)]
    if changed:
        raise CheckpointError(f"Not what the run was started with: {', '.join(changed)}. The "
                              "files (or the arguments) have changed.", where=str(folder.path),
                              fix="put them back, or start another run (another run_name)")
    state, now = task.resume.adopt(state, fresh), tasks.samples_per_step(task.cfg)
    pace, best = state.pace or Pace(now), state.best
    if pace.num_rollouts != now:
        pace = Pace(now, state.step, state.episodes)
    if best is not None and state.judged_by != fresh.judged_by:
        log.info("what evaluations are judged by (see docs/runs.md) has changed: the best "
                 "evaluation so far (step %d) is not comparable and forgotten", best.step)
        best = None
    return replace(state, pace=pace, best=best, judged_by=fresh.judged_by)


def _forget_after(folder: run_folder.RunFolder, step: int, last_row: int) -> None:
    """Remove rows past ``step``, and those that finishing it will write again where its figures are
    past ``last_row``."""
    run_logs.truncate_jsonl(folder.metrics, last_row)
    run_logs.truncate_jsonl(folder.samples, step, also=lambda row: step > last_row and (
        row.get("step"), row.get("kind")) == (step, loop.EVAL_ROW))
    run_logs.truncate_events(folder.events, last_row)


def _set_aside_finished(folder: run_folder.RunFolder) -> None:
    """A run that goes on is not finished any more: its summary goes, its model is kept under the
    number of its last step."""
    summary = atomic.read_json(folder.summary) or {}
    folder.summary.unlink(missing_ok=True)
    if folder.model.is_dir():
        step = summary.get("steps")
        target = folder.path / f"model-step-{step if isinstance(step, int) else 0:06d}"
        if not target.exists():
            folder.model.rename(target)
            log.info("the model of the finished run is now %s", target)


def fill_module(module: torch.nn.Module, tensors: checkpoint_writing.Tensors, what: str, *,
                tied_ok: bool = False, where: str = "model.path",
                fix: str = "resume with the model the run was started with") -> None:
    """Put a checkpoint's tensors in place of a module's, which may be in parts.

    Args:
        what: the module, for messages, as are ``where`` and ``fix``.
        tied_ok: what shares memory with one of them may not be among them.

    Raises:
        CheckpointError: one is missing, superfluous or of another shape.
    """
    state = module.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in tensors if tied_ok and name in state}
    wrong = [f"{name}: {tuple(tensors[name].shape)} saved, {tuple(whole_shape(state[name]))} here"
             for name in tensors
             if name in state and tensors[name].shape != whole_shape(state[name])]
    computed = getattr(module, "_keys_to_ignore_on_save", None) or ()  # Marian's positions
    missing = [f"{name} is not saved" for name in state if name not in tensors
               and id(state[name]) not in filled and name not in computed]
    extra = [f"{name} is not in the model" for name in tensors if name not in state]
    if problems := wrong + missing + extra:
        raise CheckpointError(f"The {what} of the checkpoint does not fit the model: "
                              f"{'; '.join(problems[:3])}", where=where, fix=fix)
    with torch.no_grad():
        for name, tensor in tensors.items():
            with sharded_weights.one_gathered(state[name], modify=True):
                state[name].copy_(tensor)


def _load_modules(task: Task, folder: Path) -> None:
    expected = checkpoint_writing.module_files(task)
    present = {path.name for path in folder.glob("*.safetensors")
             if path.name != checkpoint_writing.TASK_STATE
             and not path.name.startswith(("optimizer.", "optimizer-", "rng.", "rng-"))}
    if present != set(expected):
        raise CheckpointError(
            "What trains beside the model (a value function, say) is of another kind in the "
            f"checkpoint: it has {', '.join(sorted(present)) or 'none'}, the run needs "
            f"{', '.join(sorted(expected)) or 'none'}",
            where="model.value, ppo.advantage, model.reference.sync_every",
            fix="resume with what the run was started with")
    for name, module in expected.items():
        fill_module(module, load_file(folder / name), Path(name).stem.replace("_", " "))


def _restore_optimizer(task: Task, folder: Path) -> None:
    """Fill the optimizer's state by name; every parameter must find what it had."""
    parameters = optimizers.named_trainable(task.trained.module)
    with ExitStack() as files:
        saved: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob(f"{Path(checkpoint_writing.OPTIMIZER).stem}*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            for key in file.keys():  # noqa: SIM118 - no dict
                name, slot = key.rsplit("/", 1)
                saved.setdefault(name, {})[slot] = (file, key)
        extra = sorted(set(saved) - set(parameters))
        # parameters that never had a gradient (critic warm-up) have no state; else all have it
        wrong = [n for n, slots in saved.items() if n in parameters and any(
            not sharded_weights.slot_fits(slot, tuple(file.get_slice(key).get_shape()),
                                          tuple(whole_shape(parameters[n])))
            for slot, (file, key) in slots.items())]
        if extra or wrong:
            raise CheckpointError(
                "The optimizer state of the checkpoint does not fit: "
                f"{', '.join((extra + wrong)[:3])}",
                where="model.num_layers_unfrozen, ppo.optimizer",
                fix="resume with the model and optimizer the run was started with")
        optimizer, stage = task.trained.optimizer, task.backend.zero_stage
        sharded_weights.fill_optimizer(parameters, optimizer, stage, {
            name: {slot: partial(file.get_tensor, key)
                   for slot, (file, key) in slots.items()} for name, slots in saved.items()})


def read_checkpoint(task: Task, folder: Path) -> checkpoint_writing.Tensors:
    """Load weights, modules, optimizer and generators from a verified checkpoint folder. All ranks
    call it in step.

    Returns:
        the task's own tensors.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    stage, ranks, saved = task.backend.zero_stage, task.backend.ranks, task.saved
    module = task.trained.module
    weights: checkpoint_writing.Tensors = {}
    for path in sorted((folder / checkpoint_writing.POLICY).glob("*.safetensors")):
        weights |= load_file(path)
    if saved.adapter is None:
        if weights.keys() - saved.lm.state_dict().keys():
            weights.clear()
            # transformers writes some kinds (GPT-NeoX, mixtures of experts) as earlier versions had
            # them, and alone knows how to read these
            weights = type(saved.lm).from_pretrained(
                folder / checkpoint_writing.POLICY,
                dtype=next(saved.lm.parameters()).dtype).state_dict()
        fill_module(saved.lm, weights, "policy", tied_ok=True)
    else:
        with sharded_weights.gathered(module, stage, modify=True):
            fill_adapter(saved.adapter, weights, str(folder / checkpoint_writing.POLICY))
    del weights
    _load_modules(task, folder)
    sharded_weights.adopt_weights(module, stage)
    _restore_optimizer(task, folder)
    if (generators := Generators.read(folder, ranks.rank)) is None:
        log.info("the checkpoint has no random generators of rank %d: those of rewards start anew",
                 ranks.rank)
        seed_generators(task.cfg.seed + ranks.rank)
    else:
        generators.restore(task.backend.device)
    path = folder / checkpoint_writing.TASK_STATE
    return load_file(path) if path.is_file() else {}
