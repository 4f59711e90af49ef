"""Questions of arithmetic in the form of GSM8K (Cobbe et al. 2021, arXiv 2110.14168): a text, and a
worked answer with ``#### N`` behind it."""

import json
import random
from pathlib import Path

LARGEST, EVAL_QUESTIONS, SEED = 17, 64, 43
_TALES = (
    "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?",
    "There are {a} {thing} in one box and {b} in another. How many {thing} are there?")
_NAMES = ("Ada", "Ben", "Carl", "Dora")
_THINGS = ("apples", "books", "coins", "pens")


def questions() -> list[dict[str, str]]:
    """One question for each sum of two numbers up to ``LARGEST``, in an order of ``SEED``."""
    draw = random.Random(SEED)
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    draw.shuffle(pairs)
    return [{
        "question": draw.choice(_TALES).format(a=a, b=b, name=draw.choice(_NAMES),
                                               thing=draw.choice(_THINGS)),
        "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"} for a, b in pairs]


def build_arithmetic(folder: Path) -> None:
    """Write the questions to train on, and ``EVAL_QUESTIONS`` of other pairs of numbers."""
    found = questions()
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("arithmetic", found[EVAL_QUESTIONS:]),
                       ("arithmetic_eval", found[:EVAL_QUESTIONS])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
