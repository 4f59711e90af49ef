"""Tasks of reasoning-gym: ``prompts.path=reasoning_gym:NAME`` makes questions, and
``reward.fn=reasoning_gym`` scores answers with the task's own ``score_answer``."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ppocli.config.import_guard import require
from ppocli.config.text import nearest
from ppocli.data.files import Row
from ppocli.errors import InputError, RewardError

PREFIX = "reasoning_gym:"
ENTRY = "entry"
"""column of JSON: the task's name, its arguments and the question's number, from which
reasoning-gym makes the question again in order to score an answer"""
EXTRACTIONS = {"tag": r"(?s).*<answer>\s*(.*?)\s*</answer>", "last_line": r"(?s).*?([^\n]*)\s*\Z",
               "whole": r"(?s)\s*(.*?)\s*\Z"}
"""values of ``extract`` and the pattern whose group is the answer in a response"""


@cache
def _questions(name: str, arguments: str, where: str) -> Any:
    """reasoning-gym's data set of a task with its arguments, as JSON.

    Raises:
        InputError: no reasoning-gym, no such task, or arguments that it refuses.
    """
    require("reasoning_gym", f"{where}={PREFIX}{name}", where)
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise InputError(f"reasoning-gym has no task {name!r}.", where=where,
                         fix=f"did you mean {' or '.join(nearest(name, DATASETS))}?")
    try:
        return create_dataset(name, **json.loads(arguments))
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"The task {name} refuses its arguments: {error or 'out of range'}.",
                         where=where.replace("path", "kwargs"),
                         fix="see the task's configuration in reasoning-gym") from error


def gym_rows(name: str, kwargs: Mapping[str, Any], column: str, where: str) -> Iterator[Row]:
    """The questions of a task in their order.

    Args:
        name: of the task.
        kwargs: of its configuration: ``size``, ``seed`` and those that set its difficulty.
        column: of the question; the columns ``answer`` and ``entry`` are beside it.

    Raises:
        InputError: as of the task itself.
    """
    arguments = json.dumps({"seed": 0, **kwargs}, sort_keys=True)
    for number, entry in enumerate(_questions(name, arguments, where)):
        yield Row(f"question {number} of {PREFIX}{name}", {
            column: entry["question"], "answer": entry["answer"],
            ENTRY: json.dumps([name, arguments, number])})


class ReasoningGym:
    """The score of reasoning-gym for the answer in a response, from 0 to 1; many tasks give part
    of it for an answer that is nearly right or has other words around it.

    Args:
        extract: where the answer is: ``tag`` (between the last ``<answer>`` and ``</answer>``, as
            reasoning-gym's system prompts ask for), ``last_line``, or ``whole``, the response.

    Raises:
        RewardError: the prompts are not those of :func:`gym_rows`, or an unknown ``extract``.
    """

    def __init__(self, extract: str = "tag") -> None:
        if extract not in EXTRACTIONS:
            raise RewardError(f"extract={extract!r} is not one of {', '.join(EXTRACTIONS)}.",
                              where="reward.kwargs.extract", fix="reward.kwargs.extract=tag")
        self.pattern = re.compile(EXTRACTIONS[extract])

    def __call__(self, responses: list[str], log_extra: Callable[[str, Sequence[Any]], None],
                 **columns: Any) -> list[float]:
        """[N] scores; the answers are logged as ``pred``. Without an answer the score is 0."""
        if ENTRY not in columns:
            raise RewardError(f"The prompts have no column {ENTRY!r}.", where="reward.fn",
                              fix=f"prompts.path={PREFIX}NAME")
        answers = [match[1] if (match := self.pattern.match(response)) else None
                   for response in responses]
        log_extra("pred", answers)
        scores = []
        for answer, entry in zip(answers, columns[ENTRY], strict=True):
            name, arguments, number = json.loads(entry)
            task = _questions(name, arguments, "reward.fn")
            scores.append(0.0 if answer is None else float(task.score_answer(answer, task[number])))
        return scores
