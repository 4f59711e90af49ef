"""What the suites share: cases drawn from a seed, their outcomes counted, a folder to work in."""

import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

KEPT = ROOT / "build/soak"
"""where the figures of each suite lie until they are written into RESULTS.md"""


@dataclass
class Tally:
    """What a suite came to."""

    suite: str
    seed: int
    cases: int = 0
    seconds: float = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """how often each outcome came about that is as it should be, or was counted beside"""
    failed: list[str] = field(default_factory=list)
    """case number, what it was, what went wrong"""

    def keep(self) -> None:
        """Write it where ``write`` finds it."""
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{self.suite}.json").write_text(json.dumps(vars(self), indent=1))


Case = Callable[[random.Random, Path, Counter[str]], str]
"""plays one case in a folder of its own and returns what it was; an exception is a failure"""


def play(suite: str, case: Case, *, seed: int, cases: range, enough: Callable[[Tally], bool]
         ) -> Tally:
    """Play cases until there are enough of them, telling how it goes on stderr.

    The folder of a failed case is kept and named."""
    tally, began = Tally(suite, seed), time.monotonic()
    for number in cases:
        folder = Path(tempfile.mkdtemp(prefix=f"ppocli-soak-{suite}-"))
        draw = random.Random(f"{suite} {seed} {number}")
        try:
            case(draw, folder, tally.outcomes)
        except (Exception, SystemExit) as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            tally.failed.append(f"case {number} ({folder}): {_last_words(error)}")
            tell(f"\r{suite}: {tally.failed[-1]}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        tally.cases += 1
        tally.seconds = time.monotonic() - began
        if len(cases) > 1:
            tally.keep()  # hours may end before their time
        told = ", ".join(f"{n} {what}" for what, n in tally.outcomes.most_common(6))
        tell(f"\r{suite}: {tally.cases} cases, {len(tally.failed)} failed, "
             f"{tally.seconds / 60:.0f} min: {told}\x1b[K")
        if enough(tally):
            break
    tell("\n")
    return tally


def tell(text: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _last_words(error: BaseException) -> str:
    said = "".join(traceback.format_exception_only(error)).strip()
    where = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
    return f"{said[-1500:]} ({Path(where.filename).name}:{where.lineno}: {where.line})"
