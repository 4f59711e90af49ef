"""``ppocli train -m``: the jobs of a sweep one after another, each in a clean process."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ppocli.cli.output import say
from ppocli.config.compose import SweepJob, compose_sweep
from ppocli.engine.atomic import write_json_atomic
from ppocli.engine.run_folder import finite_or_null
from ppocli.errors import PpocliError, StoppedError, SweepError
from ppocli.launch import launch


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What came of one job. ``varied`` are the overrides that differ between jobs; the figures are
    of the evaluation after training."""

    number: int
    overrides: tuple[str, ...]
    varied: tuple[str, ...]
    status: str  # "finished", "failed" or "stopped"
    exit_code: int
    reward_mean: float | None
    kl_mean: float | None
    seconds: float
    folder: str
    error: str | None


class _SweepStopped(BaseException):
    """Ends Hydra's sweeper, which goes on after an ``Exception`` of a job."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def run_sweep(words: Sequence[str]) -> None:
    """Run every job, say what came of each, and print a table at the end.

    Raises:
        SweepError: every job ran, but some failed.
        StoppedError: a signal ended the sweep.
        ConfigError: something is wrong with all jobs alike; none was started.
    """
    records: list[JobRecord] = []

    def run_job(job: SweepJob) -> float | None:
        say(f"job {job.number}{'' if job.total is None else f' of {job.total}'}: "
            f"{' '.join(job.varied or job.words)}")
        record, stopped_by = _run_job(job)
        records.append(record)
        _write(job.folder, words, records)
        say(f"job {job.number}: {_result(record)}")
        if stopped_by is not None:
            raise _SweepStopped(stopped_by)
        return record.reward_mean

    try:
        folder = compose_sweep(words, run_job)
    except (_SweepStopped, KeyboardInterrupt) as stop:
        number = stop.signal_number if isinstance(stop, _SweepStopped) else signal.SIGINT
        _print_table(records)
        raise StoppedError(
            f"the sweep was stopped by {signal.Signals(number).name} after {len(records)} jobs; "
            "those that follow were not started", signal_number=number,
            fix=None if not records else "go on with the same words, resume=auto and "
            f"hydra.sweep.dir={Path(records[-1].folder).parent}") from None
    _print_table(records)
    failed = [record for record in records if record.status != "finished"]
    if failed:
        raise SweepError(f"{len(failed)} of {len(records)} jobs failed",
                         where=str(folder / "sweep.json"),
                         fix="correct what they say; the same words with resume=auto and "
                             f"hydra.sweep.dir={folder} keep the finished jobs")


def _run_job(job: SweepJob) -> tuple[JobRecord, int | None]:
    started = time.monotonic()
    error: str | None = None
    code, summary, stopped_by = 0, None, None
    try:
        config = replace(job.compose().config, output_dir=str(job.folder.parent),
                         run_name=job.folder.name)
        outcome = launch(config, fresh_process=True, say=say)
        code, summary, stopped_by = outcome.exit_code, outcome.summary, outcome.stopped_by
    except PpocliError as problem:
        code, error = problem.exit_code, str(problem)
        say(f"Error: {error}")
        with suppress(OSError):
            job.folder.rmdir()  # Hydra made it; nothing came into it
    after = (summary or {}).get("eval_after") or {}
    error = error or (summary or {}).get("error")
    status = "finished" if code == 0 else "stopped" if stopped_by is not None else "failed"
    record = JobRecord(
        job.number, job.words, job.varied, status, code, _number(after.get("reward_mean")),
        _number(after.get("kl_mean")), round(time.monotonic() - started, 1), str(job.folder), error)
    return record, stopped_by


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _result(record: JobRecord) -> str:
    if record.status != "finished":
        return f"{record.status} with exit code {record.exit_code}"
    figures = [f"{name} {value:.4g}" for name, value in
               (("reward", record.reward_mean), ("KL", record.kl_mean)) if value is not None]
    return ", ".join([f"finished in {record.seconds:.0f} s", *figures])


def _write(job_folder: Path, words: Sequence[str], records: list[JobRecord]) -> None:
    jobs = [asdict(record) for record in records]
    write_json_atomic(job_folder.parent / "sweep.json",
                      finite_or_null({"words": list(words), "jobs": jobs}))


def _print_table(records: list[JobRecord]) -> None:
    if not records:
        return
    rows = [("job", "status", "exit", "reward", "KL", "folder", "overrides")]
    rows += [(str(r.number), r.status, str(r.exit_code), _shown(r.reward_mean), _shown(r.kl_mean),
              _short(r.folder), " ".join(r.varied)) for r in records]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]), flush=True)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(folder: str) -> str:
    path = Path(folder)
    if not path.exists():
        return "-"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else folder
