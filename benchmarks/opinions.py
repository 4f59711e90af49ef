"""Sentences about restaurants from a grammar, and a score for each sentence of a whole review: the
reward of the world ``critiques``."""

import random
from collections.abc import Sequence

SUBJECTS = ("The soup", "The waiter", "My steak", "Our table", "The bread", "That pasta",
            "The dessert", "The wine list", "Breakfast", "The patio", "Their coffee", "The bill",
            "The chef", "Lunch", "The salad", "The fish", "Dinner for two", "The kitchen",
            "Her omelette", "The terrace", "The music", "His curry", "The menu", "The staff")
GOOD = ("delicious", "friendly", "fresh", "cozy", "generous", "perfect", "charming", "superb")
BAD = ("cold", "rude", "stale", "noisy", "overpriced", "bland", "dirty", "greasy")
NEITHER = ("large", "Italian", "crowded", "simple", "new", "local", "spicy", "familiar")
VERBS = ("was", "seemed", "turned out", "felt")
ADVERBS = ("", "really ", "a little ", "quite ", "rather ", "truly ")
ENDS = ("", " tonight", " as always", " for the price", " last Sunday", " in the end")
SCORE = 0.1
"""of a sentence that praises or blames"""


def opinion(rng: random.Random, subject: str) -> tuple[str, int]:
    """A sentence, and whether it has more praise than blame."""
    words = [rng.choice(rng.choice((GOOD, BAD, NEITHER))) for _ in range(rng.randint(1, 3))]
    text = (" and " if rng.random() < 0.6 else ", ").join(
        rng.choice(ADVERBS) + word for word in words)
    score = sum((word in GOOD) - (word in BAD) for word in words) or rng.choice((-1, 1))
    return f"{subject} {rng.choice(VERBS)} {text}{rng.choice(ENDS)}.", int(score > 0)


def review(rng: random.Random, sentences: int) -> list[str]:
    """Sentences with one adjective each. The mood of a sentence, praise or blame, is that of the
    one before in five of six; a third of the sentences are neither."""
    mood, written = rng.choice((GOOD, BAD)), []
    for _ in range(sentences):
        if rng.random() < 1 / 6:
            mood = BAD if mood is GOOD else GOOD
        kind = NEITHER if rng.random() < 1 / 3 else mood
        written.append(f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(kind)}.")
    return written


def _subject(sentence: str) -> str | None:
    return next((one for one in SUBJECTS if sentence.strip().startswith(one + " ")), None)


def per_sentence(steps: Sequence[Sequence[str]], prompts: Sequence[str]) -> list[list[float]]:
    """0.1 for each sentence that praises a subject which neither the prompt nor an earlier sentence
    has, -0.1 for one that blames it; 0 for all others."""
    scores = []
    for prompt, sentences in zip(prompts, steps, strict=True):
        seen, found = {_subject(prompt), None}, []
        for sentence in sentences:
            subject, words = _subject(sentence), sentence.strip().removesuffix(".").split()
            balance = sum((word in GOOD) - (word in BAD) for word in words)
            counts = sentence.endswith(".") and subject not in seen
            found.append(SCORE * ((balance > 0) - (balance < 0)) if counts else 0.0)
            seen.add(subject)
        scores.append(found)
    return scores
