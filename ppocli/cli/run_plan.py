"""What a valid run would do, as ``ppocli validate`` tells it."""

from dataclasses import dataclass, field
from pathlib import Path

from ppocli.cli.output import reward_labels
from ppocli.config import schema, tasks
from ppocli.rewards.scoring import with_styles
from ppocli.text import counted


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
