"""Linear layers through oneDNN: the same numbers, only where it is there, exact and suits the
processor."""

import copy
from pathlib import Path

import pytest
import torch
from sessions import grads_of, session_of, small_config
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppocli.config.schema import HardwareConfig
from ppocli.distributed import onednn
from ppocli.errors import ConfigError
from ppocli.models import kernels as gemm

pytestmark = pytest.mark.skipif(onednn.probe() is not None, reason="no oneDNN here")


def conv1d(inputs, outputs):
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


def routed_copy(layer):
    holder = nn.ModuleList([copy.deepcopy(layer)])
    gemm.route_linears(holder)
    return holder[0]


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Linear(24, 40), (7,)), (nn.Linear(40, 24, bias=False), (2, 5)), (conv1d(24, 40), (0,)),
    (conv1d(96, 8), (2, 5))], ids=["linear", "no bias", "nothing", "narrow conv1d"])
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


def test_adapters_on_routed_layers_learn_as_on_plain_ones(tmp_path):
    """LoRA keeps the layer that it stands beside, and has two of its own."""
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


@pytest.mark.parametrize(("capability", "cpuinfo", "fitting"), [
    ("AVX512", "vendor_id\t: AuthenticAMD\n", onednn.ONEDNN),
    ("AVX512", "vendor_id\t: GenuineIntel\n", onednn.DECODING),
    ("AVX2", "vendor_id\t: GenuineIntel\n", onednn.TORCH)])
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
