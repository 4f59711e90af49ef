"""``ppocli sweep show``: the results of a sweep."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppocli.cli import output
from ppocli.cli.options import AsJson, Command, group, option
from ppocli.config.text import pasted
from ppocli.distributed.standard_output import put

if TYPE_CHECKING:
    from ppocli.runs.sweeps import JobRecord, SweepRecord

sweep_app = group("Show the results of a sweep (ppocli train -m), or continue one.")


@sweep_app.command("show", cls=Command)
def show_sweep(name: Annotated[str | None, typer.Argument(
                   metavar="[SWEEP]",
                   help="A sweep's folder or name (default: the newest below runs/).")] = None,
               sort: Literal["best", "job"] = option(
                   "ORDER", "best (by checkpoint.metric) or job.", default="best"),
               as_json: AsJson = False) -> None:
    """Print the jobs of a sweep: status, reward and KL of the newest evaluation, and the swept
    values. Trainings on a data set show their loss, perplexity or accuracy instead.

    \b
    Examples:
      ppocli sweep show
      ppocli sweep show runs/sweep-20260131-120000 --sort job
      ppocli sweep show --json
    """
    from ppocli.runs import search
    from ppocli.runs.sweeps import find_sweep, jobs_now, read_sweep

    folder = find_sweep(name)
    if name is None:
        output.say(f"using {folder} (the newest sweep)")
    sweep = read_sweep(folder)
    jobs = jobs_now(sweep)
    results = search.findings(sweep) if sweep.search else {}
    if results:
        results["command"] = _command(sweep, results["best"][0]["job"]) if results["best"] else None
    if sort == "best":
        jobs.sort(key=lambda job: math.inf if job.rank is None else job.rank)
    if as_json:
        output.print_json({"sweep": str(sweep.folder), "words": list(sweep.words),
                           "jobs": list(map(_facts, jobs)), **results})
        return
    print_jobs(jobs)
    if results:
        _print_findings(results)
    unfinished = [job.status for job in jobs if job.status != "finished"]
    if unfinished and "running" not in unfinished:
        output.say(f"{len(unfinished)} of {len(jobs)} jobs are not finished; go on with: "
                   f"ppocli sweep resume {pasted(folder)}")


def _seconds(job: JobRecord) -> float | None:
    summary = None if job.run is None else job.run.summary
    return sum(summary["seconds"].values()) if summary and summary.get("seconds") else None


def _facts(job: JobRecord) -> dict[str, Any]:
    run = job.run
    return {"job": job.number, "status": job.status, "varied": job.varied, "figures": job.figures,
            "step": None if run is None else run.step,
            "total_steps": None if run is None else run.total_steps,
            "seconds": _seconds(job), "folder": str(job.folder),
            "error": None if run is None else (run.summary or {}).get("error")}


def _command(sweep: SweepRecord, number: int) -> str:
    """The command of a single run that does what a job does."""
    from ppocli.config.command_words import read_words
    from ppocli.runs.sweeps import varied_values

    words = read_words(sweep.words)
    over = [each.key for each in words.settings if each.key == "run_name" or each.key.startswith(
        ("sweep.", "hydra.", "hydra/"))]
    words = words.without("--multirun", *over, *varied_values(sweep.jobs[number]))
    return shlex.join(["ppocli", "train", *words.adding(*sweep.jobs[number]).argv()])


def print_jobs(jobs: Sequence[JobRecord]) -> None:
    """Print a table of jobs on standard output."""
    from ppocli.runs.sweeps import labels_of

    labels = labels_of(jobs)
    keys = list(dict.fromkeys(key for job in jobs for key in job.varied))
    rows = [("job", "status", "step", *labels, "seconds", *keys)]
    rows += [(str(job.number), job.status,
              "-" if job.run is None else f"{job.run.step}/{job.run.total_steps}",
              *(output.shown_figure(job.figures.get(label)) for label in labels),
              "-" if (seconds := _seconds(job)) is None else f"{seconds:.0f}",
              *(job.varied.get(key, "-") for key in keys)) for job in jobs]
    output.print_table(rows, right=frozenset(range(3, 4 + len(labels))))


def _print_findings(results: Mapping[str, Any]) -> None:
    """The results of a search as tables, and a command to paste."""
    if len(results["best"]) > 1:
        put()
        output.print_table([("not outdone", *results["best"][0]["metrics"], "values"), *(
            (f"job {each['job']}", *map(output.shown_figure, each["metrics"].values()),
             " ".join(each["varied"])) for each in results["best"])])
    if results["command"]:
        put()
        output.show_text(results["command"])
