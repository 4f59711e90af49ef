"""The contents of a report, gathered from a run's folder into one record. No torch here.

Missing and damaged parts are tolerated: a running, stopped or failed run has a report, too. The
policy's responses are those to the same prompts at each evaluation.
"""

import json
import math
import re
import shlex
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ppocli.config import config_yaml, schema, secrets, tasks
from ppocli.config.text import BLOCKS, finite_number, first_line, printable, share_error
from ppocli.errors import PpocliError
from ppocli.evaluation.eval_request import read_result
from ppocli.publish.curves import curves_of, run_labels
from ppocli.runs import atomic, retention, run_folder
from ppocli.runs.environment import ENV_FILE
from ppocli.runs.episode import transcript_turns
from ppocli.runs.listing import data_name, source_names
from ppocli.runs.record import RunRecord, eval_samples, first_of_each_prompt, sample_text
from ppocli.version import __version__

SHOWN, HIDDEN = 8, 40
"""pairs of a report that are visible at once, and that are folded"""
_BINS = 20
_MOST_STEPS = 24
"""evaluations whose samples a report shows"""
LONGEST = 1500
"""characters of a response that a report shows"""
_STEP_LINE = re.compile(r"(?:step|eval at step) (\d+)")
_NAMES = {"reward_mean": "reward", "reward_std": "standard deviation of the reward",
          "kl_mean": "KL to the reference (nats a response)",
          "response_tokens_mean": "response length (tokens)",
          "finished_share": "finished responses (share)",
          "distinct_2": "different word pairs (share)", "loss": "loss (nats)",
          "tokens": "tokens that count", "accuracy": "accuracy (share of the pairs)",
          "accuracy_stderr": "standard error of the accuracy",
          "accuracy_pairs": "pairs that the accuracy is of",
          "margin_mean": "margin (chosen less rejected score)", "ece": "calibration error (ECE)",
          "accuracy_longer": "accuracy where the chosen answer is longer",
          "accuracy_shorter": "accuracy where the chosen answer is shorter"}


Row = dict[str, Any]
"""a row of one of the report's tables"""


def gather(record: RunRecord, shown_as: str, others: Sequence[RunRecord]) -> dict[str, Any]:
    """The contents of a report in any format: plain data, as ``--json`` prints it.

    Args:
        shown_as: the run's folder as the user would type it, for commands.
        others: runs whose curves are drawn over this one's.
    """
    config, summary = record.config, record.summary or {}
    kind, task = tasks.kind_of(config), tasks.task_name(config)
    evaluated = [row for row in record.rows
                 if (figure := tasks.evaluation_of(row)) and row[figure[1]] is not None]
    before, after = _first_and_last(evaluated)
    first, last = before.get("step"), after.get("step")
    best, error, command = _best(record), summary.get("error"), record.command
    resumes = record.status not in ("finished", "running") and command is not None
    return {
        "generator": f"ppocli report {__version__}",
        # local time with offset, to the second
        "made": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "name": record.name, "folder": str(record.folder.path), "status": record.status,
        "sentence": _sentence(record),  # status in words
        # the command that goes on with the run, where one can
        "go_on": shlex.join(["ppocli", "resume", shown_as]) if resumes else None,
        # what ended a failed run
        "failure": shown(str(error)) if record.status == "failed" and error else None,
        "step": record.step, "total_steps": record.total_steps, "episodes": record.episodes,
        "updates": record.updates, "kind": task,
        "doing": kind.doing,  # the same in words
        "asked": _inputs(config, task),
        # keys that differ from their defaults, as YAML shows them
        "settings": [
            {"key": key, "value": _yaml(new), "default": "" if old == "???" else _yaml(old)}
            for key, old, new in config_yaml.config_differences(schema.TrainConfig(), config)],
        "all_settings": {key: _yaml(value) for key, value in config_yaml.flat(config).items()
                         if tasks.is_read(key, task)},
        "command": command,  # that trains such a run again
        # settings that were others before the run was resumed
        "changes": record.changes,
        "before_step": first, "after_step": last,
        # names of the figures of an evaluation that say most
        "main": kind.names,
        # figures of the first and the last evaluation
        "outcome": _outcome(before, after),
        # the best evaluation so far by `checkpoint.metric`
        "best": best,
        # the other runs of the curves, each as the curves call it, with its status
        "overlaid": [f"{label} ({run.status})" for label, run in
                     zip(run_labels([record, *others])[1:], others, strict=True)],
        "curves": curves_of([record, *others]),
        "samples": samples_of(record, first, last, [row["step"] for row in evaluated]),
        "complaints": _complaints(record), "evaluations": evaluations_of(record.folder.path),
        "checkpoints": checkpoints_of(record.folder, best["step"] if best else None),
        "phases": _phases(record),
        "environment": environment_of(record.folder.path, summary)}


def _yaml(value: Any) -> str:
    """A value as it would be written in a configuration file, on one line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _inputs(config: schema.TrainConfig, task: str) -> dict[str, str]:
    model = config.model.path + (f" at {config.model.revision}" if config.model.revision else "")
    if task not in tasks.DATA_TASKS:
        return {"model": model, "reward": source_names(config),
                "prompts": config.prompts.path or data_name(config)}
    data, share = config.data, tasks.val_share(config.data)
    return {"model": model, "data": str(data.path),
            "held back": str(data.val or "none") if share is None else f"{share:g} of the rows"}


def _sentence(record: RunRecord) -> str:
    if record.status == "finished":
        return f"All {record.total_steps:,} steps are done."
    at = f"at step {record.step:,} of {record.total_steps:,}"
    return {"running": f"Still running, {at}: this is what there is so far.",
            "stopped": f"Stopped {at}.", "failed": f"Failed {at}.",
            "interrupted": f"Ended {at} without saying why: it was killed, or the machine went "
                           "down."}[record.status]


def _first_and_last(rows: list[Row]) -> tuple[Row, Row]:
    """The rows of the first and the last evaluation, empty if there is none. A single evaluation is
    the first if it was before any step, and otherwise the last."""
    if len(rows) == 1:
        return (rows[0], {}) if rows[0]["step"] == 0 else ({}, rows[0])
    return (rows[0], rows[-1]) if rows else ({}, {})


def _outcome(before: dict[str, Any], after: dict[str, Any]) -> list[Row]:
    names = [name.removeprefix("eval/") for name in dict.fromkeys([*before, *after])
             if name.startswith("eval/")]
    return [{"name": name, "label": _NAMES.get(name, name.removeprefix("metrics/")),
             "before": finite_number(before.get(f"eval/{name}")),
             "after": finite_number(after.get(f"eval/{name}"))} for name in names]


def _best(record: RunRecord) -> Row | None:
    """The best evaluation in the summary; a running run has none."""
    best = (record.summary or {}).get("best")
    return {"name": record.config.checkpoint.metric, "step": best["step"], "value": best["metric"]
            } if isinstance(best, dict) and {"step", "metric"} <= best.keys() else None


def _complaints(record: RunRecord) -> list[Row]:
    """Warnings and errors in order; messages that differ only in numbers are counted together."""
    complaints: dict[str, Row] = {}
    step = None
    for time, level, text in record.log_lines():
        if level not in ("WARNING", "ERROR", "CRITICAL"):
            match = _STEP_LINE.match(text)
            step = int(match[1]) if match else step
            continue
        kind = re.sub(r"\d+(\.\d+)?", "#", text)
        seen = complaints.setdefault(kind, {"level": level.lower(), "text": shown(text),
                                            "time": time, "step": step, "count": 0})
        seen["count"] += 1
    return list(complaints.values())


def _phases(record: RunRecord) -> list[Row]:
    """Where the time of the steps and evaluations went."""
    def sums(kind: str) -> dict[str, float]:
        return {name.removeprefix(kind): math.fsum(y for _, y in record.series(name))
                for name in record.names if name.startswith(kind) and name != f"{kind}step"}

    seconds, cpu = sums("time/"), sums("cpu/")
    total = math.fsum(seconds.values())
    return [{"name": name, "seconds": value, "share": value / total, "cpu_seconds": cpu.get(name)}
            for name, value in seconds.items() if total > 0]


def evaluations_of(run_dir: Path) -> list[Row]:
    """Finished evaluations, the newest last, without files that can't be read."""
    rows = {}
    for path in run_dir.glob("eval/*/eval.json"):
        if (result := read_result(path.parent)) is None:
            continue
        figures, wins, name = result["figures"], result["win_rate"] or {}, path.parent.name
        rows[result["time"]["finished"], name] = {
            "name": name, "of": result["model"]["name"], "samples": result["samples"],
            "reward_mean": figures.get("reward_mean"),
            "found": {} if "reward_mean" in figures else {
                key: value for key in ("accuracy", "loss", "perplexity")
                if (value := figures.get(key)) is not None},
            "reward_stderr": result["stderr"].get("reward_mean"), "kl_mean": figures.get("kl_mean"),
            "against": result["against"]["model"]["name"] if result["against"] else "",
            "win_rate": wins.get("win_rate"), "win_stderr": wins.get("stderr")}
    return [row for _, row in sorted(rows.items(), key=lambda each: each[0])]


def checkpoints_of(run: run_folder.RunFolder, best_step: int | None) -> list[Row]:
    """The step folders of a run, oldest first, checked by names and sizes only."""
    checkpoints = []
    for step, folder in retention.list_steps(run.checkpoints):
        try:
            size, problem = retention.check_folder(folder, step=step, verify="size").total_bytes, ""
        except (retention.Invalid, PpocliError) as error:
            size, problem = 0, first_line(error)
        except OSError as error:  # it was being deleted
            size, problem = 0, error.strerror or str(error)
        checkpoints.append((step, size, problem))
    newest = max((step for step, _, problem in checkpoints if not problem), default=None)
    return [{"step": step, "bytes": size, "best": step == best_step, "latest": step == newest,
             "problem": problem} for step, size, problem in checkpoints]


def environment_of(run_dir: Path, summary: dict[str, Any]) -> dict[str, str]:
    """The machine and versions of a run, by name: ``env.json``, and the versions in the summary."""
    facts = {"packages": summary.get("versions") or {}} | (atomic.read_json(run_dir / ENV_FILE)
                                                           or {})
    return {name: str(value) for name, value in config_yaml.leaves("", facts)
            if value not in (None, {}, []) and not secrets.looks_secret(name)}


# Samples ------------------------------------------------------------------------------------------

def spreads(samples: dict[str, Any]) -> list[dict[str, Any]]:
    """Distribution of the scores before and after, as figures and characters. ``shares`` are shares
    of the scores in equal ranges, the same ranges for both, and ``blocks`` draws them."""
    groups = {name: scores for name in ("before", "after") if (scores := samples[f"scores_{name}"])}
    everything = [score for scores in groups.values() for score in scores]
    shares = [_shares(scores, min(everything), max(everything)) for scores in groups.values()]
    top = max((share for row in shares for share in row), default=1.0)
    summaries = []
    for (name, scores), row in zip(groups.items(), shares, strict=True):
        lower, median, upper = statistics.quantiles(  # it takes two values or more
            scores if len(scores) > 1 else 2 * scores, method="inclusive")
        summaries.append({"name": name, "responses": len(scores), "lowest": min(scores),
                          "lower": lower, "median": median, "upper": upper,
                          "highest": max(scores), "shares": row, "blocks": bars(row, top)})
    return summaries


def _shares(scores: list[float], low: float, high: float) -> list[float]:
    """Share of the scores in each of the equal ranges; all in the middle one if there is only one
    value."""
    counts = [0] * _BINS
    span = high / 2 - low / 2  # halved, so that no difference overflows
    for score in scores:
        part = (score / 2 - low / 2) / span if span else 0.5
        counts[min(_BINS - 1, int(part * _BINS))] += 1
    return [count / len(scores) for count in counts]


def samples_of(record: RunRecord, before: int | None, after: int | None, steps: Sequence[int]
               ) -> dict[str, Any]:
    """Samples of the evaluations at two steps, and at those of ``steps`` between them, from
    samples.jsonl.

    Each of ``pairs`` has ``prompt``; its responses ``before``, ``after``, and those at the steps
    ``between``, each with ``text``, ``turns`` (as of :func:`ppocli.runs.episode.transcript_turns`),
    ``score``, ``kl``, ``tokens`` and ``finished``.
    """
    middle = [step for step in steps if step not in (before, after)]
    count = min(len(middle), _MOST_STEPS - 2)
    middle = [middle[(2 * part + 1) * len(middle) // (2 * count)] for part in range(count)]
    evaluations = eval_samples(record.folder, before, after, *middle)
    old, new, *between = map(first_of_each_prompt, evaluations)
    prompts = list(dict.fromkeys([*old, *new]))
    pairs = [{"prompt": shown(prompt), "before": _response(old.get(prompt)),
              "after": _response(new.get(prompt)),
              "between": [_response(each.get(prompt)) for each in between]}
             for prompt in prompts[:SHOWN + HIDDEN]]
    first, last, *_ = evaluations
    return {
        # different prompts in the order of the evaluation, so nothing is picked
        "pairs": pairs,
        # steps of evaluations after the first and before the last, evenly chosen if they are many
        "between": middle,
        "prompts": len(prompts),  # how many different ones there are
        "scores_before": _scores(first), "scores_after": _scores(last),
        # of the mean score, over prompts: responses to one prompt hang together
        "stderr_before": _stderr(first), "stderr_after": _stderr(last)}


def _response(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """One response; its text is cleaned and cut for display."""
    if row is None:
        return None
    tokens, finished = row.get("response_tokens"), row.get("finished")
    return {"text": shown(sample_text(row)),
            "turns": [(who, shown(text)) for who, text in transcript_turns(row)],
            "score": finite_number(row.get("score")), "kl": finite_number(row.get("kl")),
            "tokens": tokens if isinstance(tokens, int) else None,
            "finished": finished if isinstance(finished, bool) else None}


def _scores(rows: list[dict[str, Any]]) -> list[float]:
    return [score for row in rows if (score := finite_number(row.get("score"))) is not None]


def _stderr(rows: list[dict[str, Any]]) -> float | None:
    """s / sqrt(n) of the prompts' mean scores; with a single prompt, of its scores.

    With as many responses to every prompt this is the clustered standard error of the mean (Miller
    2024, arXiv:2411.00640, section 2.2).
    """
    by_prompt: dict[str, list[float]] = {}
    for row in rows:
        by_prompt.setdefault(str(row.get("prompt", "")), []).extend(_scores([row]))
    means = [math.fsum(scores) / len(scores) for scores in by_prompt.values() if scores]
    if len(means) == 1:
        means = _scores(rows)
    if len(means) < 2:
        return None
    error = statistics.stdev(means) / math.sqrt(len(means))
    # scores that are all 0 or 1 say what has passed
    return share_error(error, len(means)) if {*_scores(rows)} <= {0.0, 1.0} else error


def shown(text: str) -> str:
    """``text`` with control characters escaped, and the end of a very long one replaced by a
    note."""
    if len(text) > LONGEST:
        return f"{printable(text[:LONGEST])} … ({len(text) - LONGEST:,} more characters)"
    return printable(text)


def bars(shares: list[float], top: float) -> str:
    """Shares as blocks whose height is a part of ``top``; ``·`` for none."""
    last = len(BLOCKS) - 1
    return "".join(BLOCKS[round(share / top * last)] if share else "·" for share in shares)
