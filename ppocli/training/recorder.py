"""Figures and samples of a run on their way to metrics.jsonl, samples.jsonl and the trackers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from ppocli.config.schema import TrackingConfig
from ppocli.storage.run_folder import RunFolder
from ppocli.storage.run_logs import JsonlWriter
from ppocli.tracking.trackers import Tracker, open_trackers
from ppocli.training.clock import Spent
from ppocli.training.state import TrainState

EVAL_ROW, SWEEP_ROW = "eval", "eval_sweep"
"""``kind`` of rows of samples.jsonl that an evaluation writes"""


def speed_figures(spent: Spent, tokens: dict[str, int], memory_mib: float) -> dict[str, float]:
    """Wall time, CPU time and throughput of each phase of one step, and their sums."""
    figures: dict[str, float] = {}
    for kind, seconds in (("time", spent.seconds), ("cpu", spent.cpu_seconds)):
        figures |= {f"{kind}/{name}": value for name, value in seconds.items()}
        figures[f"{kind}/step"] = sum(seconds.values())
    for name, count in tokens.items():
        if name not in spent.seconds:  # responses that came from elsewhere took no time here
            continue
        figures[f"tokens_per_second/{name}"] = count / max(spent.seconds[name], 1e-9)
    figures["memory/peak_mib"] = memory_mib
    return figures


@dataclass(frozen=True, slots=True)
class Recorder:
    """Open metrics.jsonl and samples.jsonl of a run, and its trackers."""

    metrics: JsonlWriter
    samples: JsonlWriter
    trackers: Sequence[Tracker]

    def row(self, row: dict[str, Any]) -> None:
        """Append one step's figures to metrics.jsonl and hand them to the trackers."""
        self.metrics.append([row])
        for tracker in self.trackers:
            tracker.row(row)

    def evaluated(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append an evaluation's samples to samples.jsonl and hand them to the trackers."""
        self.samples.append([{"step": step, "kind": EVAL_ROW, **sample} for sample in samples])
        for tracker in self.trackers:
            tracker.samples(step, samples)

    def swept(self, step: int, samples: dict[str, list[dict[str, Any]]]) -> None:
        """Append samples of the further values of a list in ``generation.eval``."""
        self.samples.append([{"step": step, "kind": SWEEP_ROW, "sampling": name, **sample}
                             for name, rows in samples.items() for sample in rows])


@contextmanager
def open_recorder(folder: RunFolder, tracking: TrackingConfig) -> Iterator[Recorder]:
    """The recorder of a run; closes its files."""
    with JsonlWriter(folder.metrics) as metrics, JsonlWriter(folder.samples) as samples, \
            open_trackers(tracking, folder) as trackers:
        yield Recorder(metrics, samples, trackers)


class _Nowhere:
    """Takes what a file would and drops it."""

    def append(self, rows: Any) -> None:
        """Drop rows."""


@contextmanager
def silent_recorder() -> Iterator[Recorder]:
    """The recorder of ranks other than 0, which write nothing."""
    yield Recorder(cast(JsonlWriter, _Nowhere()), cast(JsonlWriter, _Nowhere()), ())


def state_figures(state: TrainState) -> dict[str, Any]:
    """The counters a row starts with."""
    return {"step": state.step, "episode": state.episodes, "updates": state.updates}


def torch_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import platform
    from importlib.metadata import version

    import torch

    names = ("ppocli", "torch", "transformers", "accelerate", "safetensors", "hydra-core")
    found = {name: version(name) for name in names}
    found["torch"] = torch.__version__
    return {"python": platform.python_version(), **found}
