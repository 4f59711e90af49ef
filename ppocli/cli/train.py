"""``ppocli train`` and ``ppocli resume``: words to a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from os.path import isdir

from ppocli.cli.output import display_mode, ignore_broken_pipes, say


def run_words(words: Sequence[str], *, dry_run: bool = False, resumed: str | None = None) -> None:
    """Train with the words of the command line, sweep with ``-m``, or let Hydra print.

    With ``resumed``, a run's folder or name, go on with that run.

    The last line on standard output is the path of the trained model's folder. With ``dry_run``
    everything is loaded and tried, but nothing is trained or written.

    Raises:
        PpocliError: whatever keeps the run from its end.
    """
    from ppocli.engine.launched import find_launch

    def own_words() -> list[str]:
        return list(words) if resumed is None else resume_words(resumed, words)

    launched = find_launch(os.environ)
    if launched is not None and not dry_run:
        from ppocli.cli.ranked import train_as_rank

        train_as_rank(launched, own_words)
    words = own_words()
    if dry_run:
        from ppocli.cli.validate import validate_words

        validate_words(words, deep=True)
        return
    from ppocli.config.compose import compose, is_sweep

    if is_sweep(words):
        from ppocli.cli.sweep import run_sweep

        ignore_broken_pipes()
        run_sweep(words)
        return
    composition = compose(words)
    if composition is None:
        return
    from ppocli.launch import launch

    ignore_broken_pipes()
    outcome = launch(composition.config, resume_from=composition.resume_from,
                     name_hint=composition.recipe or "run", say=say,
                     display=display_mode())
    if outcome.exit_code != 0:  # of several processes, which have said why
        raise SystemExit(outcome.exit_code)
    if outcome.model_dir is not None:
        with suppress(OSError):  # a display that is gone doesn't undo the training
            print(outcome.model_dir, flush=True)


def resume_words(run: str, words: Sequence[str]) -> list[str]:
    """The words of ``ppocli resume RUN ...`` as those of ``ppocli train``; RUN is a folder, or a
    run's name below ``runs``."""
    from ppocli.runs.target import run_named

    return [f"resume={run if isdir(run) else run_named(run, fits=isdir)}", *words]
