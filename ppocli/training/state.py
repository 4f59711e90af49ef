"""Where a run's time goes, and its state between two steps.

Only the loop commits a state, and always as a whole. With it goes the state of the global random
generators, which belong to the user's reward function: ppocli's own randomness is counter-based and
needs none. It is taken whenever a training state is committed, so that work dropped by a stop can
be done again with the same numbers.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ppocli.config import schema, tasks
from ppocli.errors import CheckpointError

PHASES = ("startup", "rollout", "reward", "scoring", "optimize", "gather", "other", "eval",
          "between", "saving")
"""in the order in which they are shown; ``other`` is the rest of a step, ``between`` the time
between steps that is neither an evaluation nor a checkpoint"""
_AROUND = ("startup", "between", "saving")
"""phases that are neither a step nor an evaluation"""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time: ``perf_counter``, and the CPU seconds of all threads of this process."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> Moment:
        """This moment."""
        return Moment(time.perf_counter(), time.process_time())

    @staticmethod
    def of_process_start() -> Moment:
        """When this process was started; this moment where the system doesn't tell."""
        now = Moment.now()
        try:
            # field 22 of proc_pid_stat(5), in ticks since the machine started; the second field,
            # the program's name, may hold spaces
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        except (OSError, ValueError, IndexError, AttributeError):
            return now
        return Moment(now.wall - max(age, 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by phase."""

    seconds: dict[str, float]
    """on the wall"""
    cpu_seconds: dict[str, float]
    """of all threads of this process"""

    def figures(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """Wall time, CPU time and throughput of each phase of a step, and the sums of times. Tokens
        of phases that took no time here (responses that came from elsewhere) are left out."""
        figures: dict[str, float] = {}
        for kind, spent in (("time", self.seconds), ("cpu", self.cpu_seconds)):
            phases = {f"{kind}/{name}": seconds for name, seconds in spent.items()
                      if name not in _AROUND and name != "eval"}
            figures |= phases | {f"{kind}/step": sum(phases.values())}
        for name, count in tokens.items():
            if name in self.seconds:
                figures[f"tokens_per_second/{name}"] = count / max(self.seconds[name], 1e-9)
        return figures


@dataclass(slots=True)
class PhaseClock:
    """Adds up wall and CPU time by phase; on a GPU it waits for the device at each mark.

    Every moment since ``last`` was first set is booked to some phase.
    """

    device: torch.device
    last: Moment = field(default_factory=Moment.now)
    tell: Callable[[str], None] | None = None
    """hears of each mark"""
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Book the time since the last mark to ``name``."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        now = Moment(time.perf_counter(), time.process_time())
        self.seconds[name] = self.seconds.get(name, 0.0) + now.wall - self.last.wall
        self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + now.cpu - self.last.cpu
        self.last = now
        if self.tell is not None:
            self.tell(name)

    def take(self) -> Spent:
        """What was booked since it was last taken."""
        spent = Spent(self.seconds, self.cpu_seconds)
        self.seconds, self.cpu_seconds = {}, {}
        return spent


def of_training(seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of steps and evaluations, by phase."""
    return {name: value for name, value in seconds.items() if name not in _AROUND}


def profile(seconds: Mapping[str, float], cpu_seconds: Mapping[str, float],
            tokens: Mapping[str, int]) -> dict[str, Any]:
    """The totals, and of each phase its seconds, its share of all wall seconds, and its throughput
    where it has tokens; plain JSON types."""
    total, phases = sum(seconds.values()), {}
    for name in (name for name in dict.fromkeys((*PHASES, *seconds)) if name in seconds):
        count = tokens.get(name) or None
        phases[name] = {
            "seconds": seconds[name], "cpu_seconds": cpu_seconds.get(name, 0.0),
            "share": seconds[name] / total if total > 0 else 0.0, "tokens": count,
            "tokens_per_second": None if count is None else count / max(seconds[name], 1e-9)}
    return {"seconds": total, "cpu_seconds": sum(cpu_seconds.values()), "phases": phases}


def in_words(seconds: Mapping[str, float], cpu_seconds: Mapping[str, float]) -> str:
    """``41.0 s (optimize 45%, rollout 20%, ...), CPU 39.5 s``, the largest phases first."""
    total = sum(seconds.values())
    parts = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in parts
                       if value >= 0.005 * total)
    return f"{total:.1f} s ({shares}), CPU {sum(cpu_seconds.values()):.1f} s"


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of torch's, Python's and numpy's global generators."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """``torch`` and, on a GPU, ``cuda``: uint8"""
    numbers: dict[str, Any] = field(default_factory=dict)
    """``python`` and ``numpy``: JSON types"""

    @staticmethod
    def now(device: torch.device) -> Generators:
        """Their states at this moment."""
        tensors = {"torch": torch.get_rng_state()}
        if device.type != "cpu":
            tensors[device.type] = torch.get_device_module(device).get_rng_state(device)
        layout, numbers, gauss = random.getstate()
        kind, keys, *rest = np.random.get_state()
        return Generators(tensors, {"python": [layout, list(numbers), gauss],
                                    "numpy": [kind, np.asarray(keys).tolist(), *rest]})

    def restore(self, device: torch.device) -> None:
        """Put the states back."""
        torch.set_rng_state(self.tensors["torch"])
        if device.type in self.tensors:
            torch.get_device_module(device).set_rng_state(self.tensors[device.type], device)
        layout, numbers, gauss = self.numbers["python"]
        random.setstate((layout, tuple(numbers), gauss))
        kind, keys, position, has_gauss, cached = self.numbers["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))

    def write(self, folder: Path, rank: int = 0) -> None:
        """Save as safetensors and JSON, those of other ranks than 0 beside them."""
        tensors, numbers = _generator_files(folder, rank)
        save_file(self.tensors, tensors)
        numbers.write_text(json.dumps(self.numbers))

    @staticmethod
    def read(folder: Path, rank: int = 0) -> Generators | None:
        """What :meth:`write` saved; None where this rank saved none.

        Raises:
            CheckpointError: its JSON is damaged, no plain file, or too large.
        """
        tensors, numbers = _generator_files(folder, rank)
        if rank > 0 and not tensors.is_file():
            return None
        try:
            return Generators(load_file(tensors), json.loads(numbers.read_bytes()))
        except ValueError:
            raise CheckpointError(f"{numbers} is damaged.", where=str(folder),
                                  fix="remove this checkpoint: the one before is taken") from None


def _generator_files(folder: Path, rank: int) -> tuple[Path, Path]:
    stem = "rng" if rank == 0 else f"rng-rank-{rank:05d}"
    return folder / f"{stem}.safetensors", folder / f"{stem}.json"


def seed_generators(number: int) -> None:
    """Seed all global generators."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far, comparable only under the same ``judged_by``."""

    step: int
    metric: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The samples of a full step, and what was done when they became so many: another
    ``ppo.num_rollouts`` on resume counts from there on."""

    num_rollouts: int
    step: int = 0
    episodes: int = 0


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything between two steps beside weights and optimizer; saved in every checkpoint."""

    digests: dict[str, str]
    """digests of what must not change silently in a run, such as its data; different ones on resume
    mean a different run"""
    judged_by: str
    """digest of everything that evaluation figures depend on, except the trained weights"""
    step: int = 0
    episodes: int = 0
    """planned samples used; also the cursor into the data, unless the task draws more than it uses
    and counts them itself"""
    updates: int = 0
    """optimizer updates made; the learning-rate schedule runs over these"""
    best: Best | None = None
    eval_before: dict[str, float] | None = None
    eval_last: dict[str, float] | None = None
    eval_step: int | None = None
    """step of ``eval_last``"""
    pace: Pace | None = None
    """None in checkpoints of versions that kept none"""
    pending: dict[str, Any] | None = None
    """figures of the newest step while its evaluation and its metrics row are still to come"""
    nonfinite: int = 0
    """non-finite updates in a row"""
    seconds: dict[str, float] = field(default_factory=dict)
    """wall time by phase since the start of the run"""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """CPU time by phase of all threads of the process"""
    tokens: dict[str, int] = field(default_factory=dict)
    """tokens by phase since the start of the run"""
    task: dict[str, Any] = field(default_factory=dict)
    """the task's own numbers, as plain JSON"""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """the task's own tensors by name, on the CPU; never changed in place"""
    generators: Generators = field(default_factory=Generators)
    """those of this rank when the state was committed"""

    def counters(self) -> dict[str, Any]:
        """What a row of metrics.jsonl starts with."""
        return {"step": self.step, "episode": self.episodes, "updates": self.updates}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; without the tensors and generators."""
        numbers = asdict(replace(self, tensors={}, generators=Generators()))
        del numbers["tensors"], numbers["generators"]
        return numbers

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrainState:
        """The state that :meth:`to_json` wrote. Numbers of PPO that earlier versions kept among the
        loop's are read too."""
        names = {f.name for f in fields(TrainState)}
        values = {name: value for name, value in data.items() if name in names}
        values["task"] = {**{name: value for name, value in data.items() if name not in names},
                          **data.get("task", {})}
        for name in ("eval_before", "eval_last", "pending"):  # strict JSON has null for NaN
            if values.get(name) is not None:
                values[name] = {figure: math.nan if value is None else value
                                for figure, value in values[name].items()}
        values["best"] = None if data["best"] is None else Best(**data["best"])
        values["pace"] = None if data.get("pace") is None else Pace(**data["pace"])
        return TrainState(**values)

    def book(self, spent: Spent, tokens: Mapping[str, int] | None = None) -> TrainState:
        """The state with more time and tokens booked to phases."""
        sums: dict[str, Any] = {}
        for part, more in (("seconds", spent.seconds), ("cpu_seconds", spent.cpu_seconds),
                           ("tokens", tokens or {})):
            sums[part] = total = dict(getattr(self, part))
            for name, value in more.items():
                total[name] = total[name] + value if name in total else value
        return replace(self, **sums)


@dataclass(frozen=True, slots=True)
class RunLength:
    """How many samples and steps a run has, under its present configuration."""

    samples_per_step: int
    """samples of a full step"""
    total_samples: int
    total_steps: int
    """the last step may be smaller"""
    pace: Pace
    """since when steps are of this size"""
    passes: int
    """over the samples of a step, each in updates of ``mini_batch_size``"""
    mini_batch_size: int

    @staticmethod
    def of(cfg: schema.TrainConfig, examples: int | None = None, pace: Pace | None = None
           ) -> RunLength:
        """The length of a run.

        Args:
            examples: rows of the data set, or prompts, where the length depends on them.
            pace: of a run that is resumed.
        """
        size = tasks.samples_per_step(cfg)
        pace = pace or Pace(size)
        steps = tasks.steps_asked(cfg)
        samples = (tasks.planned_samples(cfg, examples) or 0 if steps is None else
                   pace.episodes + (max(steps, pace.step) - pace.step) * pace.num_rollouts)
        left = max(samples - pace.episodes, 0)
        updates = tasks.updates_of(cfg)
        passes = updates.ppo_epochs + (updates.critic_epochs or 0) \
            if isinstance(updates, schema.PPOConfig) else 1
        return RunLength(size, samples, pace.step + -(-left // size), pace, passes,
                         updates.mini_batch_size)

    def total_updates(self, state: TrainState) -> int:
        """Optimizer updates at the end of the run, if none of those to come is skipped."""
        full, rest = divmod(max(self.total_samples - state.episodes, 0), self.samples_per_step)
        batches = full * -(-self.samples_per_step // self.mini_batch_size)
        return state.updates + self.passes * (batches + -(-rest // self.mini_batch_size))


def torch_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("ppocli", "torch", "transformers", "accelerate", "safetensors", "hydra-core")
    versions = {name: version(name) for name in names}
    return {"python": platform.python_version(), **versions, "torch": torch.__version__}
