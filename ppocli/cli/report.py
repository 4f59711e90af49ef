"""``ppocli report``: a page and a Markdown file that tell what a run was asked and what it did."""

from __future__ import annotations

import json
from pathlib import Path

from ppocli.cli.output import say
from ppocli.config.schema import TrainConfig
from ppocli.errors import ConfigError


def report(run: str | None, output: Path | None, form: str | None, overwrite: bool,
           as_json: bool) -> None:
    """Write a run's report and print the files' names; or print its data.

    Raises:
        ConfigError: no run, options that don't fit, or a file that isn't ours is in the way.
        InputError: RUN is no run.
        CheckpointError: the run's configuration is damaged.
        DiskError: the report can't be written.
    """
    from ppocli.report.facts import gather
    from ppocli.report.files import check_replaceable, destinations, write_file
    from ppocli.report.render import render
    from ppocli.runs.record import read_run
    from ppocli.runs.target import find_run

    if as_json and (output is not None or form is not None):
        raise ConfigError("--json prints the report's data and writes no file.", where="--json",
                          fix="leave --output and --format out")
    folder = find_run(run, say=say)
    targets = [] if as_json else destinations(folder, output, form)
    check_replaceable(targets, overwrite)
    record = read_run(folder)
    gathered = gather(record, command=_command(record.config), shown_as=str(folder))
    if as_json:
        print(json.dumps(gathered.as_json(), indent=2, ensure_ascii=False))
        return
    for target in targets:
        write_file(target.path, render(gathered, target.form), "--output")
        print(target.path)


def _command(config: TrainConfig) -> str | None:
    """The command that trains so again; None for a run of Python objects."""
    from ppocli.config.as_words import training_command
    from ppocli.config.resolved import PYTHON_OBJECT, flat

    if PYTHON_OBJECT in flat(config).values():
        return None
    return training_command(config)
