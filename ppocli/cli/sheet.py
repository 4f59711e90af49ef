"""Sampled responses on standard output: JSON lines, blocks of text, or two columns."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ppocli.cli.output import complain
from ppocli.config.sayable import CONTROL
from ppocli.display.figures import clean, figure

if TYPE_CHECKING:
    from ppocli.sampling.prompting import Answer

LONGEST_HEADING = 100


def printable(text: str) -> str:
    """Model text for standard output: on a terminal without control characters, which may be
    escape sequences; elsewhere as it is."""
    return CONTROL.sub("?", text) if sys.stdout.isatty() else text


class Sheet:
    """Writes batches of answers of one or two models to the same prompts.

    Args:
        prompts: as the user gave them.
        names: of the models.
        num_samples: responses to each prompt.
    """

    def __init__(self, prompts: Sequence[str], names: Sequence[str], num_samples: int, *,
                 as_json: bool, scored: bool) -> None:
        self._prompts = prompts
        self._names = names
        self._samples = num_samples
        self._json = as_json
        self._scores: list[list[float]] = [[] for _ in names]
        self._scored = scored
        self._heading: int | None = None
        self._bare = len(prompts) == num_samples == len(names) == 1 and not as_json
        self.streams = self._bare and sys.stdout.isatty()
        """whether the text of the only response is shown while it grows"""
        self._open_line = self.streams

    def write(self, answers: Sequence[Sequence[Answer]],
              scores: Sequence[Sequence[float | None]] | None) -> None:
        """Print a batch.

        Args:
            answers: a list for each model, of the same samples.
            scores: likewise, or None if nothing is scored.
        """
        for place, row in enumerate(zip(*answers, strict=True)):
            judged = [None] * len(row) if scores is None else [of[place] for of in scores]
            for model, score in enumerate(judged):
                if score is not None:
                    self._scores[model].append(score)
            if self._json:
                self._objects(row, judged)
            elif self._bare:
                self._one(row[0], judged[0])
            else:
                self._block(row, judged)
        sys.stdout.flush()

    def close(self) -> None:
        """End an unfinished line; tell the mean scores of several samples."""
        if self._open_line:
            print(flush=True)
            self._open_line = False
        for name, scores in zip(self._names, self._scores, strict=True):
            if scores and not self._bare:
                mean = math.fsum(scores) / len(scores)
                complain(f"mean score of {name}: {figure(mean, 3)} ({len(scores)} scored)")

    def _objects(self, row: Sequence[Answer], scores: Sequence[float | None]) -> None:
        for name, answer, score in zip(self._names, row, scores, strict=True):
            print(json.dumps({
                "prompt": self._prompts[answer.prompt], "sample": answer.sample,
                "response": answer.text, "model": name, "score": score,
                "finished": answer.finished, "response_tokens": len(answer.ids)}))

    def _one(self, answer: Answer, score: float | None) -> None:
        print("" if self.streams else printable(answer.text))
        self._open_line = False
        if self._scored:
            sys.stdout.flush()
            complain(f"score {figure(score, 3)}")

    def _block(self, row: Sequence[Answer], scores: Sequence[float | None]) -> None:
        answer = row[0]
        if answer.prompt != self._heading:
            if self._heading is not None and len(row) == 1:
                print()
            self._heading = answer.prompt
            text = clean(self._prompts[answer.prompt])
            if len(text) > LONGEST_HEADING:
                text = text[:LONGEST_HEADING - 3] + "..."
            print(f"== prompt {answer.prompt + 1}: {text}")
        facts = [] if self._samples == 1 else [f"sample {answer.sample + 1}"]
        if self._scored and len(row) == 1:
            facts.append(f"score {figure(scores[0], 3)}")
        if facts:
            print("-- " + ", ".join(facts))
        if len(row) == 1:
            print(printable(answer.text))
            return
        marks = [f"[{figure(score, 3)}] " if self._scored else "" for score in scores]
        print(side_by_side(self._names, [mark + printable(each.text)
                                         for mark, each in zip(marks, row, strict=True)]))


def side_by_side(names: Sequence[str], texts: Sequence[str]) -> str:
    """Columns of equal width under their names, as wide together as the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    encoding = (sys.stdout.encoding or "utf-8").lower()
    table = Table(box=box.SQUARE if encoding.startswith("utf") else box.ASCII, expand=True)
    cells: list[Any] = [Text(text) for text in texts]
    for name in names:
        table.add_column(Text(clean(name)), ratio=1, overflow="fold")
    table.add_row(*cells)
    paper = io.StringIO()
    width = shutil.get_terminal_size((100, 24)).columns
    Console(file=paper, width=width, color_system=None).print(table)
    return paper.getvalue().rstrip("\n")
