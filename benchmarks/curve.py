"""A picture of a run's reward and KL over its episodes, as SVG.

    python benchmarks/curve.py runs/NAME docs/quickstart-curve.svg

Two panels over one axis: reward (every rollout's mean as a thin line, evaluations on the fixed
prompts as dots) and the KL to the starting model.
"""

import argparse
import sys
from html import escape
from pathlib import Path

from ppocli.errors import PpocliError
from ppocli.runs.charts import Line, line_chart
from ppocli.runs.record import RunRecord, read_run

WIDTH, PANEL = 720, 260
PANELS = {"reward": ("reward/mean", "eval/reward_mean"),
          "KL to the starting model, nats a sample": ("objective/kl", "eval/kl_mean")}


def picture(run: RunRecord, title: str) -> str:
    """The whole SVG.

    Raises:
        SystemExit: the run has no evaluation or no step to draw.
    """
    last = max((row["episode"] for row in run.rows), default=0)
    drawn = []
    for number, (name, figures) in enumerate(PANELS.items()):
        rollouts, evals = ([(row["episode"], row[figure]) for row in run.rows
                            if row.get(figure) is not None] for figure in figures)
        if not (rollouts and evals):
            raise SystemExit("there is nothing to draw: the run has no step or no evaluation yet")
        chart = line_chart(
            [Line("rollouts", rollouts, "thin"), Line("evaluation, fixed prompts", evals, "dots")],
            title=f"{title}: {name}", x_label="episodes", width=WIDTH, height=PANEL,
            x_range=(0, last))
        drawn.append(f'<g transform="translate(0 {number * PANEL})">{chart}</g>')
    height = len(PANELS) * PANEL
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
                      f'viewBox="0 0 {WIDTH} {height}" role="img">', f"<title>{escape(title)}"
                      "</title>", *drawn, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.add_argument("--title", help="default: the run's name")
    args = parser.parse_args()
    try:
        run = read_run(args.run)
    except PpocliError as error:
        raise SystemExit(str(error)) from error
    args.out.write_text(picture(run, args.title or run.name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
