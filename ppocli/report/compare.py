"""Runs side by side: figures after equally many samples, settings that differ, wins on prompts."""

from collections.abc import Sequence
from typing import Any

from ppocli.config import resolved, tasks
from ppocli.report.curves import run_labels
from ppocli.runs import listing, record

_FIGURES = ("reward/mean", "objective/kl", "objective/entropy", "rollout/response_tokens_mean",
            "rollout/finished_share", "loss/total", "eval/reward_mean", "eval/kl_mean",
            "eval/loss", "eval/perplexity", "eval/accuracy", "eval/accuracy_stderr",
            "eval/margin_mean", "eval/ece", "eval/response_tokens_mean", "eval/distinct_2")
# how a reward is called, which doesn't change its scores
_CALLING = ("reward.timeout", "reward.retries", "reward.metric_fn", "reward.scale")


def compare_runs(runs: Sequence[record.RunRecord], metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Set runs side by side, as ``ppocli compare --json`` prints it; the first is what the others
    are compared with.

    Args:
        metrics: the figures that are compared (default: those that say most).
    """
    labels = run_labels(runs)
    episodes = min(_episodes(run.rows) for run in runs)
    compared = []
    for label, run in zip(labels, runs, strict=True):
        best_step, best = listing.best_evaluation(run)
        compared.append({
            "name": label, "path": str(run.folder.path), "status": run.status,
            "equal": _at(run, episodes, metrics), "end": _at(run, _episodes(run.rows), metrics),
            "best": best, "best_step": best_step, "best_metric": run.config.checkpoint.metric})
    return {
        # the largest number of samples that all runs have reached, which `equal` is after
        "episodes": episodes, "runs": compared,
        # the value of each run, for every setting that isn't the same in all
        "config_differences": {key: dict(zip(labels, values, strict=True))
                               for key, values in _differences(runs)},
        "win_rates": [_wins(runs[0], run, labels[0], label)
                      for label, run in zip(labels[1:], runs[1:], strict=True)]}


def _episodes(rows: Sequence[dict[str, Any]]) -> int:
    return int(rows[-1].get("episode") or 0) if rows else 0


def _at(run: record.RunRecord, episodes: int, metrics: Sequence[str]) -> dict[str, Any]:
    """A run after so many samples: ``seconds`` spent in steps and evaluations until then, and
    ``figures`` of the newest row up to then that has each."""
    rows = [row for row in run.rows if int(row.get("episode") or 0) <= episodes]
    extra = [name for name in run.names if name.startswith("eval/metrics/")]
    return {
        "step": int(rows[-1]["step"]) if rows else 0, "episodes": _episodes(rows),
        "seconds": sum(row.get(name) or 0.0 for row in rows for name in ("time/step", "time/eval")),
        "figures": {name: next((row[name] for row in reversed(rows) if row.get(name) is not None),
                               None) for name in metrics or (*_FIGURES, *extra)}}


def _differences(runs: Sequence[record.RunRecord]) -> list[tuple[str, list[Any]]]:
    first = runs[0].config
    keys = dict.fromkeys(key for run in runs[1:]
                         for key, _, _ in resolved.config_differences(first, run.config))
    values = [resolved.flat(run.config) for run in runs]
    return [(key, [of_run.get(key) for of_run in values]) for key in keys]


def _wins(base: record.RunRecord, run: record.RunRecord, base_name: str, name: str
          ) -> dict[str, Any]:
    """How often the responses of a run score higher than those of another in the newest
    evaluations: ``run``, ``against``, ``prompts`` compared (without a valid score they aren't),
    ``rate`` (share of wins, ties counted half; None where nothing can be compared), ``reason`` (why
    there is no rate)."""
    def no(reason: str) -> dict[str, Any]:
        return {**found, "reason": reason}

    found = {"run": name, "against": base_name, "prompts": 0, "rate": None, "reason": None}

    if unscored := [label for each, label in ((run, name), (base, base_name))
                    if tasks.task_name(each.config) in tasks.DATA_TASKS]:
        return no(f"{unscored[0]} is not trained on rewards; ppocli eval judges its responses by "
                  "one: --reward, --against")
    if judged := [key for key, _, _ in resolved.config_differences(base.config, run.config)
                  if key.startswith("reward.") and key not in _CALLING]:
        return no(f"other rewards score them ({', '.join(judged)} differ)")
    mine, theirs = (_final_samples(each) for each in (run, base))
    if not mine or not theirs:
        return no("there are no evaluation samples of " + (name if not mine else base_name))
    if [row.get("prompt") for row in mine] != [row.get("prompt") for row in theirs]:
        return no("the evaluation prompts aren't shared")
    pairs = [(a["score"], b["score"]) for a, b in zip(mine, theirs, strict=True)
             if a.get("score") is not None and b.get("score") is not None]
    if not pairs:
        return no("no response has a valid score")
    won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
    return {**found, "prompts": len(pairs), "rate": won / len(pairs)}


def _final_samples(run: record.RunRecord) -> list[dict[str, Any]]:
    evaluated = run.series("eval/reward_mean")
    return record.eval_samples(run.folder, evaluated[-1][0])[0] if evaluated else []
