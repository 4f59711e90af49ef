"""An evaluation from its models to its files: sample, score, append, and sum up at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from ppocli.config.schema import TrainConfig
from ppocli.errors import CheckpointError, ConfigError, OutOfMemoryError, PpocliError, StoppedError
from ppocli.evaluation.figures import SAMPLES, frontier_of, frontier_svg, report_of
from ppocli.evaluation.folder import (
    EVAL,
    EvalFolder,
    Place,
    Row,
    check_same,
    choose,
    read_result,
    take_up,
    working_in,
)
from ppocli.evaluation.identity import identity_of
from ppocli.evaluation.player import own_sampling
from ppocli.evaluation.request import EvalRequest, base_target
from ppocli.models.loading.adapters import tensors_digest
from ppocli.models.loading.language_model import load_tokenizer
from ppocli.parallel.backend import Backend, open_backend
from ppocli.parallel.stop import StopFlag, StopRequested
from ppocli.runs.target import Target
from ppocli.storage.atomic import read_json, write_atomic, write_json_atomic
from ppocli.storage.model_files import quiet_transformers
from ppocli.storage.run_folder import finite_or_null
from ppocli.storage.run_logs import JsonlWriter
from ppocli.tasks.ppo.evaluate import EvalChunk, evaluate_chunks, evaluation_size
from ppocli.tasks.ppo.session import (
    EvalSession,
    PythonObjects,
    build_eval_session,
    sampling_sweep,
)
from ppocli.text import counted, first_line
from ppocli.training.state import seed_generators

log = logging.getLogger("ppocli")
Watch = Callable[[str, int, int], None]
"""told which model is at work (policy, against, base), samples there, and samples in all"""


@dataclass(frozen=True, slots=True)
class Part:
    """One model of an evaluation."""

    role: str
    """policy, against or base"""
    target: Target
    repeat: int
    """responses to each prompt"""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished evaluation."""

    folder: EvalFolder
    report: dict[str, Any]
    """the contents of eval.json"""


@dataclass(slots=True)
class _Work:
    """An evaluation in progress."""

    request: EvalRequest
    session: EvalSession
    """of the model at work"""
    parts: list[Part]
    objects: PythonObjects
    stop: StopFlag
    say: Callable[[str], None]
    watch: Watch
    folder: EvalFolder
    identity: dict[str, Any]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    started: str = ""
    clock: float = field(default_factory=monotonic)

    @property
    def kept(self) -> int:
        """How many samples there are."""
        return sum(map(len, self.rows.values()))


def run_evaluation(request: EvalRequest, target: Target, cfg: TrainConfig, objects: PythonObjects,
                   *, stop: StopFlag, say: Callable[[str], None], watch: Watch) -> Done:
    """Evaluate a policy, and what it is compared with, one model after the other.

    Args:
        cfg: of :mod:`ppocli.launching.target_config` with the request's overrides, paths absolute.
        objects: Python objects in place of reward, metric and prompts.
        stop: polled between tokens.
        say: told what was chosen, what a thing costs, where results are.

    Raises:
        CheckpointError: a name that is taken, or samples of other settings to go on with.
        StoppedError: names the command that goes on.
        PpocliError: models, prompts, rewards, disk; samples scored so far are kept.
    """
    import torch
    quiet_transformers()
    # below the run, or below the current folder for a bare model
    root = Path(request.output).expanduser().absolute() if request.output else (
        target.run_dir or Path.cwd()) / EVAL
    place = Place(root, target.label, request.name, request.overwrite, request.resume)
    place.refuse_taken()
    cfg = _without_own_reference(cfg, target, say)
    parts = _parts(request, target, cfg, say)
    try:
        with open_backend(cfg.hardware) as backend:
            session = _session(cfg, backend, objects, parts[0], None, say)
            swept = list(sampling_sweep(cfg.generation, session.eval_sampling))
            if swept:
                say(f"of the list in generation.eval the first value is taken: {swept[0]}")
            if target.run_dir is None:
                _say_declared(session, request, say)
            identity = identity_of(session, [part.target for part in parts], request.frontier,
                                   objects)
            folder = choose(place, identity, say)
            if folder.finished and request.resume:
                report = read_result(folder.path)
                if report is not None:
                    say(f"finished already: {folder.result}")
                    return Done(folder, report)
                say(f"{folder.result} is damaged: it is made again from the samples")
            work = _Work(request, session, parts, objects, stop, say, watch, folder, identity)
            del session  # else its model would stay in memory beside the next one
            with working_in(folder, place):
                return _evaluate(work)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"Out of memory: {first_line(error)}", where="ppo.chunk_size",
            fix="give a smaller ppo.chunk_size=N (samples of one generate call)") from error
    except StopRequested as stopped:  # before there was anything to go on with
        raise StoppedError(f"stopped by {stopped}; nothing was sampled yet",
                           signal_number=stopped.signal_number) from None


def _without_own_reference(cfg: TrainConfig, target: Target, say: Callable[[str], None]
                           ) -> TrainConfig:
    """A bare model has no base but itself, and the KL to itself says nothing."""
    if cfg.model.reference.kind == "none":
        say("the run has no reference, so there is no KL; to measure it: model.reference.kind=copy")
    elif target.run_dir is None and cfg.model.path == target.model:
        say("no KL: the base of this model is not known; to name it: model.path=FOLDER")
        none = replace(cfg.model.reference, kind="none")
        return replace(cfg, model=replace(cfg.model, reference=none))
    return cfg


def _say_declared(session: EvalSession, request: EvalRequest, say: Callable[[str], None]) -> None:
    """Models are compared under equal sampling, so what a bare one wants for itself is only said.
    """
    spec = session.eval_sampling
    wanted = own_sampling(session.loaded)
    words = [f"generation.{name}={str(value).lower()}" for name, value in wanted.items()
             if getattr(spec, name) != value]
    left = [word for word in words if not request.sets(word.partition("=")[0])]
    if left:
        say("the model's generation_config.json is not followed; to sample as it says: "
            + " ".join(left))


def _parts(request: EvalRequest, target: Target, cfg: TrainConfig, say: Callable[[str], None]
           ) -> list[Part]:
    each = cfg.prompts.eval.repeat
    parts = [Part("policy", target, each)]
    against = request.find_against(target, cfg, say)
    if against is not None:
        parts.append(Part("against", against, each))
    if request.frontier:
        if cfg.model.reference.kind == "none":
            raise ConfigError("A frontier needs the KL to the base, and there is no reference.",
                              where="--frontier", fix="model.reference.kind=copy, and for a model "
                              "without a run model.path=FOLDER, its base")
        parts.append(Part("base", base_target(target, cfg.model, "--frontier"), SAMPLES))
    return parts


def _session(cfg: TrainConfig, backend: Backend, objects: PythonObjects, part: Part,
             judges: EvalSession | None, say: Callable[[str], None]) -> EvalSession:
    """What judges one model; ``judges`` lends reward, metric and reference."""
    repeated = replace(cfg, prompts=replace(cfg.prompts, eval=replace(
        cfg.prompts.eval, repeat=part.repeat)))
    session = build_eval_session(repeated, backend, objects, policy=part.target.model,
                                 judges=judges)
    if part.role == "base":
        return replace(session, reference=None)  # its KL to itself would only cost time
    if (session.reference is not None and part.target.model != cfg.model.path
            and load_tokenizer(cfg.model).get_vocab() != session.tokenizer.get_vocab()):
        say(f"no KL of {part.target.name}: its tokenizer is not that of {cfg.model.path}")
        return replace(session, reference=None)
    return session


def _evaluate(work: _Work) -> Done:
    """All models in turn, then the files that sum up."""
    session = work.session
    count = len(session.eval_prompts)
    sizes = {part.role: count * part.repeat for part in work.parts}
    work.rows = take_up(work.folder, list(sizes.items()), session.chunk_size)
    total, each = sum(sizes.values()), work.parts[0].repeat
    if work.kept:
        work.say(f"going on with {work.folder.path}: {work.kept} of {total} samples are there")
    work.say(f"{counted(count, 'prompt')}, {counted(each, 'response')} each")
    for base in (part for part in work.parts if part.role == "base"):
        work.say(f"--frontier costs {sizes['base'] - len(work.rows['base'])} more responses "
                 f"({base.repeat} of {base.target.name} to each prompt) and as many rewards")
    del session
    old = (read_json(work.folder.settings) or {}) if work.kept else {}
    work.started = str(old.get("started") or datetime.now(UTC).isoformat(timespec="seconds"))
    _note_models(work, {**old.get("identity", {}).get("models", {}), **work.identity["models"]})
    texts = list(work.session.eval_prompts.texts)
    try:
        with JsonlWriter(work.folder.samples) as writer:
            for part in work.parts:
                if part.role != "policy":
                    _next_model(work, part, texts)
                _sample(work, part, total, writer)
    except StopRequested as stopped:
        if not work.kept:
            raise
        raise StoppedError(
            f"stopped by {stopped}; {work.kept} samples are kept in {work.folder.samples}",
            signal_number=stopped.signal_number, fix=f"go on with: {_command(work)}") from None
    except CheckpointError:
        raise
    except PpocliError:
        if work.kept:
            log.warning("%d samples are kept in %s; to go on: %s", work.kept,
                        work.folder.samples, _command(work))
        raise
    return _finish(work)


def _next_model(work: _Work, part: Part, texts: list[str]) -> None:
    """Let go of the model before, then load this one beside the same judges and reference."""
    stripped: Any = {"policy": None, "loaded": None}
    work.session = judges = replace(work.session, **stripped)
    work.session = _session(judges.cfg, judges.backend, work.objects, part, judges, work.say)
    _check_texts(texts, list(work.session.eval_prompts.texts), part)
    _note_models(work, {part.role: tensors_digest(work.session.policy.lm.state_dict())})


def _note_models(work: _Work, models: dict[str, str]) -> None:
    """Write what the samples are of, with the weights of models that are reached now; refuse
    others than before."""
    work.identity = {**work.identity, "models": {**work.identity["models"], **models}}
    check_same(work.folder, work.identity)
    write_json_atomic(work.folder.settings, {"schema": 1, "started": work.started,
                                             "identity": finite_or_null(work.identity)})


def _check_texts(policy: list[str], other: list[str], part: Part) -> None:
    """The same prompts, as far as another tokenizer can hold them.

    Raises:
        ConfigError: some of them are lost.
    """
    if len(policy) != len(other):
        raise ConfigError(f"The tokenizer of {part.target.name} makes {len(other)} prompts of what "
                          f"are {len(policy)} for the policy.", where="--against",
                          fix="leave out --against, or give prompts that both can hold")
    changed = sum(a != b for a, b in zip(policy, other, strict=True))
    if changed:
        log.warning("%d of %d prompts are not the same text for %s, whose tokenizer is another",
                    changed, len(policy), part.target.name)


def _sample(work: _Work, part: Part, in_all: int, writer: JsonlWriter) -> None:
    """Sample and score what is missing of one model, appending chunk by chunk."""
    session, rows = work.session, work.rows[part.role]
    total = evaluation_size(session)
    work.watch(part.role, work.kept, in_all)
    chunks = evaluate_chunks(session, work.stop, skip=len(rows))
    told = part.role != "policy" or "base" not in work.rows
    while len(rows) < total:
        # rewards that draw random numbers draw the same ones when a chunk is done again
        seed_generators((session.cfg.seed * 1_000_003 + len(rows)) % 2**63)
        begun = monotonic()
        new = _rows(part.role, next(chunks), len(session.eval_prompts))
        writer.append(new)
        rows += finite_or_null(new)
        if not told:
            each = (monotonic() - begun) / len(new)
            left = len(session.eval_prompts) * SAMPLES - len(work.rows["base"])
            work.say(f"--frontier will take about {each * left:.0f} s more (by the first chunk)")
            told = True
        work.watch(part.role, work.kept, in_all)


def _rows(role: str, chunk: EvalChunk, prompts: int) -> list[Row]:
    """A chunk as rows of samples.jsonl."""
    return [{"model": role, "number": number, "prompt_index": number % prompts,
             "sample": number // prompts, **sample,
             "rewards": {name: values[i] for name, values in chunk.parts.items()},
             "metrics": {name: values[i] for name, values in chunk.metrics.items()}}
            for i, sample in enumerate(chunk.samples) for number in [chunk.start + i]]


def _command(work: _Work) -> str:
    if work.objects != PythonObjects():  # no command line can name them
        return f"call ppocli.evaluate again, with name={work.folder.path.name!r}, resume=True"
    return work.request.command(work.parts[0].target, work.folder.path.name)


def _finish(work: _Work) -> Done:
    """eval.json, and the frontier's picture before it."""
    session, found = work.session, None
    if work.request.frontier:
        found = frontier_of(work.rows["base"], work.rows["policy"],
                            plain_sampling=session.eval_sampling.is_policy_distribution
                            and session.eval_sampling.temperature == 1.0)
    report = finite_or_null(report_of(
        work.identity, {part.role: part.target for part in work.parts}, work.rows, found,
        session=session, name=work.folder.path.name, started=work.started,
        seconds=monotonic() - work.clock))
    with work.stop.defer():
        if found is not None:
            write_atomic(work.folder.picture, frontier_svg(found))
        write_json_atomic(work.folder.result, report)
    return Done(work.folder, report)
