"""What a loop of one's own starts from: words to a run that is ready for its next step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.config.compose import Composition
    from ppocli.train.loop import Run
    from ppocli.train.task import PythonObjects


class LoopScores:
    """Stands where a reward function stands, and hands on what the loop was given."""

    told_as = "your loop"

    def __init__(self) -> None:
        self.given: Any = None

    def __call__(self, **columns: Any) -> Any:
        return self.given


def composed(overrides: Sequence[str], objects: PythonObjects) -> Composition:
    """The checked configuration of the words.

    Raises:
        ConfigError: what is wrong with them; several processes.
    """
    from ppocli.config.compose import compose
    from ppocli.launching.launch import needs_launcher
    from ppocli.parallel.launchers import launched_world

    if isinstance(overrides, str):
        raise ConfigError("overrides is one text, not a list of them.", where="overrides",
                          fix=f"overrides=[{overrides!r}]")
    handed_in = {"reward.fn", *(["prompts.items"] if objects.prompts is not None else [])}
    composition = compose(list(overrides), handed_in=frozenset(handed_in))
    if composition is None:
        raise ConfigError("These words only print a configuration.", fix="leave out --cfg, --info")
    if needs_launcher(composition.config.hardware) or launched_world() > 1:
        raise ConfigError("PPOTrainer works in one process.",
                          where="hardware.num_processes, hardware.zero_stage, WORLD_SIZE",
                          fix="several processes are what ppocli train is for")
    return composition


@contextmanager
def opened(composition: Composition, objects: PythonObjects) -> Iterator[Run]:
    """A run that is ready for the next step, its folder held."""
    from ppocli.config.resolved import next_config, read_config, with_absolute_paths
    from ppocli.display.console import open_display
    from ppocli.launching.launch import noting_objects, open_folder
    from ppocli.launching.opening import open_run, quiet_libraries
    from ppocli.parallel.backend import open_ranks
    from ppocli.parallel.stop import StopFlag
    from ppocli.storage.run_folder import RunFolder, lock
    from ppocli.train.clock import Moment

    began = Moment.now()
    config = noting_objects(with_absolute_paths(composition.config, Path.cwd()), objects)
    with ExitStack() as stack:
        run_dir, resume = stack.enter_context(open_folder(
            config, objects=objects, resume_from=composition.resume_from,
            name_hint=composition.recipe or "loop"))
        folder = RunFolder(run_dir.resolve())
        cfg = read_config(next_config(folder.path) if resume else folder.config)
        stack.enter_context(lock(folder.path, reserved_by=os.getpid() if resume else None))
        display = stack.enter_context(open_display(folder.log, "quiet"))
        quiet_libraries()
        backend = stack.enter_context(open_ranks(cfg))
        run = stack.enter_context(open_run(cfg, folder, objects, backend, StopFlag(), display,
                                           resume=resume, began=began))
        run.state = replace(run.state, pending=None)  # an evaluation at the start is the loop's own
        run.clock.mark("startup")
        yield run
