"""An evaluation from its models to its files: of a policy's responses, which are sampled, scored,
appended and summed up at the end; or on rows of a data set, as ``ppocli sft`` and ``ppocli
reward-model`` make them of what they hold back: loss and perplexity of a policy, accuracy of a
reward model."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from ppocli.config import resolved, tasks
from ppocli.config.schema import TrainConfig
from ppocli.errors import CheckpointError, ConfigError, OutOfMemoryError, PpocliError, StoppedError
from ppocli.evaluation import figures, player
from ppocli.evaluation import request as files
from ppocli.evaluation.identity import begun_at, check_same, choose, identity_of
from ppocli.evaluation.request import EvalRequest, Row, base_target
from ppocli.models.loading import model_config
from ppocli.models.loading.adapters import tensors_digest
from ppocli.models.loading.chat_template import present
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.parallel.backend import Backend, open_backend
from ppocli.parallel.stop import StopFlag, StopRequested
from ppocli.runs import pictures
from ppocli.runs.target import Target
from ppocli.storage import atomic, model_files, run_folder, run_logs
from ppocli.tasks import build_task
from ppocli.tasks.ppo.evaluate import evaluate_chunks, evaluation_size, sampling_sweep
from ppocli.tasks.ppo.session import EvalSession, build_eval_session
from ppocli.text import counted, first_line
from ppocli.training.state import PhaseClock, seed_generators
from ppocli.training.task import Evaluation, PythonObjects, StepContext, TaskSetup

log = logging.getLogger("ppocli")
Watch = Callable[[str, int, int], None]
"""told which model is at work (policy, against, base), samples there, and samples in all"""


@dataclass(slots=True)
class _Work:
    """An evaluation in progress."""

    request: EvalRequest
    session: EvalSession
    """of the model at work"""
    targets: dict[str, Target]
    """by role, in the order they are evaluated in: policy, against, base"""
    objects: PythonObjects
    stop: StopFlag
    watch: Watch
    folder: Path
    identity: dict[str, Any]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    started: str = ""
    clock: float = field(default_factory=monotonic)

    @property
    def kept(self) -> int:
        """How many samples there are."""
        return sum(map(len, self.rows.values()))


def run_evaluation(request: EvalRequest, target: Target, cfg: TrainConfig, objects: PythonObjects,
                   *, stop: StopFlag, watch: Watch) -> tuple[Path, dict[str, Any]]:
    """Evaluate a policy, and what it is compared with, one model after the other.

    What was chosen, what a thing costs and where results are goes to the log.

    Args:
        cfg: of :mod:`ppocli.launching.target_config` with the request's overrides, paths absolute.
        objects: Python objects in place of reward, metric and prompts.
        stop: polled between tokens.

    Returns:
        the folder, and the contents of its eval.json.

    Raises:
        CheckpointError: a name that is taken, or samples of other settings to go on with.
        StoppedError: names the command that goes on.
        PpocliError: models, prompts, rewards, disk; samples scored so far are kept.
    """
    default = files.folder_of(request, target)
    if target.run_dir is not None and not request.output:
        run_folder.refuse_links(target.run_dir)
    files.refuse_taken(default, request)
    cfg = _without_own_reference(cfg, target)
    if cfg.model.chat_template_date is None:
        date = (begun_at(default) if request.resume else None) or present()
        cfg = resolved.with_values(cfg, {"model.chat_template_date": date})
    targets = _targets(request, target, cfg)
    try:
        with open_backend(cfg.hardware, target.run_dir) as backend:
            session = _session(cfg, backend, objects, "policy", target, None)
            if swept := list(sampling_sweep(cfg.generation, session.eval_sampling)):
                log.info("of the list in generation.eval the first value is taken: %s", swept[0])
            if target.run_dir is None:
                _say_declared(session, request)
            identity = identity_of(session, list(targets.values()), request.frontier, objects)
            _say_changed(target, request, cfg, identity["base_digest"])
            folder = choose(default, request, identity)
            if request.resume and files.is_finished(folder):
                if (report := files.read_result(folder)) is not None:
                    log.info("finished already: %s", folder / files.RESULT)
                    return folder, report
                log.info("%s is damaged: it is made again from the samples", folder / files.RESULT)
            work = _Work(request, session, targets, objects, stop, watch, folder, identity)
            del session  # else its model would stay in memory beside the next one
            with files.working_in(folder, request.overwrite):
                return folder, _evaluate(work)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"Out of memory: {first_line(error)}", where="ppo.chunk_size",
            fix="give a smaller ppo.chunk_size=N (samples of one generate call)") from error
    except StopRequested as stopped:  # before there was anything to go on with
        raise StoppedError(f"stopped by {stopped}; nothing was sampled yet",
                           signal_number=stopped.signal_number) from None


def _without_own_reference(cfg: TrainConfig, target: Target) -> TrainConfig:
    """A bare model has no base but itself, and the KL to itself says nothing."""
    if cfg.model.reference.kind == "none":
        log.info("the run has no reference, so there is no KL; to measure it: "
                 "model.reference.kind=copy")
    elif target.run_dir is None and cfg.model.path == target.model:
        log.info("no KL: the base of this model is not known; to name it: model.path=FOLDER")
        return resolved.with_values(cfg, {"model.reference.kind": "none"})
    return cfg


def _say_declared(session: EvalSession, request: EvalRequest) -> None:
    """Models are compared under equal sampling, so what a bare one wants for itself is only said.
    """
    spec = session.eval_sampling
    wanted = player.own_sampling(session.loaded)
    words = [f"generation.{name}={str(value).lower()}" for name, value in wanted.items()
             if getattr(spec, name) != value]
    if left := [word for word in words if not request.sets(word.partition("=")[0])]:
        log.info("the model's generation_config.json is not followed; to sample as it says: %s",
                 " ".join(left))


def _say_changed(target: Target, request: EvalRequest, cfg: TrainConfig, base: str | None) -> None:
    """Warn where a run's base, read again by its name, has other weights than in training."""
    if target.run_dir is None or any(map(request.sets, (
            "model.path", "model.revision", "model.dtype"))):
        return
    trained = run_folder.RunFolder(target.run_dir).started_with().get("reference model")
    if trained and base and trained != base:
        log.warning("the weights of %s have changed since %s was trained against them: the KL is "
                    "to what they are now", cfg.model.path, target.run_dir)


def _targets(request: EvalRequest, target: Target, cfg: TrainConfig) -> dict[str, Target]:
    """A policy and, if asked for, what it is compared with and the base of a frontier, by role."""
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
    """What judges one model; ``judges`` lends reward, metric and reference."""
    if role == "base":
        cfg = resolved.with_values(cfg, {"prompts.eval.repeat": figures.BASE_SAMPLES})
    if role == "against" and target.model != cfg.model.path:  # which may have another template
        cfg = resolved.with_values(cfg, {"model.chat_template_kwargs": {}})
    session = build_eval_session(cfg, backend, objects, policy=target.model, judges=judges)
    if role == "base":
        return replace(session, reference=None)  # its KL to itself would only cost time
    # a template's file may be gone since, and counts for nothing here
    bare = replace(cfg.model, chat_template=None, chat_template_kwargs={})
    if (session.reference is not None and target.model != cfg.model.path
            and load_tokenizer(bare).get_vocab() != session.tokenizer.get_vocab()):
        log.info("no KL of %s: its tokenizer is not that of %s", target.name, cfg.model.path)
        return replace(session, reference=None)
    return session


def _evaluate(work: _Work) -> dict[str, Any]:
    """All models in turn, then the files that sum up."""
    texts = list(work.session.eval_prompts.texts)
    each = work.session.cfg.prompts.eval.repeat
    sizes = {role: len(texts) * (figures.BASE_SAMPLES if role == "base" else each)
             for role in work.targets}
    work.rows = files.take_up(work.folder, sizes, work.session.chunk_size)
    total = sum(sizes.values())
    if work.kept:
        log.info("going on with %s: %d of %d samples are there", work.folder, work.kept, total)
    log.info("%s, %s each", counted(len(texts), "prompt"), counted(each, "response"))
    if "base" in sizes:
        log.info("--frontier costs %d more responses (%d of %s to each prompt) and as many rewards",
                 sizes["base"] - len(work.rows["base"]), figures.BASE_SAMPLES,
                 work.targets["base"].name)
    old = (atomic.read_json(work.folder / files.SETTINGS) or {}) if work.kept else {}
    work.started = str(old.get("started") or figures.now())
    _note_models(work, {**old.get("identity", {}).get("models", {}), **work.identity["models"]})
    try:
        with run_logs.JsonlWriter(work.folder / files.SAMPLES) as writer:
            for role, target in work.targets.items():
                if role != "policy":
                    _next_model(work, role, target, texts)
                _sample(work, role, total, writer)
    except (StopRequested, PpocliError) as error:
        if not work.kept or isinstance(error, CheckpointError):
            raise
        if work.objects == PythonObjects():
            command = work.request.command(work.targets["policy"], work.folder.name)
        else:  # no command line can name them
            command = f"call ppocli.evaluate again, with name={work.folder.name!r}, resume=True"
        kept = f"{work.kept} samples are kept in {work.folder / files.SAMPLES}"
        if isinstance(error, StopRequested):
            raise StoppedError(f"stopped by {error}; {kept}", signal_number=error.signal_number,
                               fix=f"go on with: {command}") from None
        log.warning("%s; to go on: %s", kept, command)
        raise
    return _finish(work)


def _next_model(work: _Work, role: str, target: Target, texts: list[str]) -> None:
    """Let go of the model before, then load this one beside the same judges and reference.

    Raises:
        ConfigError: its tokenizer can't hold all of the prompts, whose ``texts`` the policy got.
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
    _note_models(work, {role: tensors_digest(work.session.policy.lm.state_dict())})


def _note_models(work: _Work, models: dict[str, str]) -> None:
    """Write what the samples are of, with the weights of models that are reached now; refuse
    others than before."""
    work.identity = {**work.identity, "models": {**work.identity["models"], **models}}
    check_same(work.folder, work.identity)
    atomic.write_json_atomic(work.folder / files.SETTINGS, {
        "schema": 1, "started": work.started, "identity": run_folder.finite_or_null(work.identity)})


def _sample(work: _Work, role: str, in_all: int, writer: run_logs.JsonlWriter) -> None:
    """Sample and score what is missing of one model, appending chunk by chunk."""
    session, rows = work.session, work.rows[role]
    total, prompts = evaluation_size(session), len(session.eval_prompts)
    work.watch(role, work.kept, in_all)
    told = role != "policy" or "base" not in work.rows
    with session.acting() as acting:
        chunks = evaluate_chunks(acting, session.context(work.stop), skip=len(rows))
        while len(rows) < total:
            # rewards that draw random numbers draw the same ones when a chunk is done again
            seed_generators((session.cfg.seed * 1_000_003 + len(rows)) % 2**63)
            begun = monotonic()
            new = [{"model": role, "number": number, "prompt_index": number % prompts,
                    "sample": number // prompts, "metrics": {}, **sample}
                   for number, sample in enumerate(next(chunks), start=len(rows))]
            writer.append(new)
            rows += run_folder.finite_or_null(new)
            if not told:
                each = (monotonic() - begun) / len(new)
                left = prompts * figures.BASE_SAMPLES - len(work.rows["base"])
                log.info("--frontier will take about %.0f s more (by the first chunk)", each * left)
                told = True
            work.watch(role, work.kept, in_all)


def _finish(work: _Work) -> dict[str, Any]:
    """eval.json, and the frontier's picture before it."""
    session, found = work.session, None
    if work.request.frontier:
        found = figures.frontier_of(work.rows["base"], work.rows["policy"],
                                    plain_sampling=session.eval_sampling.is_policy_distribution
                                    and session.eval_sampling.temperature == 1.0)
    report: dict[str, Any] = run_folder.finite_or_null(figures.report_of(
        work.identity, work.targets, work.rows, found, session=session, name=work.folder.name,
        started=work.started, seconds=monotonic() - work.clock))
    with work.stop.defer():
        if found is not None and pictures.installed():
            atomic.write_atomic(work.folder / files.PICTURE, figures.frontier_svg(found))
        elif found is not None:
            log.info("no %s: %s", files.PICTURE, pictures.MISSING)
        atomic.write_json_atomic(work.folder / files.RESULT, report)
    return report


# On rows of a data set ----------------------------------------------------------------------------

def evaluate_rows(request: EvalRequest, target: Target, cfg: TrainConfig, *, stop: StopFlag
                  ) -> tuple[Path, dict[str, Any]]:
    """Evaluate a model, and what it is compared with, on ``data.val``; without it on all of
    ``data.path``.

    Args:
        cfg: of :func:`ppocli.launching.target_config.data_config`, paths absolute.

    Returns:
        as :func:`run_evaluation`. The figures are those of the task; samples
        are responses to the first prompts.

    Raises:
        CheckpointError: a name that is taken.
        PpocliError: the model, the data, the disk.
    """
    begun, started = monotonic(), figures.now()
    cfg = resolved.with_values(cfg, {  # what is said, and refused, of a training
        "checkpoint.keep_best": False, "hardware.memory_check": "off",
        "model.chat_template_date": cfg.model.chat_template_date or present()})
    default = files.folder_of(request, target)
    files.refuse_taken(default, request)
    targets = _targets(request, target, cfg)
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
                            if not name.endswith("_stderr") and name != "accuracy_pairs"},
                "stderr": errors, "quantiles": {}, "samples": count, "scored": count}
            rows += [{"model": role, "number": i, "prompt_index": i, "sample": 0,
                      **{name: value for name, value in row.items() if name not in ("score", "kl")}}
                     for i, row in enumerate(measured.samples)]
    except StopRequested as stopped:
        raise StoppedError(f"stopped by {stopped}; nothing was written",
                           signal_number=stopped.signal_number) from None
    identity |= {"task": cfg.task.fn, "seed": cfg.seed}
    folder = choose(default, request, identity)
    report: dict[str, Any] = run_folder.finite_or_null({
        "schema": figures.SCHEMA, "name": folder.name, "kind": tasks.task_name(cfg),
        "run": None if target.run_dir is None else str(target.run_dir), "step": target.step,
        **found["policy"], "against": found.get("against"), "win_rate": None, "frontier": None,
        "base": None, "settings": identity,
        "time": {"started": started, "finished": figures.now(), "seconds": monotonic() - begun}})
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
    model = model_config.policy_config(cfg.model, target.model)
    if not model_files.is_adapter(Path(target.model)):
        model = replace(model, peft={}, quantization=None)
    with open_backend(cfg.hardware, target.run_dir) as backend:
        task: Any = build_task(TaskSetup(replace(cfg, model=model), backend, PythonObjects()))
        if task.val is None:
            task.val = task.train
        digests = {"data": task.val.digest(), "model": tensors_digest(task.saved.lm.state_dict())}
        return task.evaluate(StepContext(stop, PhaseClock(backend.device))), digests, len(task.val)
