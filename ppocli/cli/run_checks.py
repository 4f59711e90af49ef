"""Checks of a run without weights: what is wrong with it, and what it would do."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ppocli.cli import output
from ppocli.config import compose, config_yaml, schema, tasks
from ppocli.config.command_words import read_words
from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.keys import schema_keys
from ppocli.config.problems import DEFAULT_SOURCE, Problem
from ppocli.config.text import clean, counted
from ppocli.data import chat_text, sources
from ppocli.environments.registry import resolve
from ppocli.errors import CheckpointError, ConfigError, DiskError, PpocliError
from ppocli.launch import input_checks, open_run_folder, target_config
from ppocli.models.loading.tokenizer import decided
from ppocli.publish.trackers import check_trackers
from ppocli.rewards.scoring import check_reward_config, with_styles
from ppocli.runs import run_folder
from ppocli.runs.checkpoints import find_latest

ORDER = (2, 3, 7, 6, 5)
"""exit codes, the one that decides first; others come last"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a valid run would do. ``rows`` is None for a Hub data set, which isn't read here;
    ``steps`` and ``samples`` if they depend on it."""

    task: str
    model: str
    reward: list[str]
    rows: int | None
    """prompts, examples, or of a reward model pairs to train on"""
    steps: int | None
    samples: int | None
    samples_per_step: int
    device: str
    precision: str
    folder: str

    def __str__(self) -> str:
        one = {"reward_model": "pair", "sft": "example"}.get(self.task, "prompt")
        rows = f"{one}s of the Hub" if self.rows is None else counted(self.rows, one)
        what = f"reward {' + '.join(self.reward)}" if one == "prompt" else self.task
        each = counted(self.samples_per_step, "sample" if one == "prompt" else one)
        steps = f"steps of {each}" if self.steps is None else (
            f"{counted(self.steps, 'step')} of {each} ({self.samples} in all)")
        return (f"{self.model}, {what}, {rows}, {steps}, device {self.device} "
                f"{self.precision}, into {self.folder}")


def plan_of(config: schema.TrainConfig, rows: int | None, folder: Path) -> Plan:
    """The plan of a run in ``folder`` that has so many prompts or examples to train on."""
    task = tasks.task_name(config)
    return Plan(task, config.model.path, [] if task in tasks.DATA_TASKS else _reward_labels(
                    with_styles(config.reward)), rows, tasks.planned_steps(config, rows),
                tasks.planned_samples(config, rows), tasks.samples_per_step(config),
                config.hardware.device, config.hardware.precision, str(folder))


def _reward_labels(reward: schema.RewardConfig) -> list[str]:
    """Names of the rewards, each with its model and the library whose style it follows, if any."""
    functions = [(entry["fn"], entry.get("kwargs") or {}, entry.get("style") or reward.style)
                 for entry in reward.fns.values()] or [
        (reward.fn or "env.fn", reward.kwargs, reward.style)]
    return [(f"{fn} {kwargs['model']}" if "model" in kwargs else str(fn))
            + ("" if style in ("auto", "ppocli") else f" (style {style})")
            for fn, kwargs, style in functions]


@dataclass(slots=True)
class Checked:
    """The results."""

    problems: list[PpocliError] = field(default_factory=list)
    plan: Plan | None = None
    """None with problems"""
    config: schema.TrainConfig | None = None
    notes: list[str] = field(default_factory=list)
    """on how the words were read"""
    facts: list[str] = field(default_factory=list)
    """lines about the data set that a run trains on"""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the :class:`PpocliError` that the block ends with to the problems."""
        try:
            yield
        except PpocliError as error:
            self.add(error)

    def add(self, *problems: PpocliError) -> None:
        """Add problems, each once."""
        for error in problems:
            if str(error) not in map(str, self.problems):
                self.problems.append(error)


# A run --------------------------------------------------------------------------------------------

def check_words(words: Sequence[str]) -> Checked:
    """Check the words of ``ppocli train``, and print notes; the first problem decides the exit
    code. Nothing is written."""
    checked = Checked()
    with checked.collecting():
        read = read_words(words)
        if read.is_sweep:
            raise ConfigError("One run is checked, and a sweep is several.", where="command line",
                              fix="leave out -m, and give one value for each key that is swept")
        _check_run(compose.compose(read), checked)
    for note in dict.fromkeys(checked.notes):
        output.say(clean(note))
    checked.problems.sort(key=lambda error: ORDER.index(error.exit_code)
                          if error.exit_code in ORDER else len(ORDER))
    return checked


def _check_run(composed: compose.Composed, checked: Checked) -> None:
    config, resume_from = composed.config, composed.resume_from
    checked.notes += composed.notes
    count, wrong = _check_config(composed, config, checked)
    if wrong & {"output_dir", "run_name"}:
        return
    named = resume_from or (Path(config.output_dir) / config.run_name if config.run_name else None)
    if named is not None:
        _check_folder(composed, named, checked, valid=not wrong)
    checked.add(*_unwritable(named or Path(config.output_dir)))
    if not checked.problems:
        folder = named or Path(config.output_dir) / f"{composed.name}-DATE-TIME"
        checked.plan = plan_of(config, count, folder)


# Inputs -------------------------------------------------------------------------------------------

def _check_config(composed: compose.Composed, config: schema.TrainConfig, checked: Checked
                  ) -> tuple[int | None, frozenset[str]]:
    """Check the settings; then models, DeepSpeed's file, prompts and rewards as far as their keys
    are right. Returns the number of prompts or examples to train on, and the wrong keys."""
    problems = composed.problems()
    checked.config = config
    checked.add(*(_config_error(problem, composed.hint) for problem in problems))
    wrong = frozenset(key for problem in problems for key in problem.key.split(", "))
    absent = input_checks.missing_inputs(config)
    if not wrong & {"model.path", "model.tokenizer_path"}:
        checked.add(*absent)
    if config.hardware.zero_stage > 0 and not any(key.startswith("hardware") for key in wrong):
        with checked.collecting():
            deepspeed_config(config)
    count, columns = None, None
    on_data = tasks.task_name(config) in tasks.DATA_TASKS
    section = "data" if on_data else "ppo.ptx"
    if (on_data or config.ppo.ptx.data.path is not None) and not absent \
            and not any(key.startswith((section, "model")) for key in wrong):
        count = _check_data(config, checked)
    if not on_data and not any(key.startswith("prompts") for key in wrong):
        count, columns = _check_prompts(config, checked)
    try:
        target_config.allow_code(composed)
    except PpocliError as error:
        checked.add(error)
        return count, wrong
    for part in () if on_data else _reward_parts(config.reward):
        keys = {"reward.fn", "reward.fns", "reward.kwargs",
                *(f"reward.fns.{name}" for name in part.fns)}
        if not wrong & keys:
            with checked.collecting():
                check_reward_config(part, columns)
    if config.env.fn is not None and not any(key.startswith("env") for key in wrong):
        with checked.collecting():
            resolve(config.env, columns)
    if not wrong & {"task.fn", "rollout.engine"} and any(
            code.key in ("task.fn", "rollout.engine") for code in input_checks.named_code(config)):
        with checked.collecting():
            from ppocli.training.task import check_own_classes

            check_own_classes(config)
    if "tracking.trackers" not in wrong:
        with checked.collecting():
            check_trackers(config.tracking)
    return count, wrong


def _check_prompts(config: schema.TrainConfig, checked: Checked
                   ) -> tuple[int | None, list[str] | None]:
    """The number of training prompts and the metadata columns that rewards will get; None for
    prompts on the Hub."""
    count: int | None = None
    columns: list[str] | None = None
    with checked.collecting():
        config = decided(config, config.model.path, config.model.revision)
    for specs_of in (sources.training_specs, sources.evaluation_specs):
        with checked.collecting():
            read = [(spec, _rows(spec)) for spec in specs_of(config.prompts, None)]
            names = dict.fromkeys(chain.from_iterable(
                [*chat_text.metadata(rows, spec), *[schema.SOURCE] * bool(spec.mix_name)]
                for spec, rows in read if rows))
            if specs_of is sources.training_specs and all(rows is not None for _, rows in read):
                # without a source, the BOS token alone
                count = sum(len(rows or ()) if spec.has_source else 1 for spec, rows in read)
                columns = list(names)
    return count, columns


def _check_data(config: schema.TrainConfig, checked: Checked) -> int | None:
    """The number of examples or pairs to train on, as the tokenizer makes them; None for data on
    the Hub, and for PPO, which mixes examples in."""
    val, on_data = tasks.val_source(config.data), tasks.task_name(config) in tasks.DATA_TASKS
    if _on_hub(config.data.path, val) if on_data else _on_hub(config.ppo.ptx.data.path):
        return None
    from ppocli.data import encoding
    from ppocli.models.loading import model_config
    from ppocli.models.loading.tokenizer import load_tokenizer
    from ppocli.supervised import supervised_task

    with checked.collecting():
        tokenizer, unloaded = load_tokenizer(config.model), model_config.read_lm(config.model)
        if not on_data:
            mixed_in: Any = supervised_task.read_mixed_in(config, tokenizer, unloaded)
            checked.facts = ["ppo.ptx.data:", *encoding.facts(mixed_in, tokenizer)]
            return None
        train, val_rows = supervised_task.read_rows(config, tokenizer, unloaded)
        checked.facts = list(encoding.facts(train, tokenizer))
        if val_rows is not None:
            *_, count = encoding.facts(val_rows, tokenizer)
            checked.facts.append(f"data.val: {count}")
        return len(train)
    return None


def _on_hub(*paths: str | None) -> bool:
    return any(path is not None and sources.names_hub_dataset(path) for path in paths)


def _rows(spec: sources.Source) -> list[Any] | None:
    """The rows of a source on this machine; None for a data set of the Hub."""
    if not spec.has_source:
        return []
    if _on_hub(spec.path):
        return None
    rows = chat_text.take_rows(sources.open_rows(spec, []), spec, [],
                               most=None if spec.key == "prompts.eval" else spec.limit)
    if not spec.chat:  # a chat template is the tokenizer's, which isn't loaded here
        chat_text.prompt_texts(chat_text.prompt_cells(rows, spec), rows, spec, None)
    return rows


def _reward_parts(reward: schema.RewardConfig) -> Iterator[schema.RewardConfig]:
    """The rewards and the metric one by one: the first that fails must not hide the next."""
    if reward.fns:
        for name, entry in reward.fns.items():
            yield replace(reward, fns={name: entry}, metric_fn=None)
    elif reward.fn is not None:
        yield replace(reward, metric_fn=None)
    if reward.metric_fn is not None:  # with a reward that is right
        yield replace(reward, fn="length", fns={}, kwargs={"target": 1})


# The folder ---------------------------------------------------------------------------------------

def _check_folder(composed: compose.Composed, folder: Path, checked: Checked, *, valid: bool
                  ) -> None:
    """Check the run's folder: a new one, or the one that it resumes.

    Args:
        valid: the configuration has no problems, so that it can be compared with the run's own.
    """
    config, resume_from = composed.config, composed.resume_from
    resumes = resume_from is not None or (
        config.resume == "auto" and open_run_folder.goes_on_with(folder))
    with checked.collecting():
        if not resumes:
            open_run_folder.refuse_taken(folder, config)
        else:
            open_run_folder.refuse_running(folder)
        if resumes and valid:
            open_run_folder.changes_on_resume(folder.absolute(),
                                              config_yaml.with_absolute_paths(config),
                                            accept_changes=composed.accept_changes)
    if not resume_from:
        return
    run = run_folder.RunFolder(folder)
    newest = find_latest(run.checkpoints, run_id=None, verify="size").checkpoint
    with checked.collecting():
        if newest is None:
            raise CheckpointError(f"{folder} has no valid checkpoint to go on from.",
                                  where=str(run.checkpoints),
                                  fix="start a new run, or give run_name and resume=auto")


def _unwritable(folder: Path) -> Iterator[PpocliError]:
    """The error of writing to ``folder``, or to the nearest folder above it that exists."""
    place = next(part for part in (folder.absolute(), *folder.absolute().parents)
                 if os.path.lexists(part))
    try:
        run_folder.probe_writable(place)
    except DiskError as error:
        yield error.reworded(what=error.what.replace(str(place), str(folder), 1), where=str(folder))


# Errors -------------------------------------------------------------------------------------------

def _config_error(problem: Problem, fix: str | None) -> ConfigError:
    valid_key = next((key for key in problem.key.split(", ") if key in schema_keys()), None)
    hint = (f"ppocli schema {valid_key} tells what it takes" if valid_key
            else "ppocli schema lists all keys")
    problem, words = (problem, None) if fix else problem.parted()
    return ConfigError(f"{problem.key}: {problem.text}",
                       where=None if problem.source == DEFAULT_SOURCE else problem.source,
                       fix=fix or words or hint, code=problem.code)
