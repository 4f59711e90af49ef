"""What a run's settings were changed to when it was resumed, as its ``run.json`` tells."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ppocli.config.problems import shown
from ppocli.config.resolved import (
    CONFIG_FILE,
    accept_config,
    config_differences,
    next_config,
    read_config,
)
from ppocli.storage.atomic import write_json_atomic
from ppocli.storage.run_folder import read_object

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that a resume changed."""

    step: int
    """the last step with the value before"""
    key: str
    before: str
    after: str


def read_changes(run_dir: Path) -> list[Change]:
    """Changes in the order they were made; none where the file doesn't tell any."""
    found = read_object(run_dir / RUN_FILE).get("changes")
    return [Change(entry["step"], *(str(entry.get(name)) for name in ("key", "before", "after")))
            for entry in (found if isinstance(found, list) else ())
            if isinstance(entry, dict) and isinstance(entry.get("step"), int)]


def accept_settings(run_dir: Path, step: int | None) -> None:
    """Make the settings asked for at resume the run's own, and note what they change.

    Args:
        step: what the run goes on from; None: it starts afresh, and nothing changes on its way.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    told, noted = read_object(run_dir / RUN_FILE), read_changes(run_dir)
    changes: list[Change] = []
    if step is not None:
        # the run may have gone back behind a change, to an earlier checkpoint
        changes = [replace(change, step=min(change.step, step)) for change in noted]
        new = [Change(step, key, shown(before), shown(after)) for key, before, after in
               config_differences(read_config(run_dir / CONFIG_FILE),
                                  read_config(next_config(run_dir)))]
        if new != changes[-len(new):]:  # an attempt that was killed right here has noted them
            changes += new
    if changes != noted and "run_id" in told:
        write_json_atomic(run_dir / RUN_FILE,
                          {**told, "changes": [asdict(change) for change in changes]})
    accept_config(run_dir)
