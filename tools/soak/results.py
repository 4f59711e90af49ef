"""What the suites came to, as a table of RESULTS.md."""

import json
from datetime import date
from pathlib import Path

import machine
from tables import table, write_between

from tools.soak.cases import KEPT, Tally  # first: it makes the benchmarks' helpers importable


def write(out: Path) -> None:
    """Put all that was kept between the marks ``soak`` of a Markdown file.

    Raises:
        SystemExit: the file lacks them.
    """
    rows = []
    for path in sorted(KEPT.glob("*.json")):
        tally = Tally(**json.loads(path.read_text(encoding="utf-8")))
        held = ", ".join(f"{number} {what}" for what, number in sorted(tally.outcomes.items()))
        rows.append([tally.suite, str(tally.seed), str(tally.cases), held, str(len(tally.failed)),
                     f"{tally.seconds / 60:.0f} min"])
    made = f"{date.today()}. {machine.hardware()}. {machine.versions()}."
    write_between(out, "soak", table(
        ["suite", "seed", "cases", "what came of them", "failed", "took"], rows) + f"\n\n{made}")
