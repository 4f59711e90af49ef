"""Run an evaluation, from its models to its files: sample and score a policy's responses, append
them, and sum them up at the end; or measure a model on rows of a data set, as ``ppocli sft`` and
``ppocli reward-model`` do on ``data.val``: loss and perplexity of a policy, accuracy of a reward
model."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from ppocli.config import config_yaml, import_guard, tasks
from ppocli.config.schema import TrainConfig
from ppocli.config.text import counted, first_line
from ppocli.distributed.backend import Backend, open_backend
from ppocli.distributed.ranks import StopFlag, StopRequested
from ppocli.environments.registry import code_files
from ppocli.errors import ConfigError, OutOfMemoryError, PpocliError, StoppedError
from ppocli.evaluation import eval_request as files
from ppocli.evaluation import statistics
from ppocli.evaluation.eval_request import EvalRequest, Row, base_target
from ppocli.models.loading import model_config
from ppocli.models.loading.load_adapters import tensors_digest
from ppocli.models.loading.tokenizer import load_tokenizer, present
from ppocli.ppo.policy_samples import evaluate_chunks, evaluation_size
from ppocli.ppo.session import EvalSession, build_eval_session
from ppocli.runs import atomic, model_files, run_folder, run_logs
from ppocli.runs.target import Target
from ppocli.training.state import PhaseClock, seed_generators
from ppocli.training.task import Evaluation, PythonObjects, StepContext, TaskSetup, build_task

log = logging.getLogger("ppocli")
Watch = Callable[[str, int, int], None]
"""called with the role of the model (policy, against, base), samples so far, and samples in all"""


@dataclass(slots=True)
class _Work:
    """An evaluation in progress."""

    request: EvalRequest
    session: EvalSession
    """of the current model"""
    targets: dict[str, Target]
    """by role, in the order they are evaluated in: policy, against, base"""
    objects: PythonObjects
    stop: StopFlag
    watch: Watch
    folder: Path
    settings: dict[str, Any]
    """from :func:`_settings_of`"""
    digests: dict[str, str] = field(default_factory=dict)
    """of each model's weights, by role"""
    rows: dict[str, list[Row]] = field(default_factory=dict)
    """of samples.jsonl, by role"""
    started: str = field(default_factory=statistics.now)
    clock: float = field(default_factory=monotonic)

    @property
    def num_samples(self) -> int:
        """How many samples are scored so far."""
        return sum(map(len, self.rows.values()))


def run_evaluation(request: EvalRequest, target: Target, cfg: TrainConfig, objects: PythonObjects,
                   *, stop: StopFlag, watch: Watch) -> tuple[Path, dict[str, Any]]:
    """Evaluate a policy, and what it is compared with, one model after the other.

    Args:
        cfg: of :mod:`ppocli.launch.target_config` with the request's overrides, paths absolute.
        objects: Python objects in place of reward, metric and prompts.
        stop: polled between tokens.

    Returns:
        the folder, and the contents of its eval.json.

    Raises:
        CheckpointError: the name exists.
        StoppedError: a signal; samples scored so far are kept.
        PpocliError: models, prompts, rewards, disk; samples scored so far are kept.
    """
    default = files.folder_of(request, target)
    if target.run_dir is not None and not request.output:
        run_folder.refuse_links(target.run_dir)
    files.refuse_existing(default, request)
    cfg = config_yaml.with_values(_without_own_reference(cfg, target), {
        "model.chat_template_date": cfg.model.chat_template_date or present()})
    targets = _targets(request, target, cfg)
    try:
        with open_backend(cfg.hardware, target.run_dir) as backend:
            session = _session(cfg, backend, objects, "policy", target, None)
            settings = _settings_of(session, targets, request.frontier)
            folder = files.new_folder(default, request)
            work = _Work(request, session, targets, objects, stop, watch, folder, settings)
            del session  # else its model would stay in memory together with the next one
            with files.working_in(folder, request.overwrite):
                return folder, _evaluate(work)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"Out of memory: {first_line(error)}", where="ppo.chunk_size",
            fix="give a smaller ppo.chunk_size=N (samples of one generate call)") from error
    except StopRequested as stopped:  # before the first sample
        raise StoppedError(f"stopped by {stopped}; nothing was sampled yet",
                           signal_number=stopped.signal_number) from None


def _settings_of(session: EvalSession, targets: dict[str, Target], frontier: bool
                 ) -> dict[str, Any]:
    """What determines the samples, as eval.json has it under ``settings``, ``generation``, ``seed``
    and ``base``."""
    cfg, judges = session.cfg, [judge for judge in (session.reward, session.metric) if judge]
    plays = {} if cfg.env.fn is None else {"env": asdict(cfg.env)}
    code = [path for judge in judges for path in judge.code_files]
    code += code_files(cfg.env) if plays else []
    return {
        "seed": cfg.seed, **plays, "frontier": frontier,
        "targets": [target.model for target in targets.values()],
        "generation": json.loads(json.dumps(asdict(session.eval_sampling))),
        "prompts": {**asdict(cfg.prompts), "chat": bool(cfg.prompts.chat),
                    "digest": session.eval_prompts.digest(), "count": len(session.eval_prompts)},
        "reward": asdict(cfg.reward),
        # code that was typed in has no file
        "code": {path: atomic.sha256_file(Path(path)) if Path(path).is_file() else None
                 for path in dict.fromkeys(code)},
        "model": asdict(cfg.model),
        "base_digest": session.reference_digest(), "chunk_size": session.chunk_size,
        "forward_rows": session.forward_rows, "logprobs_from": cfg.ppo.logprobs_from,
        "device": session.backend.device.type, "precision": session.backend.precision}


def _without_own_reference(cfg: TrainConfig, target: Target) -> TrainConfig:
    """``cfg`` without a reference for a bare model, whose KL to itself would be 0."""
    if cfg.model.reference.kind == "none":
        log.info("the run has no reference, so there is no KL; to measure it: "
                 "model.reference.kind=copy")
    elif target.run_dir is None and cfg.model.path == target.model:
        log.info("no KL: the base of this model is not known; to name it: model.path=FOLDER")
        return config_yaml.with_values(cfg, {"model.reference.kind": "none"})
    return cfg


def _targets(request: EvalRequest, target: Target, cfg: TrainConfig) -> dict[str, Target]:
    """The policy, the model of ``--against`` and the base of ``--frontier``, by role."""
    against = request.find_against(target, cfg, log.info)
    targets = {"policy": target} | ({} if against is None else {"against": against})
    if request.frontier:
        if cfg.model.reference.kind == "none":
            raise ConfigError("A frontier needs the KL to the base, and there is no reference.",
                              where="--frontier", fix="model.reference.kind=copy, and for a model "
                              "without a run model.path=FOLDER, its base")
        targets["base"] = base_target(target, cfg.model, "--frontier")
    return targets


def _session(cfg: TrainConfig, backend: Backend, objects: PythonObjects, role: str, target: Target,
             judges: EvalSession | None) -> EvalSession:
    """The session of one model; reward, metric and reference are those of ``judges`` if set."""
    if role == "base":
        cfg = config_yaml.with_values(cfg, {"prompts.eval.repeat": statistics.BASE_SAMPLES})
    if role == "against" and target.model != cfg.model.path:  # which may have another template
        cfg = config_yaml.with_values(cfg, {"model.chat_template_kwargs": {}})
    session = build_eval_session(cfg, backend, objects, policy=target.model, judges=judges)
    if role == "base":
        return replace(session, reference=None)  # its KL to itself would only cost time
    # a template's file may not exist any more, and changes nothing here
    bare = replace(cfg.model, chat_template=None, chat_template_kwargs={})
    if (session.reference is not None and target.model != cfg.model.path
            and load_tokenizer(bare).get_vocab() != session.tokenizer.get_vocab()):
        log.info("no KL of %s: its tokenizer is not that of %s", target.name, cfg.model.path)
        return replace(session, reference=None)
    return session


def _evaluate(work: _Work) -> dict[str, Any]:
    """Sample all models in turn, then write the results."""
    texts = list(work.session.eval_prompts.texts)
    each = work.session.cfg.prompts.eval.repeat
    sizes = {role: len(texts) * (statistics.BASE_SAMPLES if role == "base" else each)
             for role in work.targets}
    log.info("%s, %s each", counted(len(texts), "prompt"), counted(each, "response"))
    try:
        with run_logs.JsonlWriter(work.folder / files.SAMPLES) as writer:
            for role, target in work.targets.items():
                if role != "policy":
                    _next_model(work, role, target, texts)
                _sample(work, role, sum(sizes.values()), writer)
    except (StopRequested, PpocliError) as error:
        if not work.num_samples:
            raise
        kept = f"{counted(work.num_samples, 'sample')} stay in {work.folder / files.SAMPLES}"
        if isinstance(error, StopRequested):
            overwriting = ", with --overwrite" if work.request.name is not None else ""
            raise StoppedError(
                f"stopped by {error}; {kept}", signal_number=error.signal_number,
                fix=f"run it again{overwriting}: the same seed gives the same samples") from None
        log.warning(kept)
        raise
    return _finish(work)


def _next_model(work: _Work, role: str, target: Target, texts: list[str]) -> None:
    """Free the previous model, then load this one with the same reward, metric and reference.

    Raises:
        ConfigError: it has other prompts than the policy, whose prompts are ``texts``.
    """
    stripped: Any = {"policy": None, "loaded": None}
    work.session = judges = replace(work.session, **stripped)
    work.session = _session(judges.cfg, judges.backend, work.objects, role, target, judges)
    others = list(work.session.eval_prompts.texts)
    if len(texts) != len(others):
        raise ConfigError(f"The tokenizer of {target.name} makes {len(others)} prompts of what "
                          f"are {len(texts)} for the policy.", where="--against",
                          fix="leave out --against, or give prompts that both can hold")
    if changed := sum(text != other for text, other in zip(texts, others, strict=True)):
        log.warning("%d of %d prompts are not the same text for %s, whose tokenizer is another",
                    changed, len(texts), target.name)


def _sample(work: _Work, role: str, in_all: int, writer: run_logs.JsonlWriter) -> None:
    """Sample and score one model's responses, appending them chunk by chunk."""
    session, rows = work.session, work.rows.setdefault(role, [])
    total, prompts = evaluation_size(session), len(session.eval_prompts)
    work.digests[role] = tensors_digest(session.policy.lm.state_dict())
    work.watch(role, work.num_samples, in_all)
    with session.sampler.acting(session.policy) as policy:
        chunks = evaluate_chunks(session, session.context(work.stop), policy)
        while len(rows) < total:
            # rewards that draw random numbers draw the same ones in every evaluation
            seed_generators((session.cfg.seed * 1_000_003 + len(rows)) % 2**63)
            new = [{"model": role, "number": number, "prompt_index": number % prompts,
                    "sample": number // prompts, "metrics": {}, **sample}
                   for number, sample in enumerate(next(chunks), start=len(rows))]
            writer.append(new)
            rows += run_logs.finite_or_null(new)
            work.watch(role, work.num_samples, in_all)


def _finish(work: _Work) -> dict[str, Any]:
    """Write the frontier's picture, then eval.json; returns the contents of the latter."""
    session, frontier = work.session, None
    if work.request.frontier:
        frontier = statistics.frontier_of(work.rows["base"], work.rows["policy"],
                                    plain_sampling=session.eval_sampling.is_policy_distribution
                                    and session.eval_sampling.temperature == 1.0)
    report: dict[str, Any] = run_logs.finite_or_null(statistics.report_of(
        work.settings, work.digests, work.targets, work.rows, frontier, session=session,
        name=work.folder.name, started=work.started, seconds=monotonic() - work.clock))
    with work.stop.defer():
        if frontier is not None and import_guard.installed("matplotlib"):
            atomic.write_atomic(work.folder / files.PICTURE, statistics.frontier_svg(frontier))
        elif frontier is not None:
            log.info("no %s, which needs matplotlib: %s", files.PICTURE,
                     import_guard.pip_line("matplotlib"))
        atomic.write_json_atomic(work.folder / files.RESULT, report)
    return report


# On rows of a data set ----------------------------------------------------------------------------

def evaluate_rows(request: EvalRequest, target: Target, cfg: TrainConfig, *, stop: StopFlag
                  ) -> tuple[Path, dict[str, Any]]:
    """Evaluate a model, and what it is compared with, on ``data.val``; without it on all of
    ``data.path``.

    Args:
        cfg: of :func:`ppocli.launch.target_config.data_config`, paths absolute.

    Returns:
        as :func:`run_evaluation`. The figures are those of the task; samples
        are responses to the first prompts.

    Raises:
        CheckpointError: the name exists.
        PpocliError: the model, the data, the disk.
    """
    begun, started = monotonic(), statistics.now()
    cfg = config_yaml.with_values(cfg, {  # messages and checks of a training
        "checkpoint.keep_best": False, "hardware.memory_check": "off",
        "model.chat_template_date": cfg.model.chat_template_date or present()})
    default = files.folder_of(request, target)
    files.refuse_existing(default, request)
    targets = _targets(request, target, cfg)
    results: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    try:
        for role, each in targets.items():
            measured, digests, count = _measure(each, cfg, stop)
            settings |= {"data": digests.pop("data"), role: digests["model"]}
            errors = {name.removesuffix("_stderr"): value
                      for name, value in measured.figures.items() if name.endswith("_stderr")}
            results[role] = {
                "model": {"name": each.name, "path": each.model, "step": each.step,
                          "digest": digests["model"]},
                "figures": {name: value for name, value in measured.figures.items()
                            if not name.endswith("_stderr") and name != "accuracy_pairs"},
                "stderr": errors, "quantiles": {}, "samples": count, "scored": count}
            rows += [{"model": role, "number": i, "prompt_index": i, "sample": 0,
                      **{name: value for name, value in row.items() if name not in ("score", "kl")}}
                     for i, row in enumerate(measured.samples)]
    except StopRequested as stopped:
        raise StoppedError(f"stopped by {stopped}; nothing was written",
                           signal_number=stopped.signal_number) from None
    folder = files.new_folder(default, request)
    report: dict[str, Any] = run_logs.finite_or_null({
        "schema": statistics.SCHEMA, "name": folder.name, "kind": tasks.task_name(cfg),
        "run": None if target.run_dir is None else str(target.run_dir), "step": target.step,
        **results["policy"], "against": results.get("against"), "win_rate": None,
        "frontier": None, "base": None,
        "settings": {**settings, "task": cfg.task.fn, "seed": cfg.seed},
        "time": {"started": started, "finished": statistics.now(), "seconds": monotonic() - begun}})
    with files.working_in(folder, request.overwrite), stop.defer():
        with run_logs.JsonlWriter(folder / files.SAMPLES) as writer:
            writer.append(rows)
        atomic.write_json_atomic(folder / files.RESULT, report)
    return folder, report


def _measure(target: Target, cfg: TrainConfig, stop: StopFlag
             ) -> tuple[Evaluation, dict[str, str], int]:
    """The evaluation as in training, digests of rows and weights, and the number of rows."""
    model = model_config.policy_config(cfg.model, target.model)
    if not model_files.is_adapter(Path(target.model)):
        model = replace(model, peft={}, quantization=None)
    with open_backend(cfg.hardware, target.run_dir) as backend:
        task: Any = build_task(TaskSetup(replace(cfg, model=model), backend, PythonObjects()))
        if task.val is None:
            task.val = task.train
        digests = {"data": task.val.digest(), "model": tensors_digest(task.saved.lm.state_dict())}
        return task.evaluate(StepContext(stop, PhaseClock(backend.device))), digests, len(task.val)
