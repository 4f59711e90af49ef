"""What lies beside a run's own files: evaluations, checkpoints, the machine it ran on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.config.secrets import looks_secret
from ppocli.errors import PpocliError
from ppocli.evaluation.folder import read_result
from ppocli.storage.atomic import read_json
from ppocli.storage.environment import ENV_FILE
from ppocli.storage.manifest import Invalid, check_folder
from ppocli.storage.retention import list_steps
from ppocli.storage.run_folder import RunFolder
from ppocli.text import first_line

_MOST_FACTS = 80


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One evaluation below ``RUN/eval``; what its file doesn't tell is None."""

    name: str
    of: str
    samples: int | None
    reward_mean: float | None
    reward_stderr: float | None
    kl_mean: float | None
    against: str
    win_rate: float | None
    win_stderr: float | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A step folder; ``problem`` says why it can't be used, if so. Contents aren't hashed."""

    step: int
    bytes: int
    best: bool
    latest: bool
    problem: str


def evaluations_of(run_dir: Path) -> list[EvaluationRow]:
    """Finished evaluations, the newest last; a file that can't be read is left out."""
    found = []
    for path in sorted(run_dir.glob("eval/*/eval.json")):
        if (told := read_result(path.parent)) is not None:
            found.append((told["time"]["finished"], _evaluation(path.parent.name, told)))
    return [row for _, row in sorted(found, key=lambda entry: (entry[0], entry[1].name))]


def _evaluation(name: str, told: dict[str, Any]) -> EvaluationRow:
    figures, wins = told["figures"], told["win_rate"] or {}
    return EvaluationRow(
        name, told["model"]["name"], told["samples"], figures.get("reward_mean"),
        told["stderr"].get("reward_mean"), figures.get("kl_mean"),
        told["against"]["model"]["name"] if told["against"] else "",
        wins.get("win_rate"), wins.get("stderr"))


def checkpoints_of(run: RunFolder, best_step: int | None) -> list[Checkpoint]:
    """The step folders of a run, oldest first, by names and sizes alone."""
    found = []
    for step, folder in list_steps(run.checkpoints):
        try:
            size, problem = check_folder(folder, step=step, verify="size").total_bytes, ""
        except (Invalid, PpocliError) as error:
            size, problem = 0, first_line(error)
        except OSError as error:  # it was being deleted
            size, problem = 0, error.strerror or str(error)
        found.append((step, size, problem))
    newest = max((step for step, _, problem in found if not problem), default=None)
    return [Checkpoint(step, size, step == best_step, step == newest, problem)
            for step, size, problem in found]


def environment_of(run_dir: Path, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what the run ran on: ``env.json``, and the versions of the summary."""
    found = dict(_facts("", read_json(run_dir / ENV_FILE) or {}))
    for name, version in (summary.get("versions") or {}).items():
        if not {name, f"packages {name}"} & found.keys():
            found[name] = str(version)
    return list(found.items())[:_MOST_FACTS]


def _facts(prefix: str, value: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        name = f"{prefix} {key}".strip()
        if looks_secret(str(key)) or item is None or item in ({}, []):
            continue
        if isinstance(item, dict):
            yield from _facts(name, item)
        elif isinstance(item, list) and all(isinstance(part, dict) for part in item):
            for number, part in enumerate(item):
                yield from _facts(f"{name} {number}", part)
        else:
            yield name, ", ".join(map(str, item)) if isinstance(item, list) else str(item)
