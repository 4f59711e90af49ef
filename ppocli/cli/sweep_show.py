"""``ppocli sweep``: show the results of a sweep, and resume it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppocli.cli import options as opt
from ppocli.cli import output
from ppocli.cli.options import WORDS, AsJson, Command, Overrides, group, option
from ppocli.config.text import pasted
from ppocli.distributed.standard_output import put

if TYPE_CHECKING:
    from ppocli.runs import record, sweeps

sweep_app = group("Show the results of a sweep (ppocli train -m), or continue one.")


@sweep_app.command("show", cls=Command)
def show_sweep(name: Annotated[str | None, typer.Argument(
                   metavar="[SWEEP]",
                   help="A sweep's folder or name (default: the newest below runs/).")] = None,
               sort: Literal["best", "reward", "kl", "job"] = option(
                   "ORDER", "best (by checkpoint.metric), reward (highest first), kl (lowest "
                   "first) or job.", default="best"),
               as_json: AsJson = False) -> None:
    """Print the jobs of a sweep: status, reward and KL after training, and the swept values.
    Trainings on a data set show their loss, perplexity or accuracy instead.

    For sweeps over several keys, a second table shows the mean figures of every value.

    \b
    Examples:
      ppocli sweep show
      ppocli sweep show runs/sweep-20260131-120000 --sort kl
      ppocli sweep show --json
    """
    from ppocli.runs import search
    from ppocli.runs.sweeps import find_sweep, jobs_now, labels_of, read_sweep

    folder = find_sweep(name)
    if name is None:
        output.say(f"using {folder} (the newest sweep)")
    sweep = read_sweep(folder)
    now = jobs_now(sweep)
    labels = labels_of(job for job, _ in now)
    jobs = [_facts(job, run) for job, run in sorted(now, key=lambda each: _rank(each[0], sort))]
    means, results = marginal_means(jobs), search.findings(sweep) if sweep.is_search else {}
    if as_json:
        output.print_json({"sweep": str(sweep.folder), "words": list(sweep.words),
                           "grid": sweep.grid, "jobs": jobs, "marginal_means": means, **results})
        return
    _print_jobs(jobs, labels, sweep.folder)
    if means:
        put()
        output.print_table([("value", "jobs", *labels), *(
            (f"{row['key']}={row['value']}", str(row["jobs"]),
             *(output.shown_figure(row["figures"].get(label)) for label in labels))
            for row in means)], right=frozenset(range(1, 2 + len(labels))))
    if results:
        _print_findings(results)
    statuses = [job["status"] for job in jobs]
    over = {"finished", "running"} | ({"failed", "gone"} if sweep.is_search else set())
    unfinished = [status for status in statuses if status not in over]
    if unfinished and sweep.goes_on and "running" not in statuses:
        output.say(f"{len(unfinished)} of {len(jobs)} jobs are not finished; go on with: "
                   f"ppocli sweep resume {pasted(folder)}")


@sweep_app.command("resume", cls=Command, context_settings=WORDS)
def resume_sweep(sweep: Annotated[str, typer.Argument(
                     metavar="SWEEP", help="The sweep's folder or name.")],
                 overrides: Overrides = None, trust: opt.Trust = False) -> None:
    """Run the unfinished jobs of a sweep in the same folders.

    A job continues from its newest checkpoint, or starts if it has none. Finished jobs are kept.
    Settings such as reward.timeout=60 apply to the jobs that run. A search (sweep.search) chooses
    its further jobs as it would have. Other sweepers can't be continued.

    \b
    Examples:
      ppocli sweep resume runs/sweep-20260131-120000
      ppocli sweep resume runs/sweep-20260131-120000 ppo.micro_batch_size=4
    """
    from ppocli.cli.sweep import go_on

    go_on(sweep, overrides or [], trust)


def _rank(job: sweeps.JobRecord, sort: str) -> tuple[float, int]:
    figure = {"best": job.rank, "reward": None if job.reward_mean is None else -job.reward_mean,
              "kl": job.kl_mean, "job": 0.0}[sort]
    return (math.inf if figure is None else figure, job.number)


def _facts(job: sweeps.JobRecord, run: record.RunRecord | None) -> dict[str, Any]:
    from ppocli.runs.sweeps import changed_on_resume, varied_values

    return {"job": job.number, "status": job.status, "varied": varied_values(job.varied),
            "changed": changed_on_resume(job), "overrides": list(job.overrides),
            "exit_code": job.exit_code,
            "reward_mean": job.reward_mean, "kl_mean": job.kl_mean, "figures": job.shown,
            "step": None if run is None else run.step,
            "total_steps": None if run is None else run.total_steps,
            "seconds": job.seconds, "folder": job.folder or None, "error": job.error}


def marginal_means(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean figures of the finished jobs that share one value of one swept key.

    Nothing for a sweep over a single key, where every job is its own value.

    Returns:
        ``{"key", "value", "jobs", "reward_mean", "kl_mean", "figures"}`` for each value, in order
        of the jobs.
    """
    in_order = sorted(jobs, key=lambda job: job["job"])
    keys = list(dict.fromkeys(key for job in in_order for key in job["varied"]))
    if len(jobs) > 1:  # values of a search may never come twice
        keys = [key for key in keys if len({job["varied"].get(key) for job in jobs}) < len(jobs)]
    rows = []
    for key, value in dict.fromkeys((key, job["varied"][key]) for key in keys for job in in_order
                                    if key in job["varied"]):
        finished = [job for job in jobs if job["status"] == "finished"
                 and job["varied"].get(key) == value and key not in job.get("changed", ())]
        rows.append({"key": key, "value": value, "jobs": len(finished), **{
            name: _mean([job[name] for job in finished]) for name in ("reward_mean", "kl_mean")},
                     "figures": {label: _mean([job["figures"].get(label) for job in finished])
                                 for label in dict.fromkeys(label for job in finished
                                                            for label in job["figures"])}})
    return rows if len(keys) > 1 else []


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _print_jobs(jobs: Sequence[dict[str, Any]], labels: Sequence[str], sweep: Path) -> None:
    from ppocli.runs.sweeps import format_changes

    values = [job["varied"] | {key: format_changes(changes)
                               for key, changes in job["changed"].items()} for job in jobs]
    keys = list(dict.fromkeys(key for each in values for key in each))
    rows = [("job", "status", "step", *labels, "seconds", *keys, "folder")]
    rows += [(str(job["job"]), job["status"],
              "-" if job["step"] is None else f"{job['step']}/{job['total_steps']}",
              *(output.shown_figure(job["figures"].get(label)) for label in labels),
              f"{job['seconds']:.0f}" if job["seconds"] else "-",
              *(each.get(key, "-") for key in keys), _place(job["folder"], sweep))
             for job, each in zip(jobs, values, strict=True)]
    output.print_table(rows, right=frozenset(range(3, 4 + len(labels))))


def _print_findings(results: Mapping[str, Any]) -> None:
    """The results of a search as tables, and a command to paste."""
    if metrics := list(results["importance"]):
        put()
        output.print_table([("share of", *metrics), *(
            (key, *(f"{results['importance'][name].get(key, 0):.0%}" for name in metrics))
            for key in results["importance"][metrics[0]])],
            right=frozenset(range(1, 1 + len(metrics))))
    if len(results["best"]) > 1:
        put()
        output.print_table([("not outdone", *results["best"][0]["metrics"], "values"), *(
            (f"job {each['job']}", *map(output.shown_figure, each["metrics"].values()),
             " ".join(each["varied"])) for each in results["best"])])
    if results["command"]:
        put()
        output.show_text(results["command"])


def _place(folder: str | None, sweep: Path) -> str:
    path = Path(folder or "")
    if folder is None or not path.exists():
        return "-"
    return str(path.relative_to(sweep)) if path.is_relative_to(sweep) else folder
