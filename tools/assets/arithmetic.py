"""Questions of arithmetic: sums in the form of GSM8K (Cobbe et al. 2021, arXiv 2110.14168), a text
and a worked answer with ``#### N`` behind it; and bare products, for the calculator."""

import json
import random
from pathlib import Path

LARGEST, EVAL_QUESTIONS, SEED = 17, 64, 43
PRODUCTS, EVAL_PRODUCTS, PRODUCT_SEED = 512, 128, 47
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


def products() -> list[dict[str, str]]:
    """``PRODUCTS + EVAL_PRODUCTS`` different products of two numbers of two digits."""
    draw = random.Random(PRODUCT_SEED)
    pairs = draw.sample([(a, b) for a in range(10, 100) for b in range(10, 100)],
                        PRODUCTS + EVAL_PRODUCTS)
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]


def build_arithmetic(folder: Path) -> None:
    """Write the questions to train on, and others: ``EVAL_QUESTIONS`` and ``EVAL_PRODUCTS``."""
    sums, bare = questions(), products()
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("arithmetic", sums[EVAL_QUESTIONS:]),
                       ("arithmetic_eval", sums[:EVAL_QUESTIONS]),
                       ("calculator_prompts", bare[EVAL_PRODUCTS:]),
                       ("calculator_eval_prompts", bare[:EVAL_PRODUCTS])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
