"""What is wrong with a run or a sweep, and what it would do: what ``ppocli validate`` finds without
loading a model."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ppocli.cli.output import reward_labels
from ppocli.config import compose, resolved, schema, sweep, tasks
from ppocli.config.keys import schema_keys
from ppocli.config.problems import DEFAULT_SOURCE, Problem
from ppocli.config.words import Words, read_words
from ppocli.data import render, sources
from ppocli.environments.resolve import resolve
from ppocli.errors import CheckpointError, ConfigError, DiskError, PpocliError
from ppocli.launching import inputs, opened_folder, target_config
from ppocli.models.loading.chat_template import decided
from ppocli.rewards.scoring import check_reward_config, with_styles
from ppocli.storage import model_files, run_folder
from ppocli.storage.checkpoints import find_latest, refuse_pruned
from ppocli.text import counted
from ppocli.tracking.trackers import check_trackers


@dataclass(frozen=True, slots=True)
class Plan:
    """What a valid run would do. ``prompts`` and ``examples`` are None for a Hub data set, which
    isn't read here; ``steps`` and ``samples`` where they depend on it."""

    model: str
    reward: list[str]
    prompts: int | None
    steps: int | None
    samples: int | None
    samples_per_step: int
    device: str
    precision: str
    folder: str
    job: int | None = None
    varied: list[str] = field(default_factory=list)
    """overrides in which this job of a sweep differs from others"""
    task: str = "ppo"
    examples: int | None = None
    """to train on; of a reward model: pairs"""

    def __str__(self) -> str:
        one, count = ("prompt", self.prompts) if self.task not in tasks.DATA_TASKS else (
            "pair" if self.task == "reward_model" else "example", self.examples)
        there = f"{one}s of the Hub" if count is None else counted(count, one)
        what = f"reward {' + '.join(self.reward)}" if one == "prompt" else self.task
        job = "" if self.job is None else f"job {self.job} ({' '.join(self.varied)}): "
        each = counted(self.samples_per_step, "sample" if one == "prompt" else one)
        steps = f"steps of {each}" if self.steps is None else (
            f"{counted(self.steps, 'step')} of {each} ({self.samples} in all)")
        return (f"{job}{self.model}, {what}, {there}, {steps}, device {self.device} "
                f"{self.precision}, into {self.folder}")


def plan_of(config: schema.TrainConfig, rows: int | None, folder: Path) -> Plan:
    """The plan of a run in ``folder`` that has so many prompts or examples to train on."""
    task = tasks.task_name(config)
    on_data = task in tasks.DATA_TASKS
    return Plan(config.model.path, [] if on_data else reward_labels(with_styles(config.reward)),
                None if on_data else rows, tasks.planned_steps(config, rows),
                tasks.planned_samples(config, rows), tasks.samples_per_step(config),
                config.hardware.device, config.hardware.precision, str(folder), task=task,
                examples=rows if on_data else None)


@dataclass(slots=True)
class Examined:
    """What was found. ``config`` is that of the run, or of a sweep's first job."""

    problems: list[PpocliError] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    config: schema.TrainConfig | None = None
    warnings: list[str] = field(default_factory=list)
    """what may be meant, and most often isn't"""
    notes: list[str] = field(default_factory=list)
    """how what was typed is read"""
    facts: list[str] = field(default_factory=list)
    """lines about the data set that a run, or a sweep's first job, trains on"""
    colour: bool = False
    """whether they may have colours"""
    not_looked_at: list[str] = field(default_factory=list)
    """what only loading everything would show"""

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Add the error that the block ends with, if it is one that a user can mend."""
        try:
            yield
        except PpocliError as error:
            self.add([error])

    def add(self, problems: Iterable[PpocliError]) -> None:
        """Add problems that are not among those found."""
        for error in problems:
            if str(error) not in map(str, self.problems):
                self.problems.append(error)


def examine(words: Sequence[str], *, colour: bool = False) -> Examined:
    """Everything that is wrong with the words of ``ppocli train``. Nothing is written.

    Args:
        colour: whether what is trained on is marked by its colour.
    """
    found = Examined(colour=colour)
    with found.taking():
        read = read_words(words)
        if read.only_prints:
            raise ConfigError("These options only print something; there is no run to check.",
                              where="command line", fix="leave out --cfg, --info, --hydra-help and "
                              "--shell-completion")
        if read.is_sweep:
            _examine_sweep(read, found)
        else:
            _examine_run(compose.compose(read), found)
    return found


def _examine_run(composed: compose.Composed, found: Examined) -> None:
    config, resume_from = composed.config, composed.resume_from
    found.notes += composed.notes
    count, wrong = _examine_config(composed, config, found)
    if wrong & {"output_dir", "run_name"}:
        return
    named = resume_from or (Path(config.output_dir) / config.run_name if config.run_name else None)
    if named is not None:
        _examine_folder(composed, named, found, settled=not wrong)
    found.add(_unwritable(named or Path(config.output_dir)))
    if not found.problems:
        place = named or Path(config.output_dir) / f"{composed.name}-DATE-TIME"
        found.plans.append(plan_of(config, count, place))


def _examine_sweep(words: Words, found: Examined) -> None:
    """Every job; what is wrong with several jobs alike is told once."""
    def refuse(key: str) -> NoReturn:
        raise ConfigError(f"{key} decides the jobs while they run, so they can't be listed.",
                          where="command line", fix="check one of them: leave out -m and give one "
                          "value for each key that is swept")

    for setting in words.settings:
        if setting.key == "hydra/sweeper" and setting.value != "basic":
            refuse(setting.key)
    given, name = sweep.sweep_dir(words), words.value("run_name") or "sweep-DATE-TIME"
    jobs: list[tuple[sweep.SweepJob, Examined]] = []

    def run_job(job: sweep.SweepJob) -> None:
        one = Examined(colour=found.colour)
        jobs.append((job, one))
        with one.taking():
            composed = job.composed
            found.notes += composed.notes
            config = replace(composed.config, run_name=None)
            count, _ = _examine_config(composed, config, one)
            if not one.problems:
                one.plans.append(replace(plan_of(config, count, job.folder), job=job.number,
                                         varied=list(job.varied)))

    with tempfile.TemporaryDirectory() as scratch:  # Hydra makes a folder for each job
        sweep.run_sweep_jobs(words, run_job, lambda shared, grid: Path(scratch, "sweep"),
                             search=lambda *_: refuse("sweep.search"))
    told: dict[str, tuple[PpocliError, list[int]]] = {}
    for job, one in jobs:
        found.config, found.facts = found.config or one.config, found.facts or one.facts
        found.not_looked_at = found.not_looked_at or one.not_looked_at
        place = Path(given or f"{one.config.output_dir if one.config else ''}/{name}")
        found.warnings += one.warnings
        found.plans += [replace(plan, folder=str(place / str(job.number))) for plan in one.plans]
        for problem in one.problems:
            told.setdefault(str(problem), (problem, []))[1].append(job.number)
    found.add([problem.reworded(what=f"job {', '.join(map(str, numbers))}: {problem.what}")
               for problem, numbers in told.values()])
    if found.config is not None:
        found.add(_unwritable(Path(given or found.config.output_dir)))


# Inputs -------------------------------------------------------------------------------------------

def _examine_config(composed: compose.Composed, config: schema.TrainConfig, found: Examined
                    ) -> tuple[int | None, frozenset[str]]:
    """Settings; then models, DeepSpeed's file, prompts and rewards, apart from keys that are wrong
    already. Returns how many prompts or examples to train on there are, and the wrong keys."""
    problems = composed.problems()
    found.config = config
    found.add([_config_error(problem, composed.hint) for problem in problems])
    wrong = frozenset(key for problem in problems for key in problem.key.split(", "))
    absent = inputs.missing_inputs(config)
    if not wrong & {"model.path", "model.tokenizer_path"}:
        found.add(absent)
    if not any(key.startswith("hardware") for key in wrong):
        with found.taking():
            opened_folder.check_deepspeed(config)
    count, columns = None, None
    on_data = tasks.task_name(config) in tasks.DATA_TASKS
    section = "data" if on_data else "ppo.ptx"
    if (on_data or config.ppo.ptx.data.path is not None) and not absent \
            and not any(key.startswith((section, "model")) for key in wrong):
        count = _examine_data(config, found)
    if not on_data and not any(key.startswith("prompts") for key in wrong):
        count, columns = _examine_prompts(config, found)
    try:
        target_config.allow_code(composed)
    except PpocliError as error:
        found.add([error])
        return count, wrong
    for part in () if on_data else _reward_parts(config.reward):
        keys = {"reward.fn", "reward.fns", "reward.kwargs",
                *(f"reward.fns.{name}" for name in part.fns)}
        if not wrong & keys:
            with found.taking():
                check_reward_config(part, columns)
    if config.env.fn is not None and not any(key.startswith("env") for key in wrong):
        with found.taking():
            resolve(config.env, columns)
    if not wrong & {"task.fn", "rollout.engine"} and any(
            wanted.key in ("task.fn", "rollout.engine") for wanted in inputs.named_code(config)):
        with found.taking():
            from ppocli.tasks import check_own_classes

            check_own_classes(config)
    if "tracking.trackers" not in wrong:
        with found.taking():
            check_trackers(config.tracking)
    found.not_looked_at = list(_not_looked_at(config))
    if not found.problems and tasks.task_name(config) in ("ppo", *tasks.DATA_TASKS):
        from ppocli.cli.examine_model import check_models  # loads torch

        model_files.quiet_transformers()
        with found.taking():
            check_models(config)
    return count, wrong


def _examine_prompts(config: schema.TrainConfig, found: Examined
                     ) -> tuple[int | None, list[str] | None]:
    """How many training prompts there are and the metadata columns that rewards will get, None
    where that isn't known without the Hub."""
    count: int | None = None
    columns: list[str] | None = None
    with found.taking():
        config = decided(config, config.model.path, config.model.revision)
    for spec_of in (sources.training_spec, sources.evaluation_spec):
        with found.taking():
            spec = spec_of(config.prompts, None)
            rows = _rows(spec, config.model, found)
            names = list(render.metadata(rows, spec)) if rows else []
            if spec_of is sources.training_spec and rows is not None:
                count = len(rows) if spec.has_source else 1  # the BOS token alone
                columns = names
    return count, columns


def _examine_data(config: schema.TrainConfig, found: Examined) -> int | None:
    """How many examples or pairs there are to train on, as the tokenizer makes them; None where
    that isn't known without the Hub, and of PPO, which mixes examples in."""
    held, on_data = tasks.val_source(config.data), tasks.task_name(config) in tasks.DATA_TASKS
    named = (config.data.path, held) if on_data else (config.ppo.ptx.data.path,)
    if any(path is not None and sources.names_hub_dataset(path) for path in named):
        return None
    from ppocli.data import encoding
    from ppocli.models.loading import model_config
    from ppocli.models.loading.tokenizer import load_tokenizer
    from ppocli.tasks import supervised

    with found.taking():
        tokenizer = load_tokenizer(config.model)
        unloaded = model_config.read_lm(config.model)
        if not on_data:
            mixed_in: Any = supervised.read_mixed_in(config, tokenizer, unloaded)
            found.facts = ["ppo.ptx.data:",
                           *encoding.facts(mixed_in, tokenizer, colour=found.colour)]
            return None
        train, val = supervised.read_rows(config, tokenizer, unloaded)
        found.facts = list(encoding.facts(train, tokenizer, colour=found.colour))
        if val is not None:
            *_, count = encoding.facts(val, tokenizer, colour=False)
            found.facts += [f"data.val: {line}" for line in (*val.notes, count)
                            if line == count or held is not None]
        return len(train)
    return None


def _rows(spec: sources.Source, model: schema.ModelConfig, found: Examined) -> list[Any] | None:
    """The rows of a source on this machine; None for a data set of the Hub."""
    if not spec.has_source:
        return []
    if spec.path is not None and sources.names_hub_dataset(spec.path):
        return None
    rows = render.take_rows(sources.open_rows(spec, []), spec, [],
                            most=spec.limit if spec.key == "prompts" else None)
    if not spec.chat:  # a chat template is the tokenizer's, which isn't loaded here
        texts = render.prompt_texts(render.prompt_cells(rows, spec), rows, spec, None)
        eos = model_files.eos_text(model.tokenizer_path or model.path,
                                   None if model.tokenizer_path else model.revision)
        ended = [row for row, text in zip(rows, texts, strict=True) if eos and text.endswith(eos)]
        if ended:
            found.warnings.append(f"{spec.key}: {render.ends_in_eos(ended, eos)}")
    return rows


def _reward_parts(reward: schema.RewardConfig) -> Iterator[schema.RewardConfig]:
    """The rewards and the metric one by one: the first that fails must not hide the next."""
    if reward.fns:
        for name, entry in reward.fns.items():
            yield replace(reward, fns={name: entry}, metric_fn=None)
    elif reward.fn is not None:
        yield replace(reward, metric_fn=None)
    if reward.metric_fn is not None:  # beside a reward that is right
        yield replace(reward, fn="length", fns={}, kwargs={"target": 1})


def _not_looked_at(config: schema.TrainConfig) -> Iterator[str]:
    """What a check without weights leaves open, in words."""
    ppo = tasks.task_name(config) not in tasks.DATA_TASKS
    yield "weights and memory"
    if ppo:
        yield "what the reward returns"
    read = (config.prompts.path, config.prompts.eval.path) if ppo else (
        config.data.path, tasks.val_source(config.data))
    if any(path is not None and sources.names_hub_dataset(path) for path in read):
        yield "data on the Hub"
    if config.rollout.engine == "vllm":
        yield "whether the servers answer"
    if config.hardware.device == "cuda" or config.model.quantization is not None:
        yield "whether there is a GPU"


# The folder ---------------------------------------------------------------------------------------

def _examine_folder(composed: compose.Composed, folder: Path, found: Examined, *, settled: bool
                    ) -> None:
    """Whether the run may have its folder: a new one, or one that it goes on with.

    Args:
        settled: the configuration has no problems, so that it can be compared with the run's own.
    """
    config, resume_from = composed.config, composed.resume_from
    goes_on = resume_from is not None or (
        config.resume == "auto" and opened_folder.goes_on_with(folder))
    with found.taking():
        if not goes_on:
            opened_folder.refuse_taken(folder, config)
        else:
            opened_folder.refuse_running(folder)
        if goes_on and settled:
            opened_folder.changes_on_resume(folder.absolute(), resolved.with_absolute_paths(config),
                                            accept_changes=composed.accept_changes)
    if not resume_from:
        return
    run = run_folder.RunFolder(folder)
    newest = find_latest(run.checkpoints, run_id=None, verify="size").checkpoint
    with found.taking():
        refuse_pruned(run, getattr(newest, "step", None))
        if newest is None:
            raise CheckpointError(f"{folder} has no valid checkpoint to go on from.",
                                  where=str(run.checkpoints),
                                  fix="start a new run, or give run_name and resume=auto")


def _unwritable(folder: Path) -> Iterator[PpocliError]:
    """Whether ``folder``, or the nearest folder above it that exists, takes a file."""
    place = next(part for part in (folder.absolute(), *folder.absolute().parents)
                 if os.path.lexists(part))
    try:
        run_folder.probe_writable(place)
    except DiskError as error:
        yield error.reworded(what=error.what.replace(str(place), str(folder), 1), where=str(folder))


# Telling ------------------------------------------------------------------------------------------

def _config_error(problem: Problem, fix: str | None) -> ConfigError:
    known = next((key for key in problem.key.split(", ") if key in schema_keys()), None)
    hint = f"ppocli schema {known} tells what it takes" if known else "ppocli schema lists all keys"
    problem, words = (problem, None) if fix else problem.parted()
    return ConfigError(f"{problem.key}: {problem.text}",
                       where=None if problem.source == DEFAULT_SOURCE else problem.source,
                       fix=fix or words or hint)
