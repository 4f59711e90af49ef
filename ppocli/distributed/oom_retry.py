"""How many rows a pass takes at once: as configured, until memory runs out.

A pass that doesn't fit is repeated with half the rows. Results don't depend on it, up to rounding:
random numbers of a sample are a function of its place in the run, and an update's gradient is
summed over its micro-batches.
"""

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from ppocli.config.text import counted, format_memory
from ppocli.distributed import host_memory, ranks
from ppocli.distributed.backend import Backend
from ppocli.errors import OutOfMemoryError

T = TypeVar("T")
log = logging.getLogger("ppocli")


@dataclass(slots=True)
class PassRows:
    """The most rows that fit into one pass, by phase, where the configured number was too much.

    The same on all ranks. It only shrinks. A resumed run starts from the configured number again,
    since it may run where there is more memory.
    """

    backend: Backend
    keys: Mapping[str, str]
    """phase -> the key that decides how many rows one of its passes has"""
    reduced: dict[str, int] = field(default_factory=dict)
    shorter: str = "generation.max_new_tokens, prompts.max_length"
    """keys that limit the tokens of a sample"""

    def limit(self, phase: str, configured: int) -> int:
        """Rows of a pass that is configured to have ``configured``."""
        return min(configured, self.reduced.get(phase, configured))

    def figures(self) -> dict[str, float]:
        """For the row of a step: ``memory/rows/PHASE`` where memory has run out."""
        return {f"memory/rows/{phase.replace(' ', '_')}": float(rows)
                for phase, rows in self.reduced.items()}

    def retry(self, phase: str, configured: int, tokens: int, work: Callable[[], T], *,
              in_step: bool = False) -> T:
        """Run ``work``, and again with half the rows on all ranks whenever memory runs out on one
        of them; return its result. All ranks call it in step.

        Args:
            phase: of :attr:`keys`; ``work`` takes its number of rows from :meth:`limit`.
            configured: rows of a pass as the configuration has it, the same on all ranks.
            tokens: of the longest sample, for the message.
            in_step: whether passes gather weights from all ranks, and so can't be repeated.

        Raises:
            OutOfMemoryError: one row is too much; or as :meth:`once`.
            PpocliError: what ``work`` raised on some rank, on all ranks.
        """
        while True:
            rows, text = self.limit(phase, configured), ""
            try:
                return self.backend.ranks.all_do(
                    partial(self.once, phase, rows, tokens, work) if in_step else work,
                    f"{phase} of {counted(rows, 'row')} at once")
            except OutOfMemoryError as error:
                if error.alone:
                    raise
                text = error.what
            except RuntimeError as error:
                if not ranks.is_out_of_memory(error):
                    raise
            # out of the handler, or the exception would keep the tensors of the pass
            self.shrink(phase, rows, tokens, text)

    def shrink(self, phase: str, rows: int, tokens: int, text: str = "") -> None:
        """Halve the rows from now on, after a pass of ``rows`` ran out of memory.

        Raises:
            OutOfMemoryError: it was one row.
        """
        text = text or f"{phase} of {counted(rows, 'row')} at once: out of memory"
        if rows == 1:
            raise self._too_much(text, tokens)
        self.reduced[phase], key = rows // 2, self.keys[phase]
        log.warning("%s; going on with %d (%s=%d starts so)", text, rows // 2, key, rows // 2)
        gc.collect()
        if self.backend.device.type != "cpu":
            torch.get_device_module(self.backend.device).empty_cache()

    def once(self, phase: str, rows: int, tokens: int, work: Callable[[], T]) -> T:
        """Run ``work``, whose passes all ranks make together, and return its result. A rank that
        runs out of memory leaves the others inside a pass, so that all ranks have to start again.

        Raises:
            OutOfMemoryError: on this rank alone, with the setting to restart with.
        """
        try:
            return work()
        except RuntimeError as error:
            if not ranks.is_out_of_memory(error):
                raise
        if rows == 1:
            raise self._too_much("out of memory with 1 row a pass", tokens, alone=True)
        key = self.keys[phase]
        raise OutOfMemoryError(f"out of memory with {rows} rows a pass", where=key, alone=True,
                               retry={key: rows // 2})

    def _too_much(self, text: str, tokens: int, *, alone: bool = False) -> OutOfMemoryError:
        """The error for a pass that can't be made smaller, with sizes."""
        held = f"{self.backend.peak_memory_mib():.0f} MiB"
        if (device := self.backend.device).type != "cpu":
            _, total = torch.get_device_module(device).mem_get_info(device)
            memory = f"the GPU has {format_memory(total)}, of which this process held up to {held}"
        else:
            left = host_memory.host_room()
            memory = f"this process held up to {held}" + (
                "" if left is None else
                f", and {format_memory(left)} of the machine's memory are free")
        return OutOfMemoryError(f"{text}, and a pass can't be smaller: "
                                f"its longest sample has {tokens} tokens; {memory}", alone=alone,
                                where=f"{self.shorter}, model.path",
                                fix="fewer tokens, model.gradient_checkpointing=true, or several "
                                "processes (hardware=zero3); ppocli estimate tells what each saves")
