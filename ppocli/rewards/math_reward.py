"""Built-in reward ``math``: math-verify says whether a response's last expression equals the
answer in a column, whatever form both have (``1/2``, ``0.5``, ``\\frac{1}{2}``).

math-verify stops a comparison that takes too long by an alarm signal, which works in a main thread
alone, and not while SymPy is inside a long C call. So it runs in a process of its own, this file as
a script, which is killed and started again when it does not answer.
"""

import json
import select
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ppocli.config.import_guard import require
from ppocli.errors import RewardError

STARTUP_SECONDS = 60.0
"""until the other process has imported SymPy"""
GRACE_SECONDS = 2.0
"""beyond the alarm of the other process, before it is killed"""


class Math:
    """1 if the last mathematical expression of a response equals the right answer, else 0, also
    where the comparison takes too long.

    Args:
        column: column of the prompts with the right answer.
        seconds: of each of the three parts of a comparison: reading either text, and comparing.

    Raises:
        InputError: math-verify is missing.
        RewardError: the prompts have no such column, or an answer holds no expression.
    """

    def __init__(self, column: str = "answer", seconds: int = 3) -> None:
        require("math_verify", "reward.fn=math", "reward.fn")
        if type(seconds) is not int or seconds < 1:
            raise RewardError(f"seconds={seconds!r} is not a whole number above 0.",
                              where="reward.kwargs.seconds", fix="reward.kwargs.seconds=3")
        self.column, self.seconds = column, seconds
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, responses: list[str], log_extra: Callable[[str, Sequence[Any]], None],
                 **columns: Any) -> list[float]:
        """[N] 1 or 0; what was read in each response is logged as ``pred``."""
        if self.column not in columns:
            raise RewardError(f"The prompts have no column {self.column!r}.",
                              where="reward.kwargs.column", fix="name the column with the answers")
        verdicts = [self._compare(str(answer), response) for answer, response in zip(
            columns[self.column], responses, strict=True)]
        log_extra("pred", [verdict["pred"] for verdict in verdicts])
        return [float(verdict["equal"]) for verdict in verdicts]

    def _compare(self, answer: str, response: str) -> dict[str, Any]:
        reply = self._ask([answer, response, self.seconds],
                          3 * self.seconds + GRACE_SECONDS)
        if reply is None:
            return {"equal": False, "pred": None}
        if "no expression" in reply:
            raise RewardError(f"{answer!r} holds no expression to compare with.",
                              where=f"prompts, column {self.column}",
                              fix="name another column: reward.kwargs.column")
        return reply

    def _ask(self, question: Any, seconds: float) -> dict[str, Any] | None:
        """What the other process replies; None, and it is killed, if it doesn't in time."""
        if self._process is None:
            self._process = subprocess.Popen([sys.executable, "-P", __file__], text=True,
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            weakref.finalize(self, _end, self._process)
            if self._ask("ready?", STARTUP_SECONDS) is None:
                raise RewardError("The process that compares answers did not start.",
                                  where="reward.fn=math", fix="see its messages above")
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None
        assert received is not None
        try:
            sent.write(json.dumps(question) + "\n")
            sent.flush()
            line = received.readline() if select.select([received], [], [], seconds)[0] else ""
        except BrokenPipeError:
            line = ""
        if line:
            return dict(json.loads(line))
        _end(self._process)
        self._process = None
        return None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _reply(answer: str, response: str, seconds: int) -> dict[str, Any]:
    """Of the other process: whether the expressions are equal, and the one in the response."""
    from math_verify import parse, verify

    right = parse(answer, parsing_timeout=seconds)
    if not right:
        # a bare LaTeX answer is an expression for math-verify only between dollar signs
        right = parse(f"${answer}$", parsing_timeout=seconds)
    if not right:
        return {"no expression": True}
    read = parse(response, parsing_timeout=seconds)
    return {"equal": verify(right, read, timeout_seconds=seconds),
            "pred": str(read[-1]) if read else None}


def main() -> None:
    """Answer questions, one JSON value a line, until the input ends."""
    for line in sys.stdin:
        question = json.loads(line)
        reply = {} if question == "ready?" else _reply(*question)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
