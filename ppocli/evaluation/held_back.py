"""Evaluations on rows of a data set, as ``ppocli sft`` and ``ppocli reward-model`` make them of
what they hold back: loss and perplexity of a policy, accuracy of a reward model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from ppocli.config import kinds, tasks
from ppocli.config.resolved import with_values
from ppocli.config.schema import TrainConfig
from ppocli.errors import StoppedError
from ppocli.evaluation import figures, player
from ppocli.evaluation import request as files
from ppocli.evaluation.identity import choose
from ppocli.evaluation.request import EvalRequest
from ppocli.models.loading.adapters import tensors_digest
from ppocli.parallel.backend import open_backend
from ppocli.parallel.stop import StopFlag, StopRequested
from ppocli.runs.target import Target
from ppocli.storage import atomic, model_files, run_folder, run_logs
from ppocli.tasks.select import build_task
from ppocli.training.task import Evaluation, PythonObjects, TaskSetup


def evaluate_rows(request: EvalRequest, target: Target, cfg: TrainConfig, *, stop: StopFlag,
                  say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Evaluate a model, and what it is compared with, on ``data.val``; without it on all of
    ``data.path``.

    Args:
        cfg: of :func:`ppocli.launching.target_config.data_config`, paths absolute.

    Returns:
        as :func:`ppocli.evaluation.work.run_evaluation`. The figures are those of the task; samples
        are responses to the first prompts.

    Raises:
        CheckpointError: a name that is taken.
        PpocliError: the model, the data, the disk.
    """
    model_files.quiet_transformers()
    begun, started = monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    cfg = with_values(cfg, {  # what is said, and refused, of a training
        "checkpoint.keep_best": False, "hardware.memory_check": "off"})
    root = Path(request.output).expanduser().absolute() if request.output else (
        target.run_dir or Path.cwd()) / files.EVAL
    default = root / (request.name or target.label)
    files.refuse_taken(default, request)
    targets = {"policy": target}
    if (other := request.find_against(target, cfg, say)) is not None:
        targets["against"] = other
    found: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    identity: dict[str, Any] = {}
    try:
        for role, each in targets.items():
            measured, digests, count = _measure(each, cfg, stop)
            identity |= {"data": digests.pop("data"), role: digests["model"]}
            errors = {name.removesuffix("_stderr"): value
                      for name, value in measured.figures.items() if name.endswith("_stderr")}
            found[role] = {
                "model": {"name": each.name, "path": each.model, "step": each.step,
                          "digest": digests["model"]},
                "figures": {name: value for name, value in measured.figures.items()
                            if not name.endswith("_stderr")},
                "stderr": errors, "quantiles": {}, "samples": count, "scored": count}
            rows += [{"model": role, "number": i, "prompt_index": i, "sample": 0,
                      **{name: value for name, value in row.items() if name not in ("score", "kl")}}
                     for i, row in enumerate(measured.samples)]
    except StopRequested as stopped:
        raise StoppedError(f"stopped by {stopped}; nothing was written",
                           signal_number=stopped.signal_number) from None
    identity |= {"task": cfg.task.fn, "seed": cfg.seed}
    folder = choose(default, request, identity, say)
    report: dict[str, Any] = run_folder.finite_or_null({
        "schema": figures.SCHEMA, "name": folder.name, "kind": tasks.task_name(cfg),
        "run": None if target.run_dir is None else str(target.run_dir), "step": target.step,
        **found["policy"], "against": found.get("against"), "win_rate": None, "frontier": None,
        "base": None, "settings": identity,
        "time": {"started": started, "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                 "seconds": monotonic() - begun}})
    with files.working_in(folder, request.overwrite), stop.defer():
        atomic.write_json_atomic(folder / files.SETTINGS, {"schema": 1, "started": started,
                                                           "identity": identity})
        with run_logs.JsonlWriter(folder / files.SAMPLES) as writer:
            writer.append(rows)
        atomic.write_json_atomic(folder / files.RESULT, report)
    return folder, report


def _measure(target: Target, cfg: TrainConfig, stop: StopFlag
             ) -> tuple[Evaluation, dict[str, str], int]:
    """What the evaluation of a training would find, digests of rows and weights, and how many rows
    there are."""
    model = player.policy_config(cfg.model, target.model)
    if not model_files.is_adapter(Path(target.model)):
        model = replace(model, peft={}, quantization=None)
    with open_backend(cfg.hardware) as backend:
        task: Any = build_task(TaskSetup(replace(cfg, model=model), backend,
                                         PythonObjects()))
        if task.val is None:
            task.val = task.train
        digests = {"data": task.val.digest(),
                   "model": tensors_digest(task.saved.lm.state_dict())}
        return task.evaluate(stop), digests, len(task.val)


def main_figures(report: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of an eval.json that say most, by their labels."""
    kind = kinds.KINDS.get(report.get("kind", "ppo"), kinds.KINDS["ppo"])
    return {label: report["figures"].get(name) for label, name in kind.evaluations}
