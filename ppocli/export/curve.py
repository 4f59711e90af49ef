"""``curve.svg``: reward and KL over the steps of a training, one picture."""

from __future__ import annotations

from ppocli.runs.charts import Line, line_chart
from ppocli.runs.record import RunRecord

CURVE = "curve.svg"
_WIDTH, _HEIGHT = 640, 240


def curve(run: RunRecord) -> str | None:
    """Reward above, KL (nats per response) below; lines of the rollouts, dots of the evaluations.
    None for a run without any figure."""
    panels = []
    for title, trained, evaluated, unit in (
            ("Mean reward", "reward/mean", "eval/reward_mean", ""),
            ("KL from the starting model", "objective/kl", "eval/kl_mean", "nats per response")):
        lines = [Line("training", run.series(trained)),
                 Line("evaluation", run.series(evaluated), kind="dots")]
        lines = [line for line in lines if line.points]
        if lines:
            panels.append(line_chart(lines, title=title, x_label="step", y_label=unit,
                                     width=_WIDTH, height=_HEIGHT))
    if not panels:
        return None
    height = _HEIGHT * len(panels)
    stacked = "".join(f'<g transform="translate(0 {_HEIGHT * number})">\n{panel}</g>\n'
                      for number, panel in enumerate(panels))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}">\n{stacked}</svg>\n')
