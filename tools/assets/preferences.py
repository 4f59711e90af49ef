"""Makes the data of the pipeline recipes: reviews asked for by a prompt, to learn from, and pairs
of reviews of which the built-in classifier prefers one, a tenth of them turned round."""

import json
import random
import re
from pathlib import Path

from tools.assets import vocabulary as words
from tools.assets.corpus import Review, make_reviews

SEED = 71
DEMONSTRATIONS, EVAL_DEMONSTRATIONS = 1200, 64
PAIRS, EVAL_PAIRS = 2000, 400
NOISE = 0.1
"""share of the pairs, of those held back as well, whose labels are wrong"""
CLEAR = 0.6
"""smallest difference of P(POSITIVE) between the reviews of a pair: closer ones are ties"""
COUPLES = 4
"""drawn for each pair that is kept"""
EVAL_PROMPTS = 64

Row = dict[str, str]
Request = tuple[str, str]
"""a genre, and where or about whom the film is"""


def _requests(rng: random.Random) -> tuple[list[Request], list[Request]]:
    """All there is to ask for in a random order: for training, and what is held back."""
    found = [(genre, about) for genre in words.GENRES if genre[0] not in "aeiou"
             for about in (*words.SETTINGS, *words.HEROES)]
    rng.shuffle(found)
    return found[EVAL_PROMPTS:], found[:EVAL_PROMPTS]


def _prompt(request: Request) -> str:
    genre, about = request
    return f"Review a {genre} {'set in' if about in words.SETTINGS else 'about'} {about}:\n"


def _answers(review: Review, request: Request) -> str:
    """The review's text about the film that was asked for."""
    genre, about = request
    pool = words.SETTINGS if about in words.SETTINGS else words.HEROES
    text = re.sub(rf"\b({'|'.join(words.GENRES)})\b", genre, review.text)
    return re.sub(rf"\b({'|'.join(pool)})\b", about, text)


def demonstrations(seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """Prompts with one review each: what to learn from, and what to be measured on, one to each of
    the prompts that are held back."""
    train, held_back = _requests(random.Random(seed))
    asked = [train[i % len(train)] for i in range(DEMONSTRATIONS)] + held_back
    rows = [{"prompt": _prompt(request), "completion": _answers(review, request)}
            for request, review in zip(asked, make_reviews(len(asked), seed), strict=True)]
    return rows[:DEMONSTRATIONS], rows[DEMONSTRATIONS:]


def preferences(seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """Pairs of reviews to one prompt, for training and held back; exactly ``NOISE`` of each have
    the worse review as the chosen one.

    The reviews are those of the grammar, as a fine-tuned model draws them.
    """
    from ppocli.rewards.reward_model import TextClassifier

    rng, judge = random.Random(seed + 1), TextClassifier("builtin:reviews-sentiment", device="cpu")
    found = []
    for count, requests in zip((PAIRS, EVAL_PAIRS), _requests(random.Random(seed)), strict=True):
        asked = [requests[i // 2 % len(requests)] for i in range(2 * COUPLES * count)]
        texts = [_answers(review, request) for review, request in zip(
            make_reviews(len(asked), rng.randrange(2**31)), asked, strict=True)]
        liked = judge(texts, [""] * len(texts), texts)
        clear = [i for i in range(0, len(texts), 2) if abs(liked[i] - liked[i + 1]) >= CLEAR]
        wrong = set(rng.sample(range(count), round(NOISE * count)))
        rows = []
        for number, i in zip(range(count), clear, strict=False):
            first = (liked[i] > liked[i + 1]) != (number in wrong)
            chosen, rejected = (i, i + 1) if first else (i + 1, i)
            rows.append({"prompt": _prompt(asked[i]), "chosen": texts[chosen],
                         "rejected": texts[rejected]})
        found.append(rows)
    return found[0], found[1]


def build_pipeline(folder: Path) -> None:
    """Write the four files of the pipeline recipes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("pipeline_sft", "pipeline_sft_eval", "pipeline_pairs",
                           "pipeline_pairs_eval"), (*demonstrations(), *preferences()),
                          strict=True):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
