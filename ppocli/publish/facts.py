"""The contents of a report, gathered from a run's folder into one record. No torch here.

Missing and damaged parts are tolerated: a running, stopped or failed run has a report, too.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ppocli.config import config_yaml, schema, secrets, tasks
from ppocli.config.text import finite_number, first_line
from ppocli.errors import PpocliError
from ppocli.evaluation.eval_request import read_result
from ppocli.publish.curves import curves_of, run_labels
from ppocli.publish.sample_rows import samples_of, shown
from ppocli.runs import atomic, manifest, retention, run_folder
from ppocli.runs.environment import ENV_FILE
from ppocli.runs.record import RunRecord
from ppocli.runs.trust import import_paths
from ppocli.version import __version__

_MOST_FACTS = 80
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
        # of rewards and metrics that are found where the command is run, or are installed
        "modules": _modules(config),
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
        "phases": _phases(record, summary),
        "environment": environment_of(record.folder.path, summary)}


def _yaml(value: Any) -> str:
    """A value as it would be written in a configuration file, on one line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _inputs(config: schema.TrainConfig, task: str) -> dict[str, str]:
    model = config.model.path + (f" at {config.model.revision}" if config.model.revision else "")
    if task not in tasks.DATA_TASKS:
        return {"model": model, "reward": _reward(config), "prompts": _prompts(config)}
    data, share = config.data, tasks.val_share(config.data)
    return {"model": model, "data": str(data.path),
            "held back": str(data.val or "none") if share is None else f"{share:g} of the rows"}


def _reward(config: schema.TrainConfig) -> str:
    reward = config.reward
    if reward.fns:
        return " + ".join(f"{entry.get('weight', 1)} * {name}" if isinstance(entry, dict) else name
                          for name, entry in reward.fns.items())
    arguments = ", ".join(f"{name}={_yaml(value)}" for name, value in reward.kwargs.items())
    return f"{reward.fn or 'none'}({arguments})" if arguments else str(reward.fn or "none")


def _modules(config: schema.TrainConfig) -> list[str]:
    """Modules among the rewards and metrics of a configuration; files have absolute paths."""
    paths = (path for key, path in import_paths(config) if key.startswith("reward.") and path)
    modules = (name.rpartition(":" if ":" in name else ".")[0] for name in paths)
    return [module for module in dict.fromkeys(modules)
            if module and not module.endswith(".py") and os.sep not in module
            and module.partition(".")[0] != "ppocli"]


def _prompts(config: schema.TrainConfig) -> str:
    if config.prompts.path:
        return config.prompts.path
    count = len(config.prompts.items or [])
    return f"{count} given inline" if count else "none (each response starts from nothing)"


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
    recorded = best if isinstance(best, dict) else {}
    step, value = recorded.get("step"), finite_number(recorded.get("metric"))
    if not isinstance(step, int) or value is None:
        return None
    return {"name": record.config.checkpoint.metric, "step": step, "value": value}


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


def _phases(record: RunRecord, summary: dict[str, Any]) -> list[Row]:
    """Phases from the summary; for a run without one, the time of its steps and evaluations."""
    if record.status in ("finished", "stopped", "failed") and (profile := _profile(summary)):
        return profile

    def sums(kind: str) -> dict[str, float]:
        return {name.removeprefix(kind): math.fsum(y for _, y in record.series(name))
                for name in record.names if name.startswith(kind) and name != f"{kind}step"}

    seconds, cpu = sums("time/"), sums("cpu/")
    total = math.fsum(seconds.values())
    return [{"name": name, "seconds": value, "share": value / total, "cpu_seconds": cpu.get(name),
             "tokens_per_second": None} for name, value in seconds.items() if total > 0]


def _profile(summary: dict[str, Any]) -> list[Row]:
    """The phases of a summary's profile; none if it is damaged."""
    profile = summary.get("profile")
    phases = profile.get("phases") if isinstance(profile, dict) else None
    rows = []
    for name, entry in phases.items() if isinstance(phases, dict) else ():
        figures = {key: finite_number(entry.get(key)) if isinstance(entry, dict) else None
                   for key in ("seconds", "share", "cpu_seconds", "tokens_per_second")}
        if None not in (figures["seconds"], figures["share"]):
            rows.append({"name": name, **figures})
    return rows


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
            size, problem = manifest.check_folder(folder, step=step, verify="size").total_bytes, ""
        except (manifest.Invalid, PpocliError) as error:
            size, problem = 0, first_line(error)
        except OSError as error:  # it was being deleted
            size, problem = 0, error.strerror or str(error)
        checkpoints.append((step, size, problem))
    newest = max((step for step, _, problem in checkpoints if not problem), default=None)
    return [{"step": step, "bytes": size, "best": step == best_step, "latest": step == newest,
             "problem": problem} for step, size, problem in checkpoints]


def environment_of(run_dir: Path, summary: dict[str, Any]) -> dict[str, str]:
    """The machine and versions of a run, by name: ``env.json``, and the versions in the summary."""
    facts = dict(_flat_facts("", atomic.read_json(run_dir / ENV_FILE) or {}))
    for name, version in (summary.get("versions") or {}).items():
        if not {name, f"packages {name}"} & facts.keys():
            facts[name] = str(version)
    return dict(list(facts.items())[:_MOST_FACTS])


def _flat_facts(prefix: str, value: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        name = f"{prefix} {key}".strip()
        if secrets.looks_secret(str(key)) or item is None or item in ({}, []):
            continue
        if isinstance(item, dict):
            yield from _flat_facts(name, item)
        elif isinstance(item, list) and all(isinstance(part, dict) for part in item):
            yield from _flat_facts(name, dict(enumerate(item)))
        else:
            yield name, ", ".join(map(str, item)) if isinstance(item, list) else str(item)
