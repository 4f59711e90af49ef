"""Commands in a process that torchrun, accelerate, DeepSpeed or srun has started among others."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from ppocli.cli.output import display_mode, ignore_broken_pipes, say
from ppocli.errors import ConfigError
from ppocli.parallel.launchers import Launched, find_launch

# what an option of the group sets is its proposal, not the user's word
_GROUP = re.compile(r"(^|/)hardware/[^/]+\.yaml")

if TYPE_CHECKING:
    from ppocli.config.compose import Composition
    from ppocli.config.schema import TrainConfig
    from ppocli.launching.adopted_ranks import Meeting


def refuse_several(what: str) -> None:
    """Keep to one process what several would only do several times over; rank 0 says so.

    Raises:
        ConfigError: a launcher has started this process among others.
    """
    launched = find_launch(os.environ)
    if launched is None or launched.world == 1:
        return
    if not launched.first:
        raise SystemExit(ConfigError.exit_code)
    raise one_process_error(what, launched)


def one_process_error(what: str, launched: Launched) -> ConfigError:
    """The words for what needs one process."""
    return ConfigError(f"{what} works in one process, and {launched.by} has started "
                       f"{launched.world}.", where="WORLD_SIZE or srun's number of tasks",
                       fix="start it without the launcher, or with one process (srun --ntasks=1)")


def train_as_rank(launched: Launched, words_of: Callable[[], list[str]]) -> NoReturn:
    """Train as one of the launcher's ranks, and leave the process.

    Args:
        words_of: the words of ``ppocli train``, asked for by rank 0 alone.
    """
    from ppocli.launching.adopted_ranks import Meeting, outcome_of, without_accelerate

    os.environ.update(launched.variables())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
    ignore_broken_pipes()
    meeting = Meeting(launched)
    environ = dict(os.environ)
    for name in without_accelerate(environ):
        del os.environ[name]

    def work() -> None:
        if launched.first:
            _lead(meeting, words_of(), environ)
        else:
            from ppocli.launching.launch import follow

            follow(meeting)

    code = meeting.conclude(outcome_of(launched.rank, work))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # the threads of a process group can abort an interpreter that takes itself down
    os._exit(code)


def _lead(meeting: Meeting, words: list[str], environ: dict[str, str]) -> None:
    """Rank 0: compose, check, make the folder, tell the others, train, print the model's path."""
    from ppocli.cli.train import asks_for_deepspeed, show_deepspeed
    from ppocli.config.compose import compose, is_sweep
    from ppocli.launching.adopted_ranks import PROVIDED, placed
    from ppocli.launching.launch import launch

    if is_sweep(words):
        raise one_process_error("A sweep", meeting.launched)

    def settled(composition: Composition) -> TrainConfig:
        given = frozenset(key for key, source in composition.sources.items()
                          if not _GROUP.search(source)
                          and (composition.resume_from is None or source == "command line"))
        return placed(composition.config, meeting.launched, given, environ)

    if asks_for_deepspeed(words):
        show_deepspeed(words, settled)
        composition = None
    else:
        composition = compose(words, handed_in=PROVIDED)
    if composition is None:
        sys.stdout.flush()
        meeting.tell(None)
        return
    outcome = launch(settled(composition), resume_from=composition.resume_from,
                     name_hint=composition.recipe or "run", say=say, display=display_mode(),
                     meeting=meeting, own_process=True)
    if outcome.exit_code != 0:
        raise SystemExit(outcome.exit_code)
    if outcome.model_dir is not None:
        with suppress(OSError):
            print(outcome.model_dir, flush=True)
