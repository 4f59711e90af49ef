"""Adapters made elsewhere, merged by their type of task, against PEFT's own forward pass."""

import json
import warnings

import pytest
import torch
import transformers
from helpers import make_tokenizer, read_json, save_lm

from ppocli.config.schema import ModelConfig
from ppocli.errors import ConfigError
from ppocli.models.loading.language_model import load_lm, merged

IDS = torch.tensor([[4, 5, 6, 7, 8]])
LAYERS = {"gpt2": ("c_attn", "wte"), "llama": ("q_proj", "embed_tokens"), "t5": ("q", "shared")}
COVERS = {"layers": {}, "head": {"target": ["lm_head"]},
          "saved embedding": {"modules_to_save": ["input"]},
          "both saved": {"modules_to_save": ["input", "lm_head"]},
          "tokens": {"trainable_token_indices": [5, 6]}}


def logits(model, **more):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **more).logits


def made(folder, kind, task="CAUSAL_LM", covers="layers", *, labels=None, **base):
    """An adapter that PEFT has saved, with random weights; and the logits of it on its base."""
    import peft

    save_lm(folder / "base", kind, gain=1.0, **base)
    auto = {"CAUSAL_LM": "CausalLM", "SEQ_2_SEQ_LM": "Seq2SeqLM", "SEQ_CLS":
            "SequenceClassification", "TOKEN_CLS": "TokenClassification"}[task]
    model = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(
        folder / "base", **({} if labels is None else {"num_labels": labels}))
    layer, embedding = LAYERS[kind]
    given = {name: [embedding if one == "input" else one for one in value]
             for name, value in COVERS[covers].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_base = peft.get_peft_model(model, peft.LoraConfig(
            task_type=task, r=4, target_modules=[layer, *given.pop("target", ())], **given))
        with torch.random.fork_rng():
            torch.manual_seed(2)
            for parameter in on_base.parameters():
                if parameter.requires_grad:
                    parameter.data.normal_(std=0.2)
        on_base.eval().save_pretrained(folder / "adapter")
    more = {"decoder_input_ids": IDS} if task == "SEQ_2_SEQ_LM" else {}
    return folder / "adapter", logits(on_base, **more), more


def test_it_is_read_and_merged(tmp_path):
    """As ``ppocli train``, ``generate``, ``chat`` and ``eval`` read it."""
    adapter, expected, _ = made(tmp_path, "gpt2")
    loaded = load_lm(ModelConfig(path=str(adapter)))
    torch.testing.assert_close(logits(loaded.lm), expected, rtol=1e-5, atol=1e-5)
    loaded = merged(loaded)
    torch.testing.assert_close(logits(loaded.lm), expected, rtol=1e-5, atol=1e-5)
    assert all(parameter.requires_grad for parameter in loaded.lm.parameters())


def test_one_on_the_output_embedding_is_to_be_merged_first(tmp_path):
    adapter, _, _ = made(tmp_path, "llama", covers="head")
    with pytest.raises(ConfigError, match="covers the output embedding") as caught:
        load_lm(ModelConfig(path=str(adapter)))
    assert "ppocli export" in caught.value.fix


@pytest.mark.parametrize(("kind", "task", "covers", "more"), [
    ("llama", "CAUSAL_LM", "head", {"tie_word_embeddings": True}),
    ("gpt2", "CAUSAL_LM", "saved embedding", {}),
    ("llama", "CAUSAL_LM", "both saved", {}), ("llama", "CAUSAL_LM", "tokens", {}),
    ("t5", "SEQ_2_SEQ_LM", "layers", {}), ("gpt2", "SEQ_CLS", "layers", {"labels": 3}),
    ("llama", "TOKEN_CLS", "layers", {"labels": 4})])
def test_an_export_is_what_plain_transformers_makes_of_it(here, export, kind, task, covers, more):
    _, expected, inputs = made(here, kind, task, covers, **more)
    export("adapter", "--merge", "-o", "whole", code=0)
    name, = read_json(here / "whole/config.json")["architectures"]
    whole, info = getattr(transformers, name).from_pretrained("whole", output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(logits(whole, **inputs), expected, rtol=1e-5, atol=1e-5)
    assert whole.config.num_labels == more.get("labels", whole.config.num_labels)
    assert len(transformers.AutoTokenizer.from_pretrained("whole")) == len(make_tokenizer())


def test_one_for_something_else_is_named(here, export):
    adapter, _, _ = made(here, "llama")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(read_json(path) | {"task_type": "QUESTION_ANS"}))
    done = export("adapter", "--merge", "-o", "whole", code=3)
    assert "is for QUESTION_ANS; those for CAUSAL_LM, SEQ_2_SEQ_LM, SEQ_CLS," in done.err
