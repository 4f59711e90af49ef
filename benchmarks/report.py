"""What was measured, as JSON files, and the section of RESULTS.md that is made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare import Outcome, Spread, fastest_peer, of_rounds, ratio, shown
from systems import SYSTEMS, Process
from tables import table
from workloads import WORKLOADS, Workload


@dataclass(frozen=True, slots=True)
class Comparison:
    """All systems on one workload."""

    workload: str
    threads: int
    made: str
    """when, on what, beside what other work"""
    command: str
    versions: dict[str, str]
    outcomes: dict[str, Outcome]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    @staticmethod
    def from_json(told: dict[str, Any]) -> Comparison:
        """What :meth:`to_json` told."""
        outcomes = {name: Outcome([Process(**one) for one in outcome["rounds"]], outcome["failed"])
                    for name, outcome in told["outcomes"].items()}
        return Comparison(**{**told, "outcomes": outcomes})


@dataclass(frozen=True, slots=True)
class Section:
    """A measurement of ours alone, ready to be shown."""

    title: str
    made: str
    command: str
    text: str


def keep(folder: Path, name: str, found: Comparison | Section) -> None:
    """Write a measurement in place of an older one of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    told = found.to_json() if isinstance(found, Comparison) else asdict(found)
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1), encoding="utf-8")


def comparison(found: Comparison) -> str:
    """The table of one workload, and the ratios to the fastest peer."""
    work = WORKLOADS[found.workload]
    cuda = work.device == "cuda"
    measure = "wall" if cuda or found.threads > 1 else "processor"
    names = [*work.systems, *(name for name in found.outcomes if name not in work.systems)]
    rows = [_row(name, found, cuda) for name in names]
    if (log := work.published) is not None:
        rows.append([f"{log.label} ({log.note.partition(':')[0]})", "-", shown(log.step_seconds),
                     "-", "-", shown(log.batch / log.step_seconds), "-",
                     f"{log.response_tokens:.1f}", "-"])
    memory = "peak GPU MiB" if cuda else "peak MiB"
    text = table(["system", "processor s an iteration", "wall s", "against ours, processor",
                  "wall", "samples/s", memory, "tokens a response", "whole process s"], rows)
    best = fastest_peer(found.outcomes, measure)
    ours = found.outcomes.get("ours")
    if best and ours and ours.rounds:
        text += (f"\n\nThe fastest peer by {measure} time is {SYSTEMS[best].label}: "
                 f"{ratio(found.outcomes[best], ours, measure)} times as long as ours.")
    if log is not None:
        text += (f"\n\n{log.label}: {log.tokens_per_second:.0f} tokens/s of prompts "
                 f"and responses; {log.note}.")
    failures = [f"\n\n{SYSTEMS[name].label} failed: `{_last_line(outcome.failed)}`"
                for name, outcome in found.outcomes.items() if outcome.failed]
    return text + "".join(failures)


def _row(name: str, found: Comparison, cuda: bool) -> list[str]:
    outcome = found.outcomes.get(name)
    label = SYSTEMS[name].label
    if outcome is None or not outcome.rounds:
        return [label, "not run" if outcome is None else "failed", *["-"] * 7]
    ours = found.outcomes.get("ours")
    against = ["-", "-"] if name == "ours" or ours is None or not ours.rounds else \
        [str(ratio(outcome, ours, measure)) for measure in ("processor", "wall")]
    wall = Spread.of(of_rounds(outcome, "wall"))
    peaks = [one.gpu_mib if cuda else one.peak_mib for one in outcome.rounds]
    return [label, str(Spread.of(of_rounds(outcome, "processor"))), str(wall), *against,
            shown(WORKLOADS[found.workload].batch / wall.median),
            f"{statistics.median(peak or 0.0 for peak in peaks):.0f}",
            f"{statistics.mean(one.tokens for one in outcome.rounds):.1f}",
            f"{statistics.median(one.seconds for one in outcome.rounds):.1f}"]


def _last_line(message: str) -> str:
    return message.strip().splitlines()[-1].replace("`", "'")[:200]


def describe(work: Workload, threads: int) -> str:
    """A workload in a line."""
    length = (f"{work.new_tokens}" if work.min_new_tokens is None
              else f"{work.min_new_tokens} to {work.new_tokens}")
    low, high = work.prompt_tokens
    return (f"Batch {work.batch}, minibatch {work.mini_batch}, prompts of {low} to {high} tokens, "
            f"{length} new ones, {work.epochs} epochs, {work.precision}, {threads} thread(s).")


def section(folder: Path) -> str:
    """Everything that was measured, in the order of the workloads, then ours alone.

    Raises:
        SystemExit: nothing was measured yet.
    """
    told = {path.stem: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob("*.json"))}
    if not told:
        raise SystemExit(f"there is no measurement in {folder} yet")
    found = [Comparison.from_json(one) for one in told.values() if "outcomes" in one]
    found.sort(key=lambda one: (list(WORKLOADS).index(one.workload), one.threads))
    alone = [Section(**one) for one in told.values() if "outcomes" not in one]
    parts = [overview(found)] if found else []
    for one in found:
        work = WORKLOADS[one.workload]
        versions = "; ".join(f"{SYSTEMS[name].label}: {text}"
                             for name, text in one.versions.items())
        parts += [f"### {work.title}, {one.threads} thread(s)", describe(work, one.threads),
                  comparison(one), f"`{one.command}`", f"{one.made} {versions}."]
    for other in alone:
        parts += [f"### {other.title}", other.text, f"`{other.command}`", other.made]
    return "\n\n".join(parts)


def overview(found: Sequence[Comparison]) -> str:
    """How many times as long as ours the fastest peer takes, a line a workload."""
    rows = []
    for one in found:
        ours = one.outcomes.get("ours")
        cells = []
        for measure in ("processor", "wall"):
            best = fastest_peer(one.outcomes, measure)
            cells.append(f"{ratio(one.outcomes[best], ours, measure)}, {SYSTEMS[best].label}"
                         if best and ours and ours.rounds else "-")
        rows.append([WORKLOADS[one.workload].title, str(one.threads), *cells])
    return table(["workload", "threads", "fastest peer's processor time over ours",
                  "fastest peer's wall time over ours"], rows)
