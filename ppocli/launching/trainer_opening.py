"""What a loop of one's own starts from: words to a run that is ready for its next step."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.config.compose import Checked
    from ppocli.training.loop import Run
    from ppocli.training.task import PythonObjects


log = logging.getLogger("ppocli")


class LoopScores:
    """Stands where a reward function stands, and hands on what the loop was given."""

    told_as = "your loop"

    def __init__(self) -> None:
        self.given: Any = None

    def __call__(self, **columns: Any) -> Any:
        return self.given


def checked_words(overrides: Sequence[str], objects: PythonObjects) -> Checked:
    """The checked configuration of the words.

    Raises:
        ConfigError: what is wrong with them; several processes.
    """
    from ppocli.config.compose import check, compose
    from ppocli.config.words import read_words
    from ppocli.launching.launch import needs_launcher

    if isinstance(overrides, str):
        raise ConfigError("overrides is one text, not a list of them.", where="overrides",
                          fix=f"overrides=[{overrides!r}]")
    handed_in = {"reward.fn", *(["prompts.items"] if objects.prompts is not None else [])}
    composed = compose(read_words(list(overrides)))
    checked = check(composed, frozenset(handed_in))
    if needs_launcher(checked.config.hardware) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("PPOTrainer works in one process.",
                          where="hardware.num_processes, hardware.zero_stage, WORLD_SIZE",
                          fix="several processes are what ppocli train is for")
    return checked if composed.recipe else replace(checked, name="loop")


@contextmanager
def opened(checked: Checked, objects: PythonObjects) -> Iterator[Run]:
    """A run that is ready for the next step, its folder held."""
    from ppocli.display.console import open_display
    from ppocli.launching.child_process import Start
    from ppocli.launching.opened_folder import open_folder
    from ppocli.launching.opening import open_run
    from ppocli.launching.worker import config_of
    from ppocli.parallel.backend import open_ranks
    from ppocli.parallel.stop import StopFlag
    from ppocli.storage.model_files import quiet_transformers
    from ppocli.storage.run_folder import RunFolder, lock
    from ppocli.training.clock import Moment

    began = Moment.now()
    with ExitStack() as stack:
        place = stack.enter_context(open_folder(checked, objects, log.info))
        folder = RunFolder(place.run_dir.resolve())
        cfg = config_of(Start(folder.path, place.resume))
        stack.enter_context(lock(folder.path, reserved_by=place.reserved_by))
        display = stack.enter_context(open_display(folder.log, "quiet"))
        quiet_transformers()
        backend = stack.enter_context(open_ranks(cfg))
        run = stack.enter_context(open_run(cfg, folder, objects, backend, StopFlag(), display,
                                           resume=place.resume, began=began))
        run.state = replace(run.state, pending=None)  # an evaluation at the start is the loop's own
        run.clock.mark("startup")
        yield run
