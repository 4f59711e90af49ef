"""What a model card can tell: gathered from the run's folder, masked on the way out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppocli.config.schema import TrainConfig
from ppocli.export.base_model import BaseModel, describe_base
from ppocli.export.own_evaluation import own_evaluation, without_folders
from ppocli.runs.record import RunRecord, read_run
from ppocli.runs.target import Target

_NUM_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class SamplePair:
    """A response to the same prompt before training and after."""

    prompt: str
    before: str
    after: str
    score_before: float | None
    score_after: float | None


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an export told that is now exported once more, from its folder alone."""

    record: dict[str, Any]
    """its export.json"""
    card: str
    files: tuple[Path, ...]
    """those beside model, tokenizer and card: they come along as they are"""


@dataclass(frozen=True)
class Facts:
    """All that is known of what is exported. ``run`` is None for a model that came from elsewhere:
    then the rest is empty, but for what an earlier export tells."""

    name: str
    step: int | None = None
    run: RunRecord | None = None
    base: BaseModel | None = None
    before: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation before training"""
    after: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation of exactly the exported weights"""
    evaluation: dict[str, Any] | None = None
    """the newest eval.json of these weights under the run's own settings"""
    samples: list[SamplePair] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    """a command line that trains it again"""
    earlier: Earlier | None = None
    """of the export that is exported once more"""

    @property
    def config(self) -> TrainConfig | None:
        """How the policy was trained."""
        return None if self.run is None else self.run.config


def gather(target: Target, *, network: bool, command: Callable[[TrainConfig], str]) -> Facts:
    """Read what is known of a target.

    Args:
        network: whether the Hub may be asked for the base model's license.
        command: makes the command line that trains with a configuration.
    """
    if target.run_dir is None:
        return Facts(target.label)
    run = read_run(target.run_dir)
    step = target.step or 0
    model = run.config.model
    evaluation = own_evaluation(target, run.config)
    return Facts(
        name=run.name, step=target.step, run=run,
        base=describe_base(model.path, model.revision, network=network),
        before=_figures(run, 0), after=_figures(run, step),
        evaluation=None if evaluation is None else without_folders(evaluation),
        samples=_samples(run, step),
        versions=_versions(run, target), command=command(run.config))


def _figures(run: RunRecord, step: int) -> dict[str, float]:
    """The evaluation's figures in the row of a step, under the names that summary.json has."""
    row: dict[str, Any] = next((row for row in run.rows if row["step"] == step), {})
    return {name.removeprefix("eval/"): float(value) for name, value in row.items()
            if name.startswith("eval/") and isinstance(value, (int, float))
            and math.isfinite(value)}


def _samples(run: RunRecord, step: int) -> list[SamplePair]:
    """The first responses to different prompts, of step 0 and of ``step``."""
    if step == 0:
        return []
    old: dict[str, dict[str, Any]] = {}
    new: dict[str, dict[str, Any]] = {}
    for rows, number in ((old, 0), (new, step)):
        for row in run.eval_samples(number):
            rows.setdefault(str(row.get("prompt")), row)
    both = [prompt for prompt in old if prompt in new][:_NUM_SAMPLES]
    return [SamplePair(prompt, str(old[prompt].get("response")), str(new[prompt].get("response")),
                       old[prompt].get("score"), new[prompt].get("score")) for prompt in both]


def _versions(run: RunRecord, target: Target) -> dict[str, str]:
    """Of the packages that trained it: the summary's, else the checkpoint's."""
    versions = (run.summary or {}).get("versions")
    if not versions and target.checkpoint is not None:
        try:
            manifest = json.loads((target.checkpoint / "MANIFEST.json").read_text())
        except (OSError, ValueError):
            manifest = {}
        versions = manifest.get("versions")
    return dict(versions) if isinstance(versions, dict) else {}


def settings(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain data, in the order of the schema."""
    return dataclasses.asdict(config)
