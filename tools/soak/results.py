"""What the suites came to, as a table of RESULTS.md."""

import json
from datetime import date
from pathlib import Path

import machine
from tables import between, cells_of, table, write_between

from tools.soak.cases import KEPT, Tally  # first: it makes the benchmarks' helpers importable

_HEAD = ["suite", "seed", "cases", "what came of them", "failed", "took", "on"]


def write(out: Path) -> None:
    """Put all that was kept between the marks ``soak`` of a Markdown file. What it has of a suite
    that nothing was kept of stays.

    Raises:
        SystemExit: the file lacks them.
    """
    rows = {cells[0]: cells for cells in cells_of(between(out, "soak"))}
    on = f"{date.today()}, {machine.hardware()}, {machine.versions()}"
    for path in KEPT.glob("*.json"):
        tally = Tally(**json.loads(path.read_text(encoding="utf-8")))
        held = ", ".join(f"{number} {what}" for what, number in sorted(tally.outcomes.items()))
        rows[tally.suite] = [tally.suite, str(tally.seed), str(tally.cases), held,
                             str(len(tally.failed)), f"{tally.seconds / 60:.0f} min", on]
    write_between(out, "soak", table(_HEAD, [rows[suite] for suite in sorted(rows)]))
