"""Built-ins by name, and what the shipped models can do."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppocli.builtin.names import list_builtins, resolve_builtin
from ppocli.errors import InputError

sys.path.append(str(Path(__file__).resolve().parents[2]))  # tools/ is in no wheel

from tools.assets.corpus import make_reviews


@pytest.mark.parametrize("name", list_builtins())
def test_every_name_resolves(name):
    path = resolve_builtin(f"builtin:{name}")
    assert path == resolve_builtin(name)
    if name.endswith("prompts") or name.startswith(("pipeline", "arithmetic")):
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


def test_the_classifier_tells_held_out_reviews_apart():
    folder = resolve_builtin("builtin:reviews-sentiment")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}
    reviews = make_reviews(200, 999)
    with torch.no_grad():
        scores = model(**tokenizer([review.text for review in reviews], padding=True,
                                   truncation=True, return_tensors="pt")).logits.softmax(-1)[:, 1]
    means = {label: scores[[review.label == label for review in reviews]].mean()
             for label in ("positive", "negative", "mixed")}
    assert means["positive"] > 0.95
    assert means["negative"] < 0.05
    assert 0.4 < means["mixed"] < 0.55
