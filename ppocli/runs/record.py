"""A run read from its folder: configuration, rows, samples, warnings, status. No torch here."""

import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ppocli.config import config_yaml, resume_policy, schema, tasks
from ppocli.config.text import figure, shown
from ppocli.errors import CheckpointError
from ppocli.runs import atomic, environment, run_folder, run_logs, trust
from ppocli.runs.episode import transcript_of

log = logging.getLogger("ppocli")
Status = Literal["running", "finished", "stopped", "failed", "interrupted"]
_LOG_HEAD = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (\w+) ", re.MULTILINE)


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder; lazily read parts are read once."""

    folder: run_folder.RunFolder
    config: schema.TrainConfig
    rows: list[dict[str, Any]]
    """metrics.jsonl: one row a step, in order, step 0 first if there was an evaluation;
    finite numbers and None alone"""
    summary: dict[str, Any] | None
    """summary.json of the run's last end; ``status`` says whether it is still current"""
    status: Status

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name

    @property
    def step(self) -> int:
        """The newest recorded step."""
        return int(self._newest("step", "steps"))

    @property
    def episodes(self) -> int:
        """Episodes drawn by then."""
        return int(self._newest("episode", "episodes"))

    @property
    def updates(self) -> int:
        """Optimizer steps taken by then."""
        return int(self._newest("updates", "updates"))

    def _newest(self, in_row: str, in_summary: str) -> float:
        """The newest value of a count. A run that was stopped in a step's evaluation has saved the
        step, but has no row of it."""
        row = self.rows[-1] if self.rows else {}
        if self.status in ("finished", "stopped", "failed") \
                and whole(self.summary, "steps") > row.get("step", 0):
            return whole(self.summary, in_summary)
        return row.get(in_row) or 0

    @property
    def total_steps(self) -> int:
        """Steps in the whole run, as of :func:`ppocli.config.tasks.total_steps`."""
        return tasks.total_steps(self.config, self.step, self.episodes,
                                 environment.examples_of(self.folder.path))

    @property
    def command(self) -> str | None:
        """The command that trains such a run again; None if it used Python objects, which no
        command can name."""
        return None if config_yaml.PYTHON_OBJECT in config_yaml.flat(self.config).values() \
            else config_yaml.training_command(self.config)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a figure at every step that has a finite one."""
        return [(int(row["step"]), float(row[name])) for row in self.rows
                if row.get(name) is not None]

    @cached_property
    def names(self) -> list[str]:
        """Names of all figures, in the order they first appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row
                                  if name not in ("step", "episode", "updates")))

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Settings that were changed when the run was resumed, see :func:`read_changes`."""
        return read_changes(self.folder.path)

    def log_lines(self) -> list[tuple[str, str, str]]:
        """(time, level, text) of all messages of the run. Time is local to the machine that ran it,
        ``2026-01-31 12:00:00``; continued lines are joined with newlines."""
        try:
            text = self.folder.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        _, *parts = _LOG_HEAD.split(text)
        return [(time, level, message.removesuffix("\n")) for time, level, message in
                zip(parts[::3], parts[1::3], parts[2::3], strict=True)]


def first_start(run_dir: Path) -> str | None:
    """When a run was first started, from the first line of its log, in the form of
    ``model.chat_template_date``; None if there is no such line."""
    with suppress(OSError), run_folder.RunFolder(run_dir).log.open(encoding="utf-8",
                                                                   errors="replace") as file:
        if (head := _LOG_HEAD.match(file.readline(100))) is not None:
            return head[1].replace(" ", "T")
    return None


def eval_samples(run: run_folder.RunFolder, *steps: int | None) -> list[list[dict[str, Any]]]:
    """The evaluation samples of each step, in the order of the prompts; none of step None."""
    rows = [row for row in run_logs.read_jsonl(run.samples)
            if row.get("kind") == "eval" and row.get("step") in steps]
    return [[row for row in rows if step is not None and row.get("step") == step] for step in steps]


def first_of_each_prompt(samples: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Prompt -> its first sample, in the order of the prompts."""
    first: dict[str, dict[str, Any]] = {}
    for row in samples:
        first.setdefault(str(row.get("prompt", "")), row)
    return first


def sample_text(row: dict[str, Any]) -> str:
    """The text of a row of samples.jsonl: the response; the turns of an episode, line by line; or
    both responses of a pair with their scores."""
    if "chosen" not in row:
        return transcript_of(row) or str(row.get("response", ""))
    return "\n".join(f"{name} [{figure(row.get(f'{name}_score'), 3)}] {row.get(name)}"
                     for name in ("chosen", "rejected"))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has a configuration, and a run has started to fill it."""
    run = run_folder.RunFolder(folder)
    # unlike Path's methods, these return False for paths that can't be read
    return os.path.isfile(run.config) and (
        any(map(os.path.isfile, (folder / "run.json", run.metrics, run.summary)))
        or os.path.isdir(run.checkpoints))


def subfolders(folder: Path) -> list[Path]:
    """The folders in ``folder``, by name, without hidden ones; none if it can't be read or is
    gone."""
    with suppress(OSError):
        return sorted(entry for entry in folder.iterdir()
                      if os.path.isdir(entry) and not entry.name.startswith("."))
    return []


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder; a run that is being written can be read at any moment.

    Raises:
        CheckpointError: it is not a run folder, or its config.yaml is damaged.
    """
    run = run_folder.RunFolder(folder.resolve())
    if not is_run(run.path):
        raise CheckpointError(f"{folder} is not a run folder (no config.yaml with metrics.jsonl or "
                              "checkpoints/).", where=str(folder),
                              fix="name a folder that ppocli train made: ppocli runs list")
    config = config_yaml.read_config(run.config)
    rows = run_logs.read_metrics(run.metrics)
    summary = atomic.read_json(run.summary)
    return RunRecord(run, config, rows, summary, _status(run, summary, rows))


def whole(summary: dict[str, Any] | None, name: str) -> int:
    """A count in a summary; 0 if it is missing or not a count."""
    value = (summary or {}).get(name)
    return value if isinstance(value, int) and run_logs.is_number(value) else 0


def _status(run: run_folder.RunFolder, summary: dict[str, Any] | None, rows: list[dict[str, Any]]
            ) -> Status:
    """A live process takes precedence; a summary older than the newest row is from an earlier
    end."""
    if run_folder.live_owner(run.path) is not None:
        return "running"
    newest = rows[-1]["step"] if rows else 0
    if summary is None or whole(summary, "steps") < newest:
        return "interrupted"
    status = summary.get("status")
    return status if status in ("finished", "stopped", "failed") else "interrupted"


def read_changes(run_dir: Path) -> list[dict[str, Any]]:
    """Settings that were changed when the run was resumed, in order: ``step``, the last one with
    the earlier value, ``key``, ``before`` and ``after``; empty if the run's file records none."""
    changes = (atomic.read_json(run_dir / resume_policy.RUN_FILE) or {}).get("changes")
    return [{"step": entry["step"],
             **{name: str(entry.get(name)) for name in ("key", "before", "after")}}
            for entry in (changes if isinstance(changes, list) else ())
            if isinstance(entry, dict) and isinstance(entry.get("step"), int)]


def begin_record(run_dir: Path, run_id: str) -> None:
    """Record a run's identity and the configuration that it was started with.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    text = (run_dir / config_yaml.CONFIG_FILE).read_text(encoding="utf-8")
    atomic.write_json_atomic(run_dir / resume_policy.RUN_FILE, {
        **trust.sign_run({"run_id": run_id}, config_yaml.next_config(run_dir)),
        resume_policy.KEPT: text})


def accept_settings(run_dir: Path, step: int | None) -> None:
    """Make the settings of a resume the run's settings, record what they change, and sign them.

    Args:
        step: the step that the run resumes from; None: it starts afresh, so that nothing counts as
            changed.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    run_json = atomic.read_json(run_dir / resume_policy.RUN_FILE) or {}
    noted = read_changes(run_dir)
    next_config, run = config_yaml.next_config(run_dir), run_folder.RunFolder(run_dir)
    differ = config_yaml.config_differences(resume_policy.settings_before(run_dir,
                                                                          accept_changes=True),
                                         config_yaml.read_config(next_config))
    for change in differ:  # the process that started this one has printed them
        log.info(resume_policy.change_line(*change), extra={"for_file": True})
    changes: list[dict[str, Any]] = []
    if step is not None:
        # the run may have gone back to a checkpoint from before a change
        changes = [{**change, "step": min(change["step"], step)} for change in noted]
        new = [{"step": step, "key": key, "before": shown(before), "after": shown(after)}
               for key, before, after in differ]
        if new != changes[-len(new):]:  # an attempt that was killed right here has recorded them
            changes += new
    if isinstance(run_json.get("run_id"), str):
        # before the settings take their place, so that a kill in between leaves a signed run
        now = trust.sign_run(run_json, next_config)
        if changes != noted:
            now["changes"] = changes
        if changes != noted or differ or resume_policy.KEPT not in run_json:
            now |= {name: path.read_text(encoding="utf-8") for name, path in
                    ((resume_policy.KEPT, next_config), (resume_policy.BEFORE, run.config))}
        if now != run_json:
            atomic.write_json_atomic(run_dir / resume_policy.RUN_FILE, run_logs.finite_or_null(now))
    config_yaml.accept_config(run_dir)


def settle(run_dir: Path, config: schema.TrainConfig) -> None:
    """Record settings that the run has decided itself, and sign them; they don't count as changes.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    path = run_dir / config_yaml.NEXT_CONFIG_FILE
    run_folder.write_config(config, path)
    run_json = atomic.read_json(run_dir / resume_policy.RUN_FILE) or {}
    atomic.write_json_atomic(run_dir / resume_policy.RUN_FILE, {
        **trust.sign_run(run_json, path),
        resume_policy.BEFORE: run_json.get(resume_policy.KEPT),
        resume_policy.KEPT: path.read_text(encoding="utf-8")})
    config_yaml.accept_config(run_dir)
