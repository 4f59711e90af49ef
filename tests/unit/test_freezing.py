"""What is frozen where only top layers train: all that a pass uses before the first of them."""


import pytest
import torch
from helpers import make_lm

from ppocli.config.schema import ModelConfig, TrainConfig
from ppocli.errors import InputError
from ppocli.models.trunk import freeze_lower_layers, layer_stack, trained_split
from ppocli.training.build_models import freeze

NORMS = {"gpt2": "transformer.ln_f", "opt": "model.decoder.final_layer_norm",
         "bloom": "transformer.ln_f", "llama": "model.norm", "bart": None,
         "t5": "decoder.final_layer_norm"}
BEFORE = {
    "gpt2": {"transformer.wte", "transformer.wpe"},
    "opt": {"model.decoder.embed_tokens", "model.decoder.embed_positions",
            "model.decoder.project_in"},
    "bloom": {"transformer.word_embeddings", "transformer.word_embeddings_layernorm"},
    "llama": {"model.embed_tokens"},
    "bart": {"model.shared", "model.encoder", "model.decoder.embed_positions",
             "model.decoder.layernorm_embedding"},
    "t5": {"shared", "encoder"}}
"""modules that run before the first layer, by the libraries' own names"""
AFTER = {"opt": {"model.decoder.project_out"}, "llama": {"lm_head"}}
"""modules with weights of their own that run after the last layer, beside the norm"""
SHAPES = {"opt": {"word_embed_proj_dim": 16, "do_layer_norm_before": True},
          "llama": {"tie_word_embeddings": False}}


def made(kind, device="cpu"):
    with torch.device(device):
        lm = make_lm(kind, **SHAPES.get(kind, {}))
        lm.tie_weights()
    return lm.eval()


@pytest.mark.parametrize(("kind", "trained", "device"), [
    *((kind, 1, "cpu") for kind in BEFORE), ("gpt2", 0, "cpu"), ("gpt2", 2, "cpu"),
    ("gpt2", -1, "cpu"), ("bart", 1, "meta"), ("opt", 0, "meta")])
def test_what_runs_before_the_first_trained_layer_is_frozen(kind, trained, device):
    lm = made(kind, device)
    freeze_lower_layers(lm, trained)
    stack = layer_stack(lm)
    prefix = next(name for name, module in lm.named_modules() if module is stack)
    frozen = BEFORE[kind] | {f"{prefix}.{i}" for i in range(2 - trained)}
    wanted = set()
    if trained in (0, 1):  # 2 is all of them: the embeddings train too
        wanted = {name for name, _ in lm.named_parameters()
                  if any(f"{name}.".startswith(f"{part}.") for part in frozen)}
        assert all(any(name.startswith(part) for name in wanted) for part in frozen)
    assert {name for name, p in lm.named_parameters() if not p.requires_grad} == wanted
    after = AFTER.get(kind, set()) | ({NORMS[kind]} if NORMS[kind] else set())
    assert all(p.requires_grad for part in after for p in lm.get_submodule(part).parameters())


def test_passes_split_above_the_frozen_layers_only_where_nothing_before_them_trains():
    lm = made("gpt2")
    freeze_lower_layers(lm, 1)
    assert trained_split(lm).layer == 1
    lm.transformer.wpe.requires_grad_(True)
    assert trained_split(lm) is None


def test_a_model_that_can_not_recompute_its_layers_names_the_key(monkeypatch):
    lm = made("gpt2")
    monkeypatch.setattr(type(lm), "supports_gradient_checkpointing", False)
    cfg = TrainConfig(model=ModelConfig(path="x", gradient_checkpointing=True))
    with pytest.raises(InputError, match=r"does not support .* checkpointing") as refused:
        freeze(cfg, lm)
    assert refused.value.where == "model.gradient_checkpointing"
