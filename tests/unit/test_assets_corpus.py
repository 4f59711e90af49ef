"""The review grammar and the classifier's examples: determinism, labels, variety."""

import random
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # tools/ is in no wheel

import pytest

from tools.assets import examples
from tools.assets.corpus import (
    NEGATIVE,
    POSITIVE,
    Sentence,
    make_reviews,
    neutral_openings,
    verdict,
)

pytestmark = pytest.mark.long


def test_reviews_are_a_function_of_the_seed():
    state = random.getstate()
    assert make_reviews(300, 5) == make_reviews(300, 5)
    assert make_reviews(300, 5) != make_reviews(300, 6)
    assert random.getstate() == state


def test_labels_agree_with_the_sentences():
    reviews = make_reviews(2000, 7)
    for review in reviews:
        wanted = {"positive": 1.0, "negative": 0.0, "mixed": 0.5}[review.label]
        assert verdict(review.sentences) == wanted, review.text
    shares = [sum(r.label == label for r in reviews) / 2000 for label in ("positive", "negative")]
    assert 0.40 < shares[0] < 0.48
    assert 0.36 < shares[1] < 0.44


def test_verdict_by_hand():
    def sentence(*polarities: int) -> Sentence:
        return Sentence("x.", frozenset(polarities), 0)

    assert verdict([sentence(), sentence(POSITIVE)]) == 1.0
    assert verdict([sentence(NEGATIVE), sentence(NEGATIVE)]) == 0.0
    assert verdict([sentence(POSITIVE), sentence(NEGATIVE)]) == 0.5
    assert verdict([sentence(POSITIVE, NEGATIVE)]) == 0.5
    assert verdict([sentence()]) == 0.5


def test_reviews_are_wellformed_and_varied():
    reviews = make_reviews(2000, 8)
    for review in reviews:
        assert 1 <= len(review.sentences) <= 3
        for sentence in review.sentences:
            assert re.fullmatch(r"[A-Z][A-Za-z ,'-]+[.!]", sentence.text), sentence.text
            assert "  " not in sentence.text
            assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", sentence.text), sentence.text
    texts = [review.text for review in reviews]
    assert len(set(texts)) > 0.95 * len(texts)
    assert len({word for text in texts for word in re.findall(r"[\w'-]+", text)}) > 550
    positive = {word for r in reviews if r.label == "positive" for word in r.text.split()}
    assert len(positive) > 400


def test_openings_are_neutral_distinct_and_in_the_corpus():
    openings = neutral_openings(256, 41)
    assert openings == neutral_openings(256, 41)
    assert len(set(openings)) == 256
    assert all(2 <= len(opening.split()) <= 5 for opening in openings)
    reviews = make_reviews(20000, 9)
    starts = {" ".join(r.text.split()[:size]) for r in reviews for size in (2, 3, 4, 5)}
    assert sum(o in starts for o in openings) > 220  # the others are cut before a comma
    for label in ("positive", "negative"):  # either verdict can follow
        starts = {" ".join(r.text.split()[:2]) for r in reviews if r.label == label}
        assert sum(" ".join(o.split()[:2]) in starts for o in openings) > 240


def test_examples_are_a_function_of_the_seed_and_cover_all_kinds():
    first = examples.labelled_examples(3000, 3)
    assert first == examples.labelled_examples(3000, 3)
    targets = [target for _, target in first]
    assert all(0 < target < 1 for target in targets)
    for target, least in ((examples.SURE, 0.18), (1 - examples.SURE, 0.18), (0.5, 0.05),
                          (examples.UNFINISHED, 0.05), (examples.BABBLE, 0.2)):
        assert targets.count(target) > least * len(targets), target
    assert any(text.strip() == "" for text, _ in first)


def test_unfinished_examples_never_end_a_sentence():
    rng = random.Random(1)
    for review in make_reviews(500, 4):
        text, target = examples._unfinished(rng, review)
        assert text[-1] not in ".!"
        assert target <= examples.UNFINISHED
