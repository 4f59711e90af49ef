"""A picture of a run's reward and KL over its episodes, as SVG.

    python benchmarks/curve.py runs/NAME docs/quickstart-curve.svg

Two panels, drawn by matplotlib: reward (every rollout's mean as a thin line, evaluations on the
fixed prompts as dots) and the KL to the starting model.
"""

import argparse
import sys
from pathlib import Path

from ppocli.errors import PpocliError
from ppocli.publish.curves import Line, Panel, draw
from ppocli.runs.record import RunRecord, read_run

PANELS = {"reward": ("reward/mean", "eval/reward_mean"),
          "KL to the starting model, nats a sample": ("objective/kl", "eval/kl_mean")}


def picture(run: RunRecord, title: str) -> bytes:
    """The whole SVG.

    Raises:
        SystemExit: the run has no evaluation or no step to draw.
    """
    panels = []
    for name, figures in PANELS.items():
        rollouts, evals = ([(row["episode"], row[figure]) for row in run.rows
                            if row.get(figure) is not None] for figure in figures)
        if not (rollouts and evals):
            raise SystemExit("there is nothing to draw: the run has no step or no evaluation yet")
        panels.append(Panel(f"{title}: {name}", [
            Line("rollouts", rollouts, "thin"), Line("evaluation, fixed prompts", evals, "dots")],
            "episodes"))
    return draw(panels)


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
    args.out.write_bytes(picture(run, args.title or run.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
