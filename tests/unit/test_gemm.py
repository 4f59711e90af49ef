"""Linear layers through oneDNN: the same numbers, only where it is there, exact and suits the
processor."""

import copy
import json
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from helpers import environment as for_commands
from helpers import save_lm
from sessions import grads_of, session_of, small_config
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppocli.config.schema import HardwareConfig
from ppocli.distributed import onednn
from ppocli.errors import ConfigError
from ppocli.models import kernels as gemm
from ppocli.runs import environment

pytestmark = pytest.mark.skipif(onednn.probe() is not None, reason="no oneDNN here")


def conv1d(inputs, outputs):
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


def routed_copy(layer):
    holder = nn.ModuleList([copy.deepcopy(layer)])
    gemm.route_linears(holder)
    return holder[0]


@pytest.mark.parametrize("layer", [
    nn.Linear(24, 40), nn.Linear(40, 24, bias=False), conv1d(24, 40), conv1d(96, 8)],
    ids=["linear", "no bias", "conv1d", "narrow conv1d"])
@pytest.mark.parametrize("shape", [(7,), (2, 5), (0,)], ids=["rows", "batch", "nothing"])
def test_outputs_and_gradients_are_the_default_ones(layer, shape):
    plain, routed = copy.deepcopy(layer), routed_copy(layer)
    assert list(routed.state_dict()) == list(plain.state_dict())
    assert isinstance(routed, type(layer))
    assert type(copy.deepcopy(routed)) is type(routed) is not type(layer)
    inputs = layer.weight.shape[1] if isinstance(layer, nn.Linear) else layer.weight.shape[0]
    x = torch.randn(*shape, inputs)
    found = []
    for one in (plain, routed):
        given = x.clone().requires_grad_()
        out = one(given)
        out.square().sum().backward()
        found.append([out, given.grad, *(p.grad for p in one.parameters())])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.stride() == theirs.stride() or not ours.numel()


def nodes_of(out):
    """All steps of the backward pass from an output."""
    found = [out.grad_fn]
    for node in found:
        found += [parent for parent, _ in node.next_functions if parent is not None]
    return found


def saved_of(out):
    """Where the tensors lie that autograd keeps for them."""
    return {t.data_ptr() for node in nodes_of(out) for t in getattr(node, "saved_tensors", ())
            if t is not None}


STRIDES = {
    "transposed": lambda: torch.randn(24, 7).t(),
    "every other": lambda: torch.randn(14, 48)[::2, ::2],
    "one row for all": lambda: torch.randn(1, 24).expand(5, 24),
    "swapped": lambda: torch.randn(3, 4, 24).transpose(0, 1),
    "part of rows": lambda: torch.randn(4, 9, 24)[:, 2:5], "vector": lambda: torch.randn(24)}


@pytest.mark.parametrize("gradient", ["one number", "transposed"])
@pytest.mark.parametrize("strides", STRIDES)
def test_inputs_and_gradients_may_lie_anyhow_in_memory(strides, gradient):
    layer = nn.Linear(24, 40)
    routed = routed_copy(layer)
    x = STRIDES[strides]()
    found = []
    for one in (layer, routed):
        given = x.detach().requires_grad_()
        assert given.stride() == x.stride()
        out = one(given)
        torch.manual_seed(0)
        out.backward(torch.ones(()).expand(out.shape) if gradient == "one number" else
                     torch.randn(out.shape[::-1]).permute(*range(out.dim() - 1, -1, -1)))
        found.append([out, given.grad, *(p.grad for p in one.parameters())])
    assert ["_OneDnnLinear" in str(nodes_of(out)) for out, *_ in found] == [False, True]
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Linear(24, 40), conv1d(24, 40)], ids=["linear", "conv1d"])
def test_a_frozen_weight_gets_no_gradient_and_its_input_is_not_kept(layer):
    routed = routed_copy(layer)
    x = torch.randn(7, 24, requires_grad=True)
    assert x.data_ptr() in saved_of(routed(x))
    for one in (layer, routed):
        one.requires_grad_(False)
    wanted, found = layer(x), routed(x)
    assert x.data_ptr() not in saved_of(found)
    assert routed.weight.data_ptr() in saved_of(found)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (wanted, found)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
    assert routed.weight.grad is None
    assert not routed(x.detach()).requires_grad


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_on_routed_layers_learn_as_on_plain_ones(tmp_path, kind):
    """LoRA keeps the layer that it stands beside, and has two of its own."""
    save_lm(tmp_path / "lm", kind)
    found, ran = [], set()
    for wanted in ("default", "onednn"):
        cfg = small_config(tmp_path, model__peft={"type": "lora", "r": 4}, hardware__gemm=wanted)
        with session_of(cfg) as session:
            lm = session.policy.lm
            for name, p in lm.named_parameters():
                if "lora_B" in name:  # starts at zero
                    p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
            routed = {n: m for n, m in lm.named_modules() if isinstance(m, gemm._Routed)}
            for n, m in routed.items():
                m.register_forward_hook(lambda *_, name=n: ran.add(name))
            states = lm.base_model(input_ids=torch.arange(12).reshape(2, 6) + 4).last_hidden_state
            states.square().sum().backward()
            found.append((states, grads_of(lm)))
    for part in ("base_layer", "lora_A", "lora_B"):
        assert any(part in name for name in ran), part
    assert ran == {name for name in routed if "lm_head" not in name}, "other products"
    (plain, theirs), (states, gradients) = found
    torch.testing.assert_close(states, plain, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == theirs.keys()
    assert all("lora" in name for name in gradients)
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-4)


def test_commands_under_test_are_forked_still_once_a_session_was_here(tmp_path, monkeypatch):
    """It bounds oneDNN's caches by variables, which the forking process needn't have."""
    for name in onednn._CACHES:
        monkeypatch.delenv(name, raising=False)
    before = for_commands()
    with session_of(small_config(tmp_path)):
        assert for_commands() == before


def test_a_layer_in_two_places_stays_one_and_tied_weights_stay_tied():
    shared, words = nn.Linear(4, 4), nn.Embedding(4, 4)
    whole = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared]), "words": words,
                           "head": nn.Linear(4, 4, bias=False)}).eval()
    whole["head"].weight = words.weight
    plain = whole["a"]
    gemm.route_linears(whole)
    assert whole["a"] is whole["b"][0] is not plain
    assert whole["head"].weight is words.weight
    assert not whole["head"].training
    assert type(plain) is nn.Linear, "whoever holds the old layer keeps it as it was"


def test_other_types_than_fp32_take_torch_s_own_product():
    layer = nn.Linear(24, 40)
    routed = routed_copy(layer)
    x = torch.randn(7, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert routed(x).dtype == torch.bfloat16
        assert torch.equal(routed(x), layer(x))
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(routed.to(dtype)(x.to(dtype)), layer.to(dtype)(x.to(dtype)))
    product = gemm.product_of(routed)  # the layers are bf16 by now
    assert torch.equal(product(x.bfloat16(), routed.weight),
                       nn.functional.linear(x.bfloat16(), layer.weight))


@pytest.mark.skipif(onednn.probe(torch.bfloat16) is not None, reason="no oneDNN in bf16 here")
def test_packed_weights_in_bf16_serve_inputs_of_any_type():
    whole = nn.Sequential(nn.Linear(24, 40), conv1d(40, 8))
    plain = copy.deepcopy(whole)
    gemm.route_linears(whole)
    x = torch.randn(3, 24)
    with torch.no_grad(), gemm.packed_weights(whole, torch.bfloat16), \
            torch.autocast("cpu", torch.bfloat16):
        assert all(part.packed.dtype == torch.bfloat16 for part in whole)
        for given in (x, x.bfloat16()):
            torch.testing.assert_close(whole(given), plain(given), rtol=2e-2, atol=2e-2)


def test_packed_weights_serve_for_a_while_and_are_given_back(monkeypatch):
    whole = nn.Sequential(nn.Linear(24, 40))
    gemm.route_linears(whole)
    layer, = whole
    x = torch.randn(3, 24)
    with torch.no_grad():
        plain = whole(x)
        with gemm.packed_weights(whole, torch.float32):
            assert layer.packed is not None
            torch.testing.assert_close(whole(x), plain, rtol=1e-5, atol=1e-6)
            layer.weight.zero_()  # the copy is what is read
            torch.testing.assert_close(whole(x), plain, rtol=1e-5, atol=1e-6)
        assert layer.packed is None
        monkeypatch.setattr(gemm, "PACKED_BYTES", 10)
        with gemm.packed_weights(whole, torch.float32):
            assert layer.packed is None


def test_a_product_that_is_not_exact_is_refused(monkeypatch):
    exact = onednn.linear
    monkeypatch.setattr(onednn, "linear", lambda *args: exact(*args).bfloat16().float())
    onednn.probe.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"oneDNN can't be used.*off by"):
            onednn.choose_gemm(HardwareConfig(gemm="onednn"))
        assert onednn.choose_gemm(HardwareConfig(gemm="auto"), onednn.ONEDNN) == onednn.TORCH
    finally:
        monkeypatch.undo()
        onednn.probe.cache_clear()


def test_a_processor_without_products_in_bf16_takes_torch_s_own(monkeypatch):
    """As all without AVX-512: oneDNN lays no bf16 weight out there."""
    laid_out = onednn.packed

    def refuses(weight):
        if weight.dtype == torch.bfloat16:
            raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support")
        return laid_out(weight)

    monkeypatch.setattr(onednn, "packed", refuses)
    onednn.probe.cache_clear()
    try:
        assert onednn.choose_gemm(HardwareConfig(precision="bf16")) == onednn.TORCH
        with pytest.raises(ConfigError, match="its operator fails here"):
            onednn.choose_gemm(HardwareConfig(precision="bf16", gemm="onednn"))
        assert onednn.choose_gemm(HardwareConfig(gemm="onednn")) == onednn.ONEDNN
    finally:
        monkeypatch.undo()
        onednn.probe.cache_clear()


@pytest.mark.parametrize(("capability", "cpuinfo", "fitting"), [
    ("AVX512", "vendor_id\t: AuthenticAMD\n", onednn.ONEDNN),
    ("AVX512", "vendor_id\t: GenuineIntel\n", onednn.DECODING),
    ("AVX2", "vendor_id\t: AuthenticAMD\n", onednn.TORCH),
    ("AVX2", "vendor_id\t: GenuineIntel\n", onednn.TORCH),
    ("DEFAULT", "Model: ARM\n", onednn.TORCH)])
def test_auto_takes_what_suits_the_processor_unless_a_run_goes_on(
        monkeypatch, caplog, capability, cpuinfo, fitting):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "read_text", lambda self, *_: cpuinfo)
    caplog.set_level("INFO", "ppocli")
    assert onednn.choose_gemm(HardwareConfig()) == fitting
    assert onednn.choose_gemm(HardwareConfig(), "of a later version") == fitting
    assert not caplog.messages
    for key, products in (("default", onednn.TORCH), ("decoding", onednn.DECODING),
                          ("onednn", onednn.ONEDNN)):
        caplog.clear()
        assert onednn.choose_gemm(HardwareConfig(), products) == products
        assert ["as when the run began" in m for m in caplog.messages] == [True] * (
            products != fitting)
        for recorded in (None, onednn.TORCH, onednn.ONEDNN):
            assert onednn.choose_gemm(HardwareConfig(gemm=key), recorded) == products


def test_layers_for_decoding_alone_are_plain_but_for_packed_weights():
    plain, routed = nn.Linear(24, 40), nn.Sequential(nn.Linear(24, 40))
    routed[0].load_state_dict(plain.state_dict())
    gemm.route_linears(routed, onednn.TORCH)
    assert type(routed[0]) is nn.Linear
    gemm.route_linears(routed, onednn.DECODING)
    assert gemm.product_of(routed[0]) is nn.functional.linear
    x = torch.randn(7, 24)
    found, wanted = routed(x), plain(x)
    assert torch.equal(found, wanted)
    assert type(found.grad_fn) is type(wanted.grad_fn)
    with torch.no_grad(), gemm.packed_weights(routed, torch.float32):
        packed = routed[0].packed
        assert torch.equal(routed(x), onednn.linear(x, packed, routed[0].bias))
    assert routed[0].packed is None


@pytest.mark.parametrize(("text", "noted"), [
    (json.dumps({"linear_layers": "oneDNN", "num_threads": 2}), ("oneDNN", 2)),
    (json.dumps({"linear_layers": "torch", "num_threads": None}), ("torch", None)),
    (json.dumps({"num_threads": "2"}), (None, None)), ("{", (None, None)), (None, (None, None))])
def test_what_a_run_began_with_is_noted_in_its_folder(tmp_path, text, noted):
    if text is not None:
        (tmp_path / "env.json").write_text(text)
    assert astuple(environment.arithmetic_of(tmp_path)) == noted
