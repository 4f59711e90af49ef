"""How the built-in models and prompts are made: by their seeds alone, and as they are shipped."""

import json
import random
import re
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch

from ppocli.builtin.names import resolve_builtin
from ppocli.rewards import randomwalks
from ppocli.rewards.randomwalks import GOAL, MAX_LENGTH, SUCCESSORS
from ppocli.rewards.reward_model import TextClassifier
from ppocli.rewards.rules import Answer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # tools/ is in no wheel

from tools.assets import build, preferences
from tools.assets.corpus import make_reviews, verdict
from tools.assets.episodes import PlayerSettings, build_calculator, build_guess_number
from tools.assets.randomwalks import WalkModelSettings, WalkSettings, build_randomwalks, draw_walks
from tools.assets.reviews import ReviewsSettings, build_reviews
from tools.assets.sentiment import SentimentSettings, build_sentiment


@pytest.mark.slow
@pytest.mark.parametrize(("build_it", "settings"), [
    (build_reviews, ReviewsSettings(reviews=200, vocab_size=400, layers=1, width=16, heads=2,
                                    epochs=1)),
    (build_sentiment, SentimentSettings(examples=200, vocab_size=300, layers=1, width=16, heads=2,
                                        epochs=1)),
    (build_randomwalks, WalkModelSettings(WalkSettings(walks=60), layers=1, width=24, heads=2,
                                          epochs=2)),
    (build_guess_number, PlayerSettings(episodes=60, layers=1, width=16, heads=2, epochs=1)),
    (build_calculator, PlayerSettings(episodes=60, layers=1, width=16, heads=2, epochs=1)),
])
def test_builders_are_deterministic_and_leave_the_global_state_alone(tmp_path, build_it, settings):
    torch.manual_seed(1)
    before, python = torch.random.get_rng_state(), random.getstate()
    build_it(tmp_path / "one", settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.getstate() == python
    torch.manual_seed(2)
    build_it(tmp_path / "two", settings)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_labels_agree_with_the_sentences():
    for review in make_reviews(2000, 7):
        wanted = {"positive": 1.0, "negative": 0.0, "mixed": 0.5}[review.label]
        assert verdict(review.sentences) == wanted, review.text


def test_the_graph_and_the_walks_are_those_of_trlx():
    graph, walks = draw_walks(WalkSettings())
    assert graph == SUCCESSORS
    assert set(randomwalks.SHORTEST) == set(graph)  # every start can earn a reward
    # first walks that trlX's generator draws for the seed of its recipe, 1000
    assert walks[:5] == ["sda", "fda", "ebjnbdtkna", "jnbjna", "lbusdtkbui"]
    assert len(walks) == 1000
    for walk in walks:
        assert len(walk) == MAX_LENGTH or walk[-1] == GOAL
        assert GOAL not in walk[:-1]
        assert all(after in graph[node] for node, after in pairwise(walk))


def test_shipped_prompts_are_what_the_command_writes(tmp_path):
    assert build.main(["prompts", "--out", str(tmp_path)]) == 0
    for name in ("reviews-prompts", "reviews-eval-prompts", "randomwalks-prompts"):
        shipped = resolve_builtin(name)
        assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes()
    prompts = {name: resolve_builtin(name).read_text().splitlines()
               for name in ("reviews-prompts", "reviews-eval-prompts")}
    assert [len(lines) for lines in prompts.values()] == [192, 64]
    assert not set.intersection(*map(set, prompts.values()))


def test_arithmetic_is_right_and_what_the_command_writes(tmp_path):
    assert build.main(["arithmetic", "--out", str(tmp_path)]) == 0
    for name in ("arithmetic", "arithmetic-eval", "calculator-prompts", "calculator-eval-prompts"):
        shipped = resolve_builtin(name)
        assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes()
    seen: dict[str, set] = {}
    for name, count in (("arithmetic", 260), ("arithmetic-eval", 64)):
        rows = lines_of(name)
        pairs = [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in rows]
        assert [row["answer"].rpartition("\n#### ")[2] for row in rows] == [
            str(a + b) for a, b in pairs]
        assert len(seen.setdefault(name, set(pairs))) == len(rows) == count
        answers = [row["answer"] for row in rows]
        assert Answer(after="####")(answers, lambda *_: None, answer=answers) == [1.0] * count
    assert not set.intersection(*seen.values())
    products = [lines_of(name) for name in ("calculator-prompts", "calculator-eval-prompts")]
    assert [len(rows) for rows in products] == [512, 128]
    for row in chain(*products):
        left, right = re.fullmatch(r"([1-9]\d)\*([1-9]\d)=", row["prompt"]).groups()
        assert row["answer"] == str(int(left) * int(right))
    assert len({row["prompt"] for row in chain(*products)}) == 640


def lines_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in resolve_builtin(name).read_text().splitlines()]


def test_reviews_to_learn_from_are_what_the_script_makes():
    made = preferences.demonstrations()
    assert made == (lines_of("pipeline-sft"), lines_of("pipeline-sft-eval"))
    train, held_back = ({row["prompt"] for row in rows} for rows in made)
    assert not train & held_back
    assert not {row["prompt"] for row in lines_of("pipeline-pairs")} & held_back


@pytest.mark.slow
def test_pairs_are_what_the_script_makes_and_a_tenth_of_them_is_wrong():
    shipped = [lines_of(name) for name in ("pipeline-pairs", "pipeline-pairs-eval")]
    assert list(preferences.preferences()) == shipped
    judge = TextClassifier("builtin:reviews-sentiment", device="cpu")
    for rows in shipped:
        chosen, rejected = (judge(texts, texts, texts) for texts in (
            [row[key] for row in rows] for key in ("chosen", "rejected")))
        gaps = [a - b for a, b in zip(chosen, rejected, strict=True)]
        assert sum(gap < 0 for gap in gaps) == preferences.NOISE * len(rows)
        assert min(map(abs, gaps)) >= preferences.CLEAR
