"""``ppocli compare``: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ppocli.cli.completion import complete_run
from ppocli.cli.options import AsJson
from ppocli.cli.output import aligned, print_json, shown_figure
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.report.compare import At, Comparison, Wins


def print_comparison(
        given: Annotated[list[str], typer.Argument(
            metavar="RUN RUN...", autocompletion=complete_run,
            help="Folders or names of runs; the others are compared with the first.")],
        as_json: AsJson = False) -> None:
    """Compare runs: figures after the same number of samples, settings, win rates.

    \b
    Examples:
      ppocli compare runs/ONE runs/OTHER
      ppocli compare runs/sweep-20260131-120000/0 runs/sweep-20260131-120000/1 --json
    """
    from ppocli.report.compare import compare_runs
    from ppocli.runs.record import read_run
    from ppocli.runs.target import find_run

    runs = {run.folder.path: run for run in (read_run(find_run(each)) for each in given)}
    if len(runs) < 2:
        raise ConfigError("Comparing needs two or more different runs.",
                          where="command line", fix="ppocli compare runs/ONE runs/OTHER")
    comparison = compare_runs(list(runs.values()))
    if as_json:
        print_json(_as_json(comparison))
        return
    print("\n".join(_lines(comparison)), flush=True)


def _as_json(comparison: Comparison) -> dict[str, object]:
    names = [run.name for run in comparison.runs]
    return {"episodes": comparison.episodes, "runs": [asdict(run) for run in comparison.runs],
            "config_differences": {key: dict(zip(names, values, strict=True))
                                   for key, values in comparison.differences},
            "win_rates": [asdict(wins) for wins in comparison.wins]}


def _lines(comparison: Comparison) -> list[str]:
    from ppocli.config.problems import shown

    runs = comparison.runs
    rows = [["", *(run.name for run in runs)], ["status", *(run.status for run in runs)]]
    at_end = all(run.equal.episodes == run.end.episodes for run in runs)
    heading = f"after {comparison.episodes} episodes" + (", the end of all" if at_end else "")
    rows += _section(heading, [run.equal for run in runs])
    if not at_end:
        rows += _section("at the end", [run.end for run in runs])
    rows += [[""] * (len(runs) + 1),
             ["best evaluation", *(f"{shown_figure(run.best)} at step {run.best_step}"
                                   if run.best is not None else "-" for run in runs)]]
    rows += [[""] * (len(runs) + 1), ["settings that differ", *[""] * len(runs)]]
    rows += [[f"  {key}", *(shown(value) for value in values)]
             for key, values in comparison.differences] or [["  none", *[""] * len(runs)]]
    return [*aligned(rows), "", *(_wins_line(wins) for wins in comparison.wins)]


def _section(heading: str, moments: Sequence[At]) -> list[list[str]]:
    """Rows of one moment of every run; figures that no run has are left out."""
    names = [name for name in dict.fromkeys(name for at in moments for name in at.figures)
             if any(at.figures.get(name) is not None for at in moments)]
    return [[""] * (len(moments) + 1), [heading, *[""] * len(moments)],
            ["  step", *(str(at.step) for at in moments)],
            ["  episodes", *(str(at.episodes) for at in moments)],
            *([f"  {name}", *(shown_figure(at.figures.get(name)) for at in moments)]
              for name in names),
            ["  seconds", *(f"{at.seconds:.0f}" for at in moments)]]


def _wins_line(wins: Wins) -> str:
    if wins.rate is None:
        return f"win rate of {wins.run} over {wins.against}: none, {wins.reason}"
    return (f"win rate of {wins.run} over {wins.against}: {100 * wins.rate:.1f} % on "
            f"{wins.prompts} shared prompts, ties half")
