"""The interface between the training loop and what is trained.

The loop is responsible for order, backward passes, clipping, divergence, commits, checkpoints and
stops. A task defines what a batch is, what the loss is, and what an evaluation measures. PPO
(:mod:`ppocli.ppo.ppo_task`) is one; ``task.fn=my_task.py:build`` names another: a function or
class that is called with a :class:`TaskSetup` and ``task.kwargs`` and returns a :class:`Task`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ppocli.config import schema, schema_training, tasks
from ppocli.config.user_code import CodeSetting, Kind, build, check_class
from ppocli.distributed.backend import Backend, PassRows
from ppocli.distributed.ranks import StopFlag
from ppocli.errors import ConfigError
from ppocli.runs.episode import Sample
from ppocli.training.state import PhaseClock, RunLength, TrainState

if TYPE_CHECKING:
    from ppocli.training.checkpoint_writing import SavedModel
    from ppocli.training.optimize import Trained

PASSES = {"rollout": "ppo.chunk_size", "evaluation": "ppo.chunk_size",
          "scoring": "ppo.micro_batch_size", "scoring of the evaluation": "ppo.micro_batch_size",
          "optimize": "ppo.micro_batch_size"}
"""phase -> the key that decides how many rows one of its passes has"""
TASK = Kind("function", ConfigError)
SAMPLER = Kind("class", ConfigError)
_OURS = {"ppo": "ppo.ppo_task", "sft": "supervised.sft_task",
         "reward_model": "supervised.reward_model_task"}
"""task -> its module, which has a function ``build_task``"""


@dataclass(frozen=True, slots=True)
class PythonObjects:
    """Python objects that ``ppocli.train()`` received in place of config keys."""

    reward_fn: Any = None
    """a callable, or a mapping name -> callable"""
    metric_fn: Callable[..., Any] | None = None
    prompts: list[Any] | None = None
    eval_prompts: list[Any] | None = None
    data: list[Any] | None = None
    val_data: list[Any] | None = None
    model: Any = None
    """a transformers model, which is trained in place"""
    ref_model: Any = None
    tokenizer: Any = None


@dataclass(frozen=True, slots=True)
class TaskSetup:
    """What a task is built from."""

    cfg: schema.TrainConfig
    backend: Backend
    objects: PythonObjects


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step or an evaluation needs of its caller."""

    stop: StopFlag
    """polled between tokens, passes and phases"""
    clock: PhaseClock
    """books the time of each phase"""
    progress: tuple[int, int, float] = (0, 0, 0.0)
    """steps done, steps of the whole run, and passes over the prompts, as rewards see them"""

    @property
    def step(self) -> int:
        """Steps done before this one."""
        return self.progress[0]


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """The atoms (samples, pairs) of one optimizer update, A of them. Made by :meth:`Task.plan`,
    read by :mod:`ppocli.training.optimize`."""

    rows: torch.Tensor
    """[A] int64 indices into the batch"""
    tokens: torch.Tensor
    """[A] int64 tokens that a pass over each atom reads"""
    counts: torch.Tensor
    """[A] int64 terms that each atom adds to the sums of the loss, such as its trained tokens"""
    weights: torch.Tensor
    """[A] fp32 weight of each of these terms, normalised over the whole update"""
    epoch: int = 0
    """number of the pass over the batch, from 0"""
    part: str = "all"
    """which part of the model trains; the names are the task's own"""
    kinds: torch.Tensor | None = None
    """[A] int64 kind of each atom: a pass reads atoms of one kind, the lowest first, and all ranks
    make as many of each; None: all are alike"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one optimize phase does with a batch."""

    atoms: Any
    """the batch as :meth:`Task.loss` wants it, made once for all updates"""
    groups: Sequence[UpdateGroup]
    rate_factors: Mapping[str, float] = field(default_factory=dict)
    """by role of the optimizer's groups, a factor on the scheduled learning rate (default: 1)"""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of one micro-batch: its part of the sums of the whole update."""

    total: torch.Tensor
    """scalar; the value to differentiate"""
    terms: torch.Tensor
    """[len(Task.terms)] detached"""
    tokens: int
    """tokens that were computed, padding included"""


class Verdict(StrEnum):
    """What happens to an update once its loss terms are known."""

    STEP = "step"
    SKIP = "skip"
    """weights and optimizer state stay as they are"""
    NONFINITE = "nonfinite"
    """likewise, and several in a row end the run"""
    STOP = "stop"
    """likewise, and the phase ends"""


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """What an optimize phase did."""

    updates: int
    skipped: int
    nonfinite: int
    """non-finite updates in a row at the end"""
    early_stopped: bool
    lr: float
    terms: dict[str, float]
    """means over the updates of :attr:`Task.terms` and of ``grad_norm``; of maxima the largest"""
    tokens: int
    """tokens that went through forward and backward, on all ranks"""
    first: dict[str, dict[str, float]] = field(default_factory=dict)
    """by :attr:`UpdateGroup.part` the terms of its first update that were finite"""
    made: Mapping[str, Sequence[dict[str, float]]] = field(default_factory=dict)
    """by :attr:`UpdateGroup.part` the terms of its updates in order, without skipped ones"""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a task reports and remembers of a finished step."""

    row: dict[str, float]
    """figures for ``metrics.jsonl``"""
    state: dict[str, Any] = field(default_factory=dict)
    """:attr:`TrainState.task` from here on"""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """:attr:`TrainState.tensors` from here on"""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """tokens by the phase of the clock that processed them"""
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of one evaluation and its samples."""

    figures: dict[str, float]
    """``checkpoint.metric`` names one of them"""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """rows for samples.jsonl"""
    tokens: int = 0
    """tokens generated"""


class Resume:
    """What a task compares and changes when its run is resumed. This one has nothing to compare."""

    def digests(self) -> dict[str, str]:
        """Digests of data that must not change between start and resume, by name."""
        return {}

    def eval_fingerprint(self) -> str:
        """Digest of everything that evaluations depend on, except the trained weights. All ranks
        call it in step."""
        return ""

    def adopt(self, saved: TrainState, fresh: TrainState) -> TrainState:
        """The state of a checkpoint, adapted to the present configuration, which may have
        changed."""
        return saved

    def kept_step(self, state: TrainState) -> int | None:
        """The step after which a checkpoint is written that pruning never removes; None: no such
        step so far."""
        return None


class Task(ABC):
    """A training. Subclasses set the attributes and implement the abstract methods; the defaults of
    the others suit a task without samples to show or state of its own.

    On several ranks every method is called on all of them in step.
    """

    terms: tuple[str, ...] = ("total",)
    """names of :attr:`LossTerms.terms`"""
    maxima: frozenset[str] = frozenset()
    """those that are merged by their maximum instead of their sum"""
    lower_is_better: frozenset[str] = frozenset()
    """figures of evaluations of which the lowest is the best"""
    remedy: str = ""
    """what to try when losses or weights become non-finite; empty: a lower learning rate"""

    cfg: schema.TrainConfig
    backend: Backend
    trained: "Trained"
    """the module whose parameters train, its optimizer, and how gradients become steps"""
    saved: "SavedModel"
    """how what is trained becomes a Hugging Face folder; its ``lm`` is ``trained.module.lm``"""
    passes: PassRows
    """how many rows passes have had to be cut down to"""
    resume: Resume = Resume()
    judging: Sequence[Any] = ()
    """tokenizers of reward models, in addition to that of ``saved``"""
    examples: int | None = None
    """rows of the data set, or prompts, where the run's length depends on how many there are"""
    samples_per_pass: int = 0
    """samples of one pass over the prompts; 0 where passes are not counted"""
    chunk_size: int = 0
    """samples that are collected at a time, for the display; 0: a whole batch"""

    @cached_property
    def length(self) -> RunLength:
        """Samples and steps of the run; resuming replaces it."""
        return RunLength.of(self.cfg, self.examples)

    @cached_property
    def update_settings(self) -> tasks.Updates:
        """The section of the configuration that says how updates are made."""
        return tasks.updates_of(self.cfg)

    @cached_property
    def rows_per_pass(self) -> int:
        """Maximum number of samples in a forward and backward pass."""
        return tasks.rows_per_pass(self.update_settings)

    @abstractmethod
    def collect(self, state: TrainState, context: StepContext) -> Any:
        """The next batch, anything with a length: the number of planned samples it uses. Changes no
        state: an interrupted step is collected again and must give the same batch."""

    @abstractmethod
    def plan(self, state: TrainState, batch: Any) -> Plan:
        """The updates to make from the batch, in order."""

    @abstractmethod
    def loss(self, atoms: Any, rows: torch.Tensor, weights: torch.Tensor, group: UpdateGroup
             ) -> LossTerms:
        """A micro-batch's part of an update's loss, through ``self.trained.engine``. May be called
        again, with smaller parts, after memory has run out.

        Args:
            atoms: of :class:`Plan`.
            rows: [a] places of its atoms.
            weights: [a] fp32 weight of each of their terms; all zero for an atom that only keeps
                this rank in step with the others.
            group: the whole update.
        """

    @abstractmethod
    def evaluate(self, context: StepContext) -> Evaluation:
        """Evaluate the current weights; trains nothing."""

    def judge(self, terms: dict[str, float]) -> Verdict:
        """Decide whether an update with these terms is made, before it changes anything; log why
        one is skipped."""
        finite = all(map(math.isfinite, terms.values()))
        return Verdict.STEP if finite else Verdict.NONFINITE

    def finish(self, state: TrainState, batch: Any, plan: Plan, result: OptimizeResult) -> Finished:
        """The figures of the step, and the task's own state after it.

        Args:
            state: before the step.
        """
        return Finished({f"loss/{name}": value for name, value in result.terms.items()},
                        state.task, state.tensors)

    def on_step_end(self, state: TrainState) -> None:  # noqa: B027 - may be left
        """Change what the next step starts from, once a step is over, its evaluation and its row
        included, and before a checkpoint is made of it; nothing by default."""

    def initial(self) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
        """The task's own numbers and tensors before the first step."""
        return {}, {}

    def modules(self) -> dict[str, torch.nn.Module]:
        """Modules that change in addition to ``saved.lm``, by their attribute name in
        ``trained.module``; of a name that isn't one of it, whole on every rank."""
        return {}

    def schedule(self, role: str) -> schema_training.SchedulerConfig:
        """The learning-rate schedule of the optimizer's groups with this role."""
        return self.update_settings.scheduler

    def preview(self, batch: Any) -> list[Sample]:
        """(prompt, text, score) of a few samples, to be shown."""
        return []

    def sample_rows(self, batch: Any, step: int) -> list[dict[str, Any]]:
        """The batch as rows of samples.jsonl (``tracking.log_rollouts``, and what a run leaves when
        it diverges)."""
        return []

    def summary(self, state: TrainState) -> dict[str, Any]:
        """Entries of summary.json about the task's own state."""
        return {}

    def closing(self) -> dict[str, Any]:
        """Measurements on the model of a finished run before it is written, for its summary."""
        return {}

    def close(self) -> None:  # noqa: B027 - may be left
        """Release what the task has built in addition to ``trained``."""


def check_own_classes(cfg: schema.TrainConfig) -> None:
    """Import a task and a sampler of the user's own, before anything else is loaded.

    Raises:
        ConfigError: an import path leads nowhere, or a class lacks methods or has them otherwise
            than they are called.
    """
    if tasks.task_name(cfg) not in _OURS:
        check_class(CodeSetting(str(cfg.task.fn), "task.fn", TASK), Task)
    if cfg.rollout.engine not in tasks.OUR_ENGINES:
        from ppocli.sampling.sampler import Sampler

        check_class(CodeSetting(cfg.rollout.engine, "rollout.engine", SAMPLER), Sampler)


def build_task(setup: TaskSetup) -> Task:
    """The task: one of ours, or the result of calling ``task.fn`` with the setup and
    ``task.kwargs``.

    Raises:
        ConfigError: the import path doesn't exist, or what it names doesn't return a task.
        PpocliError: the task's own inputs are unusable.
    """
    if (ours := _OURS.get(tasks.task_name(setup.cfg))) is not None:
        return import_module(f"ppocli.{ours}").build_task(setup)
    return build(CodeSetting(str(setup.cfg.task.fn), "task.fn", TASK), Task, setup,
                 key="task.kwargs", kwargs=setup.cfg.task.kwargs)
