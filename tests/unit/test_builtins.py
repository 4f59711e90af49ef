"""Built-ins by name, and what the shipped models can do."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

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


def test_the_language_model_and_its_tokenizer_fit():
    folder = resolve_builtin("builtin:reviews")
    model, tokenizer = (kind.from_pretrained(folder) for kind in (
        AutoModelForCausalLM, AutoTokenizer))
    assert model.dtype is torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3
    assert model.config.eos_token_id == tokenizer.eos_token_id
    text = "The film was superb, and I enjoyed it. Zyzzyva, naïve 42 ☺"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_classifier_tells_held_out_reviews_apart():
    folder = resolve_builtin("builtin:reviews-sentiment")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}
    reviews = make_reviews(400, 999)
    with torch.no_grad():
        scores = model(**tokenizer([review.text for review in reviews], padding=True,
                                   truncation=True, return_tensors="pt")).logits.softmax(-1)[:, 1]
    means = {label: scores[[review.label == label for review in reviews]].mean()
             for label in ("positive", "negative", "mixed")}
    assert means["positive"] > 0.95
    assert means["negative"] < 0.05
    assert 0.4 < means["mixed"] < 0.55


def test_the_tokenizer_of_walks_joins_letters():
    tokenizer = AutoTokenizer.from_pretrained(resolve_builtin("randomwalks"))
    ids = tokenizer("sda")["input_ids"]
    assert ids == [18, 3, 0]
    assert tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:]) == "sda"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "sda"
    assert tokenizer("z")["input_ids"] == [tokenizer.pad_token_id]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == tokenizer.bos_token_id
