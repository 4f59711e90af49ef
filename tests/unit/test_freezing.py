"""What is frozen where only top layers train: all that a pass uses before the first of them."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from helpers import make_lm

from ppocli.config.schema import ModelConfig, TrainConfig
from ppocli.distributed.ranks import Ranks
from ppocli.errors import InputError
from ppocli.models import sharded_weights
from ppocli.models.policy import Policy
from ppocli.models.trunk import (
    SplitPoint,
    freeze_lower_layers,
    layer_stack,
    trained_split,
    without_hooks,
)
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


@pytest.mark.parametrize("there", [True, False], ids=["weights", "shapes"])
@pytest.mark.parametrize("trained", [0, 1, 2, -1])
@pytest.mark.parametrize("kind", BEFORE)
def test_what_runs_before_the_first_trained_layer_is_frozen(kind, trained, there):
    lm = made(kind, "cpu" if there else "meta")
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


def test_shapes_of_experts_tell_what_is_frozen():
    lm = make_lm("mixtral", num_key_value_heads=1, num_local_experts=2).to("meta")
    freeze_lower_layers(lm, 1)
    frozen = {name for name, p in lm.named_parameters() if not p.requires_grad}
    assert {name.partition("layers.")[2][:1] for name in frozen} == {"", "0"}


def test_layers_that_look_something_up_of_those_before_are_entered_nowhere():
    lm, kept = made("gpt2"), {}
    first, second = lm.transformer.h
    first.register_forward_hook(lambda *_: kept.update(keys=True))
    second.register_forward_pre_hook(lambda *_: kept.pop("keys") and None)
    freeze_lower_layers(lm, 1)
    with pytest.raises(ValueError, match="can't be entered at layer 1"):
        trained_split(lm)


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


def test_a_view_without_hooks_computes_the_same():
    lm, ids, ran = made("gpt2"), torch.arange(6)[None], []
    for module in lm.modules():
        module.register_forward_hook(lambda *_: ran.append(1))
    bare = without_hooks(lm)
    found = bare(input_ids=ids).logits
    assert not ran
    assert torch.equal(found, lm(input_ids=ids).logits)
    assert ran
    assert bare.lm_head.weight is bare.transformer.wte.weight is lm.transformer.wte.weight


def test_a_gathered_copy_holds_no_weights_once_it_was_used(monkeypatch):
    monkeypatch.setattr(sharded_weights, "gathered", lambda *_: nullcontext())
    lm = made("gpt2")
    with sharded_weights.gathered_policy(Policy(lm, None)) as whole:
        assert whole.lm.lm_head.weight.data_ptr() == lm.lm_head.weight.data_ptr()
    assert not any(map(torch.numel, whole.parameters()))
    assert all(map(torch.numel, lm.parameters()))


def test_ranks_hold_even_shares_of_optimizer_state():
    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(8)).sum().backward()
    optimizer.step()
    found = [sharded_weights.optimizer_slots(dict(module.named_parameters()), optimizer, 0,
                                             Ranks(rank=rank, world=2)) for rank in (0, 1)]
    assert len(found[0].keys() | found[1].keys()) == len(found[0]) + len(found[1]) == 8 * 3
    one, other = (sum(value.numel() for value in part.values()) for part in found)
    assert abs(one - other) <= 64
    for state in optimizer.state.values():  # as of one that was loaded
        for slot in sorted(state, reverse=True):
            state[slot] = state.pop(slot)
    again = sharded_weights.optimizer_slots(dict(module.named_parameters()), optimizer, 0,
                                            Ranks(rank=0, world=2))
    assert list(again) == list(found[0])


def test_states_that_a_pass_starts_from_are_free_as_soon_as_it_has_ended():
    lm, states = made("gpt2"), torch.zeros(1, 3, 32)
    gone = weakref.ref(states)
    gc.disable()
    try:
        SplitPoint(1, as_tuple=False).resumed(lm, states)
        del states
        assert gone() is None
    finally:
        gc.enable()
