"""Every error a user can cause or meet, one class per exit code.

A ``PpocliError`` is shown as one short message (what happened, where, what to do) and ends the
command with its ``exit_code``. Any other exception is a bug and keeps its traceback. Its ``code``
says in kebab case what kind of failure it is, and stays the same when messages are reworded.
"""

from collections.abc import Mapping
from typing import Self


class PpocliError(Exception):
    """Base of all expected failures.

    Args:
        what: what happened, one sentence, naming the offending value.
        where: the key, file or line it came from.
        fix: what the user can do next, ideally a command or a ``key=value``.
        exit_code, code: where they aren't those of the class.
    """

    exit_code = 1
    code = "failed"

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None,
                 exit_code: int | None = None, code: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix
        if exit_code is not None:
            self.exit_code = exit_code
        if code is not None:
            self.code = code

    def reworded(self, **words: str | None) -> Self:
        """The same error in other words, for whoever knows more of it than the code that raised it.

        Args:
            words: ``what``, ``where`` or ``fix``, in place of its own.
        """
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__ | words)
        error.args = (error.what,)
        return error

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class ConfigError(PpocliError):
    """Wrong usage: unknown key, wrong type, out of range, contradiction."""

    exit_code = 2
    code = "wrong-usage"


class InputError(PpocliError):
    """A model, tokenizer, prompt file or data set is missing or unusable."""

    exit_code = 3
    code = "unusable-input"


class DivergedError(PpocliError):
    """The policy, its loss or its gradient stopped being finite."""

    exit_code = 4
    code = "not-finite"


class CheckpointError(PpocliError):
    """No valid checkpoint, a refused one, or a run folder that may not be used."""

    exit_code = 5
    code = "refused-run"


class DiskError(PpocliError):
    """The disk is full or the folder can't be written."""

    exit_code = 6
    code = "disk"


class RunGoneError(DiskError):
    """A run's folder was moved or deleted under it: nothing more can be saved there."""

    code = "run-gone"


class RewardError(PpocliError):
    """A reward function can't be imported, raised, or returned something unusable."""

    exit_code = 7
    code = "reward"


class OutOfMemoryError(PpocliError):
    """Out of memory even at the smallest micro-batch, or certain to be before weights are
    loaded."""

    exit_code = 8
    code = "out-of-memory"

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None,
                 alone: bool = False, retry: Mapping[str, int] | None = None) -> None:
        """
        Args:
            alone: one of several ranks raised it, and its neighbours may wait inside of a pass.
            retry: settings with which all of them can start again, such as
                ``{"ppo.micro_batch_size": 2}``.
        """
        super().__init__(what, where=where, fix=fix)
        self.alone = alone
        self.retry = dict(retry or {})


class HubError(PpocliError):
    """Something could not be pushed to the Hub; what was to be pushed is intact on this disk."""

    exit_code = 9
    code = "push"


class ThresholdError(PpocliError):
    """An evaluation went through, but its reward is below the one that was asked for."""

    exit_code = 10
    code = "below-threshold"


class SweepError(PpocliError):
    """A sweep went through, but some of its jobs failed."""

    exit_code = 11
    code = "jobs-failed"


class SamplerError(PpocliError):
    """A server that samples is missing, too slow, or serves something else."""

    exit_code = 12
    code = "sampler"


class StoppedError(PpocliError):
    """The run was asked to stop by a signal and has saved what it could."""

    code = "stopped"

    def __init__(self, what: str, *, signal_number: int, fix: str | None = None) -> None:
        super().__init__(what, fix=fix, exit_code=128 + signal_number)
