"""Labelled texts that teach the sentiment classifier what a good review is, and what isn't one.

A classifier that only ever saw finished reviews can be pleased by "wonderful wonderful wonderful".
So a part of the examples is unfinished text, word salad, repetition and other babble, all with
low targets: under PPO such text must not pay.
"""

import random
from collections.abc import Callable, Sequence

from tools.assets import vocabulary as words
from tools.assets.corpus import Review, make_reviews, verdict

SURE = 0.99
"""target of a clearly positive finished review; a clearly negative one has 1 - SURE"""
UNFINISHED = 0.35
"""target of a positive text that breaks off, as a share of its verdict"""
BABBLE = 0.02
"""target of text that is no review"""


def labelled_examples(count: int, seed: int) -> list[tuple[str, float]]:
    """``count`` pairs of text and target P(POSITIVE) in [0, 1], a function of the seed."""
    rng = random.Random(seed)
    reviews = make_reviews(count, seed)
    examples = []
    for review in reviews:
        kind = rng.random()
        if kind < 0.55:
            examples.append(_finished(rng, review))
        elif kind < 0.74:
            examples.append(_unfinished(rng, review))
        else:
            examples.append((rng.choice(BABBLERS)(rng, review.text, rng.choice(reviews).text),
                             BABBLE))
    return examples


def _clamped(target: float) -> float:
    return min(max(target, 1 - SURE), SURE)


def _finished(rng: random.Random, review: Review) -> tuple[str, float]:
    """The review, or its first sentences."""
    whole = len(review.sentences)
    kept = review.sentences[:whole if rng.random() < 0.8 else rng.randint(1, whole)]
    return " ".join(sentence.text for sentence in kept), _clamped(verdict(kept))


def _unfinished(rng: random.Random, review: Review) -> tuple[str, float]:
    """The review cut off within one of its sentences."""
    last = rng.randrange(len(review.sentences))
    parts = review.sentences[last].text.split()
    kept = parts[:rng.randint(1, len(parts))]
    kept[-1] = kept[-1].rstrip(".!") if rng.random() < 0.8 else kept[-1].rstrip(".!,")
    text = " ".join([*(sentence.text for sentence in review.sentences[:last]), *kept])
    return text, _clamped(UNFINISHED * verdict(review.sentences[:last + 1]))


def _glowing(rng: random.Random) -> str:
    pool = rng.choice((words.ADJ_ANY, words.ADJ_STORY, words.ADJ_PEOPLE, words.ADJ_CRAFT,
                       words.LIKED, words.NOTABLE))
    return rng.choice(pool[0])


def _maybe_end(rng: random.Random, text: str) -> str:
    if rng.random() < 0.5:
        text = text[:1].upper() + text[1:]
    return text + rng.choice(("", ".", "!"))


def _one_word_again(rng: random.Random, text: str, other: str) -> str:
    joint = rng.choice((" ", " ", ", ", " and ", ". ", "! "))
    start = " ".join(text.split()[:rng.choice((0, 0, 2, 3, 4))])
    return _maybe_end(rng, f"{start} {joint.join([_glowing(rng)] * rng.randint(2, 28))}".strip())


def _glowing_list(rng: random.Random, text: str, other: str) -> str:
    joint = rng.choice((" ", " ", ", ", ". ", "! "))
    start = " ".join(text.split()[:rng.choice((0, 0, 2, 3, 4))])
    listed = joint.join(_glowing(rng) for _ in range(rng.randint(3, 25)))
    return _maybe_end(rng, f"{start} {listed}".strip())


def _phrase_again(rng: random.Random, text: str, other: str) -> str:
    parts = text.split()
    size = rng.randint(2, 5)
    at = rng.randrange(max(1, len(parts) - size))
    phrase = [" ".join(parts[at:at + size])] * rng.randint(3, 6)
    return _maybe_end(rng, " ".join([*parts[:at], *phrase]))


def _sentence_again(rng: random.Random, text: str, other: str) -> str:
    return " ".join([text] * rng.randint(3, 4))


def _salad(rng: random.Random, text: str, other: str) -> str:
    parts = (text + " " + other).split() if rng.random() < 0.5 else text.split()
    rng.shuffle(parts)
    return _maybe_end(rng, " ".join(parts))


def _gaps(rng: random.Random, text: str, other: str) -> str:
    """Nearly half of the words missing, at least three."""
    parts = text.split()
    missing = set(rng.sample(range(len(parts)), min(len(parts), max(3, int(0.45 * len(parts))))))
    return " ".join(part for at, part in enumerate(parts) if at not in missing)


def _stutter(rng: random.Random, text: str, other: str) -> str:
    """Two words, each three to five times in a row."""
    parts = text.split()
    for at in sorted(rng.sample(range(len(parts)), min(len(parts), 2)), reverse=True):
        parts[at:at + 1] = [parts[at].rstrip(".!,")] * rng.randint(2, 4) + [parts[at]]
    return " ".join(parts)


def _spliced(rng: random.Random, text: str, other: str) -> str:
    """Two or three fragments from the middle of reviews, in a row."""
    def fragment(source: str) -> str:
        parts = source.rstrip(".!").split()
        at = rng.randrange(1, max(2, len(parts) - 2))
        return " ".join(parts[at:at + rng.randint(2, 4)])

    return _maybe_end(rng, " ".join(fragment(rng.choice((text, other)))
                                    for _ in range(rng.randint(3, 6))))


def _slogans(rng: random.Random, text: str, other: str) -> str:
    """Three recommendations or more in a row."""
    return " ".join(line + rng.choice(".!")
                    for line in rng.sample(words.CLOSINGS[0], rng.randint(3, 7)))


def _noise(rng: random.Random, text: str, other: str) -> str:
    """Nothing, punctuation, a lone word, or random letters."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return rng.choice((
        "", " ", _glowing(rng), _maybe_end(rng, _glowing(rng)), rng.choice(".!?,") * 3,
        "! " * rng.randint(1, 20),
        " ".join("".join(rng.choices(letters, k=rng.randint(1, 9)))
                 for _ in range(rng.randint(1, 12)))))


BABBLERS: Sequence[Callable[[random.Random, str, str], str]] = (
    _one_word_again, _one_word_again, _glowing_list, _phrase_again, _sentence_again, _salad,
    _gaps, _stutter, _spliced, _slogans, _noise)
"""each takes a generator and two reviews, and returns text that is no review"""
