"""Figures and texts of a run as a person reads them: the lines of a step and of an evaluation, and
the closing table."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from ppocli.text import clean, figure


def row_lines(row: dict[str, Any], total: int) -> list[str]:
    """What is said of a row of metrics.jsonl."""
    return ([step_line(row, total)] if "reward/mean" in row else []) + (
        [eval_line(row)] if "eval/reward_mean" in row else [])


def step_line(row: dict[str, Any], total: int) -> str:
    """``step 12/100  reward 0.43±0.20  kl 3.1  len 38.0  loss -0.02/0.31  clip 0.11  lr 1.0e-05
    12.4 s (rollout 3.1 reward 0.2 scoring 1.0 optimize 8.1, 980 tokens/s)``"""
    def shown(name: str, digits: int) -> str:
        return figure(row.get(name), digits)

    phases = " ".join(f"{name} {shown(f'time/{name}', 1)}"
                      for name in ("rollout", "reward", "scoring", "optimize")
                      if f"time/{name}" in row)
    return (f"step {row['step']}/{total}  reward {shown('reward/mean', 3)}"
            f"±{shown('reward/std', 3)}  kl {shown('objective/kl', 2)}  "
            f"len {shown('rollout/response_tokens_mean', 1)}  "
            f"loss {shown('loss/policy_avg', 3)}/{shown('loss/value_avg', 3)}  "
            f"clip {shown('policy/clipfrac_avg', 2)}  lr {figure(row.get('lr'), 1, 'e')}  "
            f"{shown('time/step', 1)} s ({phases}, "
            f"{shown('tokens_per_second/rollout', 0)} tokens/s)")


def eval_line(row: dict[str, Any]) -> str:
    """The evaluation of a step in one line."""
    metrics = "".join(f"  {name.removeprefix('eval/metrics/')} {figure(value, 3)}"
                      for name, value in row.items() if name.startswith("eval/metrics/"))
    return (f"eval at step {row['step']}  reward {figure(row.get('eval/reward_mean'), 3)}"
            f"±{figure(row.get('eval/reward_std'), 3)}  kl {figure(row.get('eval/kl_mean'), 2)}  "
            f"len {figure(row.get('eval/response_tokens_mean'), 1)}{metrics}")


def closing_table(before: dict[str, Any] | None, after: dict[str, Any],
                  samples: list[tuple[dict[str, Any] | None, dict[str, Any]]]) -> Table:
    """Figures and a few samples before and after training.

    Args:
        before, after: figures of the first and last evaluation.
        samples: (before, after) rows of the same prompts.
    """
    table = Table(title="before and after", show_lines=True, title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, overflow="fold")
    of_ppo = ["reward_mean", "kl_mean", "response_tokens_mean", "distinct_2"]
    shown = [name for name in of_ppo if name in after]
    shown += [name for name in after if name.startswith("metrics/")]
    shown = shown or list(after)  # a task of the user's own has figures of its own
    for name in shown:
        old = "" if before is None else figure(before.get(name), 3)
        table.add_row(name.removeprefix("metrics/"), old, figure(after[name], 3))
    for old_row, new_row in samples:
        if "prompt" not in new_row:  # likewise
            continue
        table.add_row(Text(clean(new_row["prompt"])), _sample(old_row), _sample(new_row))
    return table


def _sample(row: dict[str, Any] | None) -> Text:
    if row is None:
        return Text("")
    score = "none" if row["score"] is None else f"{row['score']:.2f}"
    return Text(f"[{score}] {clean(row['response'])}")
