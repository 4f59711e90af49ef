"""A seeded grammar of short film reviews: the corpus behind the embedded models.

A review has one to three sentences and a label. Every sentence knows its own polarity, and how
many of its characters come before the first word that gives the polarity away; so a prefix of a
review can be labelled, and neutral openings (prompts) can be cut. Everything is a function of the
seed: no global random state, no clock, no files.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.assets import vocabulary as words

POSITIVE, NEUTRAL, NEGATIVE = 1, 0, -1
LABEL_SHARES = {"positive": 0.44, "negative": 0.40, "mixed": 0.16}
"""share of each label in the corpus; the language model's samples inherit it"""

_SLOT = re.compile(r"\{(\w+)\}")

# {subj}/{was} agree in number and share a group of adjectives; {obj} is like {subj} with no verb
# of its own. Polar slots: adj adj2 a_adj unadj pred liked reacted amount with_what notable.
_CLAUSES = (
    ("{subj} {was} {adj}", 5),
    ("{subj} {was} {very} {adj}", 5),
    ("{subj} {was} {adj} and {adj2}", 4),
    ("{subj} {was} {never} {unadj}", 3),
    ("{subj} {pred}", 7),
    ("{subj} had {amount} {quality}", 5),
    ("{subj} seemed {adj}", 2),
    ("I {liked} {obj}", 3),
    ("{person} and I {liked} {obj}", 2),
    ("I found {obj} {adj}", 4),
    ("I thought that {subj} {was} {adj}", 3),
    ("{person} said that {subj} {was} {adj}", 5),
    ("{person} told me that {subj} {was} {adj}", 3),
    ("{critics} {liked} {obj}", 3),
    ("{critics} {reacted} {when_what}", 3),
    ("we {reacted} {when_what}", 3),
    ("there was something {notable} about {obj}", 3),
    ("it was {a_adj} {genre}", 4),
    ("it was {a_adj} {genre} about {hero}", 4),
    ("this was {a_adj} {genre}", 3),
    ("the director handled {obj} with {with_what}", 3),
    ("{person} called it {a_adj} {genre}", 2),
    ("watching it {place} was {adj}", 2),
)
_NEUTRAL = (
    "I watched this with {person} {time}",
    "I saw this {place} {time}",
    "we saw it {place} {time}",
    "we watched it {place} with {person}",
    "{person} took me to see it {time}",
    "{person} chose this {genre} {time}",
    "the story is set in {setting}",
    "the film takes place in {setting}",
    "the {genre} follows {hero} {deed}",
    "it is about {hero} {deed}",
    "this is a story about {hero} {deed}",
    "I finally watched this {genre} {time}",
)
_SAME = (", and ", " and ", " while ", ", so I would say that ")
_OPPOSITE = (", but ", ", yet ", ", although ", " even though ")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One finished sentence, punctuation included."""

    text: str
    polarities: frozenset[int]
    """polarity of each polar clause: {}, {1}, {-1} or {1, -1}"""
    neutral_chars: int
    """how many leading characters give no polarity away"""


@dataclass(frozen=True, slots=True)
class Review:
    """A short review. ``label`` is ``positive``, ``negative`` or ``mixed``."""

    sentences: tuple[Sentence, ...]
    label: str

    @property
    def text(self) -> str:
        """The review as one line of text."""
        return " ".join(sentence.text for sentence in self.sentences)


def verdict(sentences: Sequence[Sentence]) -> float:
    """1.0 for all-positive sentences, 0.0 for all-negative ones, 0.5 for mixed or neutral ones."""
    seen = frozenset().union(*(sentence.polarities for sentence in sentences))
    return {frozenset({POSITIVE}): 1.0, frozenset({NEGATIVE}): 0.0}.get(seen, 0.5)


def make_reviews(count: int, seed: int) -> list[Review]:
    """``count`` reviews, the same for the same seed on every machine."""
    rng = random.Random(seed)
    labels = list(LABEL_SHARES)
    shares = list(LABEL_SHARES.values())
    return [_review(rng, rng.choices(labels, shares)[0]) for _ in range(count)]


def neutral_openings(count: int, seed: int) -> list[str]:
    """``count`` distinct openings of 2 to 5 words that give no polarity away, for use as prompts.

    They are prefixes of corpus reviews, so a model of the corpus goes on from them naturally.
    """
    rng = random.Random(seed)
    labels = list(LABEL_SHARES)
    found: dict[str, None] = {}
    while len(found) < count:
        first = _review(rng, rng.choice(labels)).sentences[0]
        whole_words = first.text[:first.neutral_chars].rpartition(" ")[0]
        parts = whole_words.split()
        if len(parts) < 2:
            continue
        opening = " ".join(parts[:rng.randint(2, min(5, len(parts)))]).rstrip(",")
        if " " in opening:
            found[opening] = None
    return list(found)


def _review(rng: random.Random, label: str) -> Review:
    used: set[str] = set()
    length = rng.choices((1, 2, 3), (0.4, 0.42, 0.18))[0]
    if label == "mixed":
        plan = _mixed_plan(rng, length)
    else:
        polarity = POSITIVE if label == "positive" else NEGATIVE
        plan = [(polarity,)] * length
        if length > 1 and rng.random() < 0.6:
            plan[0 if rng.random() < 0.75 else 1] = ()
    sentences = []
    for place, polarities in enumerate(plan):
        closes = 0 < place == len(plan) - 1 and len(polarities) == 1 and rng.random() < 0.4
        sentences.append(_closing(rng, polarities[0]) if closes
                         else _sentence(rng, polarities, used))
    return Review(tuple(sentences), label)


def _mixed_plan(rng: random.Random, length: int) -> list[tuple[int, ...]]:
    first = rng.choice((POSITIVE, NEGATIVE))
    if length == 1 or rng.random() < 0.4:
        plan: list[tuple[int, ...]] = [(first, -first)]
        return [(), *plan] if length > 1 else plan
    plan = [(first,), (-first,)]
    return [(), *plan] if length == 3 else plan


def _sentence(rng: random.Random, polarities: tuple[int, ...], used: set[str]) -> Sentence:
    """A neutral sentence for (), one or two like clauses for (p,), a contrast for (p, -p)."""
    if not polarities:
        text, _ = _fill(rng, rng.choice(_NEUTRAL), NEUTRAL, used)
        return Sentence(_capital(text) + ".", frozenset(), len(text))
    text, neutral = _clause(rng, polarities[0], used)
    if len(polarities) == 2:
        text += rng.choice(_OPPOSITE) + _clause(rng, polarities[1], used)[0]
    elif rng.random() < 0.25:
        text += rng.choice(_SAME) + _clause(rng, polarities[0], used)[0]
    if rng.random() < 0.15:
        lead = rng.choice(words.LEAD_INS) + ", "
        text, neutral = lead + text, neutral + len(lead)
    end = "!" if len(polarities) == 1 and rng.random() < 0.12 else "."
    return Sentence(_capital(text) + end, frozenset(polarities), neutral)


def _closing(rng: random.Random, polarity: int) -> Sentence:
    end = "!" if rng.random() < 0.2 else "."
    return Sentence(rng.choice(_side(words.CLOSINGS, polarity)) + end, frozenset({polarity}), 0)


def _clause(rng: random.Random, polarity: int, used: set[str]) -> tuple[str, int]:
    templates, weights = zip(*_CLAUSES, strict=True)
    return _fill(rng, rng.choices(templates, weights)[0], polarity, used)


def _fill(rng: random.Random, template: str, polarity: int,
          used: set[str]) -> tuple[str, int]:
    """The template with its slots filled, and the length of the part before any polar word."""
    group, subject, plural = _subject(rng, used)
    if "{subj}" not in template and "{obj}" not in template:
        group = words.ADJ_STORY
    if "{place} was {adj}" in template:
        group = words.ADJ_STORY

    def adjective(side: int) -> str:
        pool = group if rng.random() < 0.5 else words.ADJ_ANY
        return _fresh(rng, _side(pool, side), used)

    text, neutral = "", -1
    for index, part in enumerate(_SLOT.split(template)):
        if index % 2 == 0:
            text += part
            continue
        if neutral < 0 and part in _POLAR_SLOTS:
            neutral = len(text)
        if part in ("subj", "obj"):
            text += subject
        elif part == "was":
            text += "were" if plural else "was"
        elif part in ("adj", "adj2"):
            text += adjective(polarity)
        elif part == "unadj":
            text += adjective(-polarity)
        elif part == "a_adj":
            word = adjective(polarity)
            text += ("an " if word[0] in "aeiou" else "a ") + word
        else:
            text += _fresh(rng, _pool(part, polarity), used)
    return text, len(text) if neutral < 0 else neutral


_POLAR_SLOTS = frozenset({"adj", "adj2", "a_adj", "never", "unadj", "pred", "liked", "reacted",
                          "amount", "with_what", "notable", "very"})
_NEUTRAL_POOLS = {
    "very": words.INTENSIFIERS, "never": words.NOT_WORDS, "quality": words.QUALITIES,
    "person": words.PERSONS, "critics": words.CRITICS, "genre": words.GENRES,
    "hero": words.HEROES, "deed": words.DEEDS, "time": words.TIMES, "place": words.PLACES,
    "setting": words.SETTINGS,
    "when_what": ("all the way through", "at every scene", "from the first minute",
                  "during the credits", "until the very end", "more than once"),
}
_POLAR_POOLS = {
    "pred": words.PREDICATES, "liked": words.LIKED, "reacted": words.REACTED,
    "amount": words.QUALITY_AMOUNT, "with_what": words.HANDLED_WITH, "notable": words.NOTABLE,
}


def _pool(slot: str, polarity: int) -> tuple[str, ...]:
    if slot in _POLAR_POOLS:
        return _side(_POLAR_POOLS[slot], polarity)
    return _NEUTRAL_POOLS[slot]


def _side(pair: words.Pair, polarity: int) -> tuple[str, ...]:
    return pair[0] if polarity == POSITIVE else pair[1]


def _subject(rng: random.Random, used: set[str]) -> tuple[words.Pair, str, bool]:
    (singular, plural), adjectives = rng.choices(
        ((words.STORY, words.ADJ_STORY), (words.PEOPLE, words.ADJ_PEOPLE),
         (words.CRAFT, words.ADJ_CRAFT)), (0.45, 0.3, 0.25))[0]
    many = rng.random() < 0.35
    return adjectives, _fresh(rng, plural if many else singular, used), many


def _fresh(rng: random.Random, pool: Sequence[str], used: set[str]) -> str:
    """A word of the pool that this review hasn't used, while there is one."""
    word = rng.choice([word for word in pool if word not in used] or list(pool))
    used.add(word)
    return word


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
