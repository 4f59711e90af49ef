"""What lies beside a run's own files: evaluations, checkpoints, the machine it ran on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.config.secrets import looks_secret
from ppocli.errors import PpocliError
from ppocli.storage.atomic import read_json
from ppocli.storage.environment import ENV_FILE
from ppocli.storage.manifest import Invalid, check_folder
from ppocli.storage.retention import list_steps
from ppocli.storage.run_folder import RunFolder
from ppocli.text import finite_number, first_line

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
        value = read_json(path)
        if value is not None:
            found.append((str(_inside(value, "time", "finished") or ""), path.parent.name, value))
    return [_evaluation(name, value) for _, name, value in sorted(found, key=lambda e: e[:2])]


def _evaluation(name: str, value: dict[str, Any]) -> EvaluationRow:
    samples = _number(value, "samples")
    return EvaluationRow(
        name, str(_inside(value, "model", "name") or ""), None if samples is None else int(samples),
        _number(value, "figures", "reward_mean"), _number(value, "stderr", "reward_mean"),
        _number(value, "figures", "kl_mean"), str(_inside(value, "against", "model", "name") or ""),
        _number(value, "win_rate", "win_rate"), _number(value, "win_rate", "stderr"))


def _inside(value: Any, *names: str) -> Any:
    """What lies under ``names``, one below the other; None where the way ends."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _number(value: dict[str, Any], *names: str) -> float | None:
    found = _inside(value, *names)
    return None if isinstance(found, bool) else finite_number(found)


def checkpoints_of(run: RunFolder, best_step: int | None) -> list[Checkpoint]:
    """The step folders of a run, oldest first, by names and sizes alone."""
    found = []
    folders = list_steps(run.checkpoints)
    usable = []
    for step, folder in folders:
        try:
            size, problem = check_folder(folder, step=step, verify="size").total_bytes, ""
            usable.append(step)
        except (Invalid, PpocliError) as error:
            size, problem = 0, first_line(error)
        except OSError as error:  # it was being deleted
            size, problem = 0, error.strerror or str(error)
        found.append((step, size, problem))
    return [Checkpoint(step, size, step == best_step, step == max(usable, default=-1), problem)
            for step, size, problem in found]


def environment_of(run_dir: Path, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what the run ran on: ``env.json``, and the versions of the summary."""
    found = dict(_facts("", read_json(run_dir / ENV_FILE) or {}))
    versions = summary.get("versions")
    for name, version in (versions.items() if isinstance(versions, dict) else ()):
        known = {name, f"packages {name}"} & set(found)
        if not known:
            found[str(name)] = str(version)
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
