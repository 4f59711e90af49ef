"""``python -m tools.assets.build NAME --out DIR``: make the built-in models and prompts."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ppocli.errors import PpocliError
from ppocli.rewards.randomwalks import GOAL, SUCCESSORS
from tools.assets.arithmetic import build_arithmetic
from tools.assets.corpus import neutral_openings

log = logging.getLogger("tools.assets.build")  # __name__ is "__main__" under -m

PROMPT_SEED = 41
TRAIN_PROMPTS, EVAL_PROMPTS = 192, 64
_NAMES = ("reviews", "reviews-sentiment", "randomwalks", "prompts", "pipeline", "arithmetic",
          "guess-number", "calculator")


def build_prompts(folder: Path) -> None:
    """Write the three prompt files; training and evaluation openings have none in common."""
    openings = neutral_openings(TRAIN_PROMPTS + EVAL_PROMPTS, PROMPT_SEED)
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("reviews_prompts", openings[:TRAIN_PROMPTS]),
                          ("reviews_eval_prompts", openings[TRAIN_PROMPTS:]),
                          ("randomwalks_prompts", [node for node in SUCCESSORS if node != GOAL])):
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def build(name: str, folder: Path) -> None:
    """Rebuild one part under ``folder``.

    Raises:
        DiskError: the folder can't be written.
    """
    if name == "prompts":
        build_prompts(folder)
        return
    if name == "arithmetic":
        build_arithmetic(folder)
        return
    if name == "pipeline":
        from tools.assets.preferences import build_pipeline

        build_pipeline(folder)
        return
    if name == "reviews":
        from tools.assets.reviews import build_reviews

        loss = build_reviews(folder / name)
    elif name == "reviews-sentiment":
        from tools.assets.sentiment import build_sentiment

        loss = build_sentiment(folder / name)
    elif name == "guess-number":
        from tools.assets.episodes import build_guess_number

        loss = build_guess_number(folder / name)
    elif name == "calculator":
        from tools.assets.episodes import build_calculator

        loss = build_calculator(folder / name)
    else:
        from tools.assets.randomwalks import build_randomwalks

        loss = build_randomwalks(folder / name)
    log.info("%s: final loss %.4f, written to %s", name, loss, folder / name)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the words, build, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.assets.build", description=__doc__)
    parser.add_argument("name", choices=(*_NAMES, "all"), help="what to build")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--verbose", action="store_true", help="show the loss on the way")
    words = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("tools.assets")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if words.verbose else logging.INFO)
    try:
        for name in _NAMES if words.name == "all" else (words.name,):
            build(name, words.out)
    except PpocliError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        logger.removeHandler(handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
