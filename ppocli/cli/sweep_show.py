"""``ppocli sweep``: a table of a sweep's jobs, what each swept value was worth, and going on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli.options import WORDS, AsJson, Command, Overrides
from ppocli.cli.output import ignore_broken_pipes, print_json, print_table, say, shown_figure
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.runs.record import RunRecord
    from ppocli.runs.sweeps import JobRecord

sweep_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                        help="Show the results of a sweep (ppocli train -m), or continue one.")


@sweep_app.command("show", cls=Command)
def show_sweep(given: Annotated[str | None, typer.Argument(
                   metavar="[SWEEP]", show_default=False,
                   help="A sweep's folder or name (default: the newest below runs/).")] = None,
               sort: Annotated[str, typer.Option(
                   metavar="ORDER", help="reward (best first), kl (lowest first) or job.")
                   ] = "reward",
               as_json: AsJson = False) -> None:
    """Print the jobs of a sweep: status, reward and KL after training, and the swept values.

    For sweeps over several keys, a second table shows the mean figures of every value.

    \b
    Examples:
      ppocli sweep show
      ppocli sweep show runs/sweep-20260131-120000 --sort kl
      ppocli sweep show --json
    """
    from ppocli.runs.sweeps import find_sweep, jobs_now, read_sweep

    if sort not in ("reward", "kl", "job"):
        raise ConfigError(f"--sort {sort}: must be one of reward, kl, job", where="command line")
    folder = find_sweep(given)
    if given is None:
        say(f"using {folder} (the newest sweep)")
    sweep = read_sweep(folder)
    jobs = [_facts(job, run) for job, run in sorted(jobs_now(sweep),
                                                    key=lambda now: _rank(now[0], sort))]
    means = marginal_means(jobs)
    if as_json:
        print_json({"sweep": str(sweep.folder), "words": list(sweep.words), "grid": sweep.grid,
                    "jobs": jobs, "marginal_means": means})
        return
    _print_jobs(jobs, sweep.folder)
    if means:
        print()
        print_table([("value", "jobs", "reward", "KL"), *(
            (f"{row['key']}={row['value']}", str(row["jobs"]), shown_figure(row["reward_mean"]),
             shown_figure(row["kl_mean"])) for row in means)], right=frozenset({1, 2, 3}))
    statuses = [job["status"] for job in jobs]
    unfinished = [status for status in statuses if status not in ("finished", "running")]
    if unfinished and sweep.grid and "running" not in statuses:
        say(f"{len(unfinished)} of {len(jobs)} jobs are not finished; go on with: "
            f"ppocli sweep resume {folder}")


@sweep_app.command("resume", cls=Command, context_settings=WORDS)
def resume(sweep: Annotated[str, typer.Argument(
               metavar="SWEEP", help="The sweep's folder or name.")],
           overrides: Overrides = None) -> None:
    """Run the unfinished jobs of a sweep in the same folders.

    A job continues from its newest checkpoint, or starts if it has none. Finished jobs are kept.
    Settings such as reward.timeout=60 apply to the jobs that run. Only grids can be continued:
    other sweepers choose their jobs as they go.

    \b
    Examples:
      ppocli sweep resume runs/sweep-20260131-120000
      ppocli sweep resume runs/sweep-20260131-120000 ppo.micro_batch_size=4
    """
    from ppocli.cli.sweep import resume_sweep

    ignore_broken_pipes()
    resume_sweep(sweep, overrides or [])


def _rank(job: JobRecord, sort: str) -> tuple[float, int]:
    figure = {"reward": None if job.reward_mean is None else -job.reward_mean,
              "kl": job.kl_mean, "job": 0.0}[sort]
    return (math.inf if figure is None else figure, job.number)


def _facts(job: JobRecord, run: RunRecord | None) -> dict[str, Any]:
    from ppocli.runs.sweeps import varied_values

    return {"job": job.number, "status": job.status, "varied": varied_values(job),
            "overrides": list(job.overrides), "exit_code": job.exit_code,
            "reward_mean": job.reward_mean, "kl_mean": job.kl_mean,
            "step": None if run is None else run.step,
            "total_steps": None if run is None else run.total_steps,
            "seconds": job.seconds, "folder": job.folder or None, "error": job.error}


def marginal_means(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean figures of the finished jobs that share one value of one swept key.

    Nothing for a sweep over a single key, where every job is its own value.

    Returns:
        ``{"key", "value", "jobs", "reward_mean", "kl_mean"}`` for each value, in order of the jobs.
    """
    in_order = sorted(jobs, key=lambda job: job["job"])
    keys = _swept_keys(in_order)
    if len(keys) < 2:
        return []
    rows = []
    for key in keys:
        for value in dict.fromkeys(job["varied"][key] for job in in_order if key in job["varied"]):
            there = [job for job in jobs if job["status"] == "finished"
                     and job["varied"].get(key) == value]
            rows.append({"key": key, "value": value, "jobs": len(there),
                         **{name: _mean([job[name] for job in there])
                            for name in ("reward_mean", "kl_mean")}})
    return rows


def _swept_keys(jobs: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for job in jobs for key in job["varied"]))


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _print_jobs(jobs: Sequence[dict[str, Any]], sweep: Path) -> None:
    keys = _swept_keys(jobs)
    rows = [("job", "status", "step", "reward", "KL", "seconds", *keys, "folder")]
    rows += [(str(job["job"]), job["status"],
              "-" if job["step"] is None else f"{job['step']}/{job['total_steps']}",
              shown_figure(job["reward_mean"]), shown_figure(job["kl_mean"]),
              f"{job['seconds']:.0f}" if job["seconds"] else "-",
              *(job["varied"].get(key, "-") for key in keys), _place(job["folder"], sweep))
             for job in jobs]
    print_table(rows, right=frozenset({3, 4, 5}))


def _place(folder: str | None, sweep: Path) -> str:
    path = Path(folder or "")
    if folder is None or not path.exists():
        return "-"
    return str(path.relative_to(sweep)) if path.is_relative_to(sweep) else folder
