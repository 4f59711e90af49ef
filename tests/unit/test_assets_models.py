"""Built-ins by name; what the review models can do, how they are rebuilt, what they weigh."""

import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from ppocli.builtin.names import list_builtins, resolve_builtin
from ppocli.errors import InputError

sys.path.append(str(Path(__file__).resolve().parents[2]))  # tools/ is in no wheel

from tools.assets import build, examples, fitting
from tools.assets.corpus import make_reviews
from tools.assets.reviews import ReviewsSettings, build_reviews
from tools.assets.sentiment import SentimentSettings, build_sentiment

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def policy():
    folder = resolve_builtin("builtin:reviews")
    return (AutoModelForCausalLM.from_pretrained(folder).eval(),
            AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def positive():
    """A function from texts to the classifier's P(POSITIVE)."""
    folder = resolve_builtin("builtin:reviews-sentiment")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}

    @torch.no_grad()
    def scores(texts: list[str]) -> torch.Tensor:
        parts = []
        for at in range(0, len(texts), 128):
            batch = tokenizer(texts[at:at + 128], padding=True, truncation=True,
                              return_tensors="pt")
            parts.append(model(**batch).logits.softmax(-1)[:, model.config.label2id["POSITIVE"]])
        return torch.cat(parts)

    return scores


@torch.no_grad()
def continuations(policy, prompts: list[str], new_tokens: int = 32) -> list[str]:
    """Plain sampling at temperature 1 with a generator of its own."""
    model, tokenizer = policy
    generator = torch.Generator().manual_seed(4)
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(new_tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        token[done] = tokenizer.pad_token_id
        ids = torch.cat([ids, token], dim=1)
        mask = torch.cat([mask, (~done).long()[:, None]], dim=1)
        done |= token[:, 0] == tokenizer.eos_token_id
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", list_builtins())
def test_every_name_resolves(name):
    path = resolve_builtin(f"builtin:{name}")
    assert path == resolve_builtin(name)
    if name.endswith("prompts"):
        assert path.suffix == ".jsonl"
    else:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            file.name for file in path.iterdir()}


def test_unknown_name_suggests_and_lists():
    with pytest.raises(InputError) as caught:
        resolve_builtin("builtin:reveiws")
    assert "'reveiws'" in caught.value.what
    assert "did you mean builtin:reviews?" in (caught.value.fix or "")
    assert "builtin:randomwalks" in (caught.value.fix or "")
    with pytest.raises(InputError) as caught:
        resolve_builtin("builtin:")
    assert "did you mean" not in (caught.value.fix or "")


def test_shipped_files_stay_under_nine_megabytes():
    folder = resolve_builtin("reviews").parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 9_000_000


def test_models_load_as_float32(policy):
    model, tokenizer = policy
    assert model.dtype is torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_language_model_tokenizer_is_lossless(policy):
    tokenizer = policy[1]
    text = "The film was superb, and I enjoyed it. Zyzzyva, naïve 42 ☺"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt, response = "The film", " was superb."
    joined = tokenizer(prompt)["input_ids"] + tokenizer(response)["input_ids"]
    assert joined == tokenizer(prompt + response)["input_ids"]


@pytest.mark.long
def test_language_model_is_fluent_varied_and_balanced(policy, positive):
    prompts = [json.loads(line)["prompt"] for line in
               resolve_builtin("reviews-prompts").read_text().splitlines()][:128]
    texts = continuations(policy, prompts)
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    scores = positive(texts)
    assert 0.40 < scores.mean() < 0.58
    assert scores.std() > 0.25  # there is something to learn from
    assert sum(text[-1] in ".!" for text in texts) >= 0.9 * len(texts)
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    assert len(set(pairs)) > 0.4 * len(pairs)
    assert len(set(texts)) == len(texts)
    known = {word for review in make_reviews(20000, 99)
             for word in re.findall(r"[\w'-]+", review.text)}
    words = [word for text in texts for word in re.findall(r"[\w'-]+", text)]
    assert sum(word in known for word in words) > 0.98 * len(words)


def test_language_model_goes_on_from_bos_alone(policy):
    texts = continuations(policy, [policy[1].bos_token] * 16)
    assert sum(text[-1:] in (".", "!") and text[0].isupper() for text in texts) >= 13


def test_classifier_on_held_out_reviews(positive):
    reviews = make_reviews(800, 999)
    good = positive([review.text for review in reviews if review.label == "positive"])
    bad = positive([review.text for review in reviews if review.label == "negative"])
    mixed = positive([review.text for review in reviews if review.label == "mixed"])
    assert (good > 0.5).float().mean() > 0.97
    assert (bad < 0.5).float().mean() > 0.97
    assert good.mean() > 0.95
    assert bad.mean() < 0.05
    assert 0.4 < mixed.mean() < 0.55


def test_classifier_pays_little_for_what_is_no_review(positive):
    reviews = [review.text for review in make_reviews(250, 998) if review.label == "positive"]
    rng = random.Random(1)
    for babbler in dict.fromkeys(examples.BABBLERS):
        texts = [babbler(rng, text, rng.choice(reviews)) for text in reviews]
        assert positive(texts).mean() < 0.35, babbler.__name__
    for text in ("", "wonderful wonderful wonderful", "superb", "Great great great great great.",
                 "The film was wonderful wonderful wonderful wonderful.",
                 "superb lovely charming brilliant perfect"):
        assert positive([text]) < 0.2, text


def test_classifier_pays_little_for_unfinished_text(positive):
    rng = random.Random(2)
    reviews = [review for review in make_reviews(300, 997) if review.label == "positive"]
    assert positive([examples._unfinished(rng, review)[0] for review in reviews]).mean() < 0.4
    assert positive(["The film was wonderful."]) > 0.95
    assert positive(["The film was wonderful"]) < 0.5


@pytest.mark.parametrize(("build_it", "settings"), [
    (build_reviews, ReviewsSettings(reviews=200, vocab_size=400, layers=1, width=16, heads=2,
                                    epochs=1)),
    (build_sentiment, SentimentSettings(examples=200, vocab_size=300, layers=1, width=16, heads=2,
                                        epochs=1)),
])
def test_builders_are_deterministic_and_leave_the_global_state_alone(tmp_path, build_it, settings):
    torch.manual_seed(1)
    before, python = torch.random.get_rng_state(), random.getstate()
    first = build_it(tmp_path / "one", settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.getstate() == python
    torch.manual_seed(2)
    assert build_it(tmp_path / "two", settings) == first
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_length_batches_visit_every_row_once_an_epoch():
    lengths = [1 + (7 * row) % 13 for row in range(101)]
    batches = fitting.length_batches(lengths, 8, epochs=2, seed=3)
    assert sorted(row for batch in batches for row in batch) == sorted([*range(101)] * 2)
    assert batches == fitting.length_batches(lengths, 8, epochs=2, seed=3)
    assert batches != fitting.length_batches(lengths, 8, epochs=2, seed=4)


def test_shipped_prompts_are_what_the_command_writes(tmp_path):
    assert build.main(["prompts", "--out", str(tmp_path)]) == 0
    for name in ("reviews-prompts", "reviews-eval-prompts", "randomwalks-prompts"):
        shipped = resolve_builtin(name)
        assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes()
    prompts = {name: resolve_builtin(name).read_text().splitlines()
               for name in ("reviews-prompts", "reviews-eval-prompts")}
    assert [len(lines) for lines in prompts.values()] == [192, 64]
    assert not set.intersection(*map(set, prompts.values()))
