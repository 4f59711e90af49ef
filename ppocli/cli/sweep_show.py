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
    from ppocli.runs.sweeps import JobState, SweepRecord

sweep_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                        help="Look at a sweep (ppocli train -m), and go on with one.")


@sweep_app.command("show", cls=Command)
def show_sweep(given: Annotated[str | None, typer.Argument(
                   metavar="[SWEEP]", show_default=False,
                   help="A sweep's folder or name (default: the newest below runs/).")] = None,
               sort: Annotated[str, typer.Option(
                   metavar="ORDER", help="reward (best first), kl (lowest first) or job.")
                   ] = "reward",
               as_json: AsJson = False) -> None:
    """Print the jobs of a sweep: status, reward and KL after training, and what was swept.

    For sweeps over several keys, the mean figures of every value follow.

    \b
    Examples:
      ppocli sweep show
      ppocli sweep show runs/sweep-20260131-120000 --sort kl
      ppocli sweep show --json
    """
    from ppocli.runs.sweeps import find_sweep, job_states, read_sweep

    if sort not in ("reward", "kl", "job"):
        raise ConfigError(f"--sort {sort}: must be one of reward, kl, job", where="command line")
    folder = find_sweep(given)
    if given is None:
        say(f"using {folder} (the newest sweep)")
    sweep = read_sweep(folder)
    states = sorted(job_states(sweep), key=lambda state: _rank(state, sort))
    means = marginal_means(states)
    if as_json:
        print_json({
            "sweep": str(sweep.folder), "words": list(sweep.words), "grid": sweep.grid,
            "jobs": [_as_json(state) for state in states], "marginal_means": means})
        return
    _print_jobs(sweep, states)
    if means:
        print()
        print_table([("value", "jobs", "reward", "KL"), *(
            (f"{row['key']}={row['value']}", str(row["jobs"]), shown_figure(row["reward_mean"]),
             shown_figure(row["kl_mean"])) for row in means)], right=frozenset({1, 2, 3}))
    unfinished = [state for state in states if state.status not in ("finished", "running")]
    if unfinished and sweep.grid and not any(state.status == "running" for state in states):
        say(f"{len(unfinished)} of {len(states)} jobs are not finished; go on with: "
            f"ppocli sweep resume {folder}")


@sweep_app.command("resume", cls=Command, context_settings=WORDS)
def resume(sweep: Annotated[str, typer.Argument(
               metavar="SWEEP", help="The sweep's folder or name.")],
           overrides: Overrides = None) -> None:
    """Run the jobs of a sweep that are not finished, in the same folders.

    A job goes on from its newest checkpoint, or starts if it has none. Finished jobs are kept.
    Words are settings for the jobs that are run, e.g. reward.timeout=60. Only grids can be gone
    on with: other sweepers choose their jobs as they go.

    \b
    Examples:
      ppocli sweep resume runs/sweep-20260131-120000
      ppocli sweep resume runs/sweep-20260131-120000 ppo.micro_batch_size=4
    """
    from ppocli.cli.sweep import resume_sweep

    ignore_broken_pipes()
    resume_sweep(sweep, overrides or [])


def marginal_means(states: Sequence[JobState]) -> list[dict[str, Any]]:
    """Mean figures of the finished jobs that share one value of one swept key.

    Nothing for a sweep over a single key, where every job is its own value.

    Returns:
        ``{"key", "value", "jobs", "reward_mean", "kl_mean"}`` for each value, in order of the jobs.
    """
    from ppocli.runs.sweeps import varied_values

    values = [varied_values(state.job) for state in sorted(states, key=lambda s: s.job.number)]
    keys = list(dict.fromkeys(key for of_job in values for key in of_job))
    if len(keys) < 2:
        return []
    rows = []
    for key in keys:
        for value in dict.fromkeys(of_job[key] for of_job in values if key in of_job):
            there = [state for state in states if state.status == "finished"
                     and varied_values(state.job).get(key) == value]
            rows.append({"key": key, "value": value, "jobs": len(there),
                         "reward_mean": _mean([state.reward_mean for state in there]),
                         "kl_mean": _mean([state.kl_mean for state in there])})
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _rank(state: JobState, sort: str) -> tuple[float, int]:
    figure = {"reward": None if state.reward_mean is None else -state.reward_mean,
              "kl": state.kl_mean, "job": 0.0}[sort]
    return (math.inf if figure is None else figure, state.job.number)


def _print_jobs(sweep: SweepRecord, states: Sequence[JobState]) -> None:
    from ppocli.runs.sweeps import varied_values

    keys = list(dict.fromkeys(key for state in states for key in varied_values(state.job)))
    rows = [("job", "status", "step", "reward", "KL", "seconds", *keys, "folder")]
    for state in states:
        values = varied_values(state.job)
        rows.append((str(state.job.number), state.status, _step(state),
                     shown_figure(state.reward_mean), shown_figure(state.kl_mean),
                     f"{state.job.seconds:.0f}" if state.job.seconds else "-",
                     *(values.get(key, "-") for key in keys), _place(state, sweep.folder)))
    print_table(rows, right=frozenset({3, 4, 5}))


def _step(state: JobState) -> str:
    return "-" if state.run is None else f"{state.run.step}/{state.run.total_steps}"


def _place(state: JobState, sweep: Path) -> str:
    if not state.job.folder or not state.folder.exists():
        return "-"
    return str(state.folder.relative_to(sweep)) if state.folder.is_relative_to(sweep) \
        else str(state.folder)


def _as_json(state: JobState) -> dict[str, Any]:
    from ppocli.runs.sweeps import varied_values

    run = state.run
    return {"job": state.job.number, "status": state.status, "varied": varied_values(state.job),
            "overrides": list(state.job.overrides), "exit_code": state.job.exit_code,
            "reward_mean": state.reward_mean, "kl_mean": state.kl_mean,
            "step": None if run is None else run.step,
            "total_steps": None if run is None else run.total_steps,
            "seconds": state.job.seconds, "folder": state.job.folder or None,
            "error": state.job.error}
