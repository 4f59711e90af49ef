"""From a checked configuration to a run's end: its folder, then its processes. Read this first.

    words ─ read_words ─► Words ─ compose ─► Composed ─ check ─► Checked        ppocli/config
    Checked ─ open_folder ─► OpenedFolder ─ run_processes ─► RunOutcome         here
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppocli.launching.opened_folder import open_folder
from ppocli.launching.processes import Caller, RunOutcome, join_node, refuse_ranks, run_processes

if TYPE_CHECKING:
    from ppocli.config.compose import Checked


def launch(checked: Checked, caller: Caller = Caller()) -> RunOutcome:  # noqa: B008
    """Run one configuration to its end.

    Raises:
        ConfigError: a launcher has started this process among others, and the caller doesn't take
            part; Python objects and several processes.
        CheckpointError, DiskError, InputError: as :func:`open_folder`.
        PpocliError: whatever ends a run in this process.
    """
    if caller.meeting is None:
        refuse_ranks()
    if checked.config.hardware.node_rank > 0:
        return join_node(checked, caller)
    with open_folder(checked, caller.objects, caller.say) as opened:
        return run_processes(opened, caller)
